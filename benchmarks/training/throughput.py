"""Tokens per second of plain packed Megatron and of `--distca`, on real processes.

    python benchmarks/training/throughput.py --schedulers tiles --modes whole --mixes long-tail
    python benchmarks/training/throughput.py --output DIR
    torchrun --nproc-per-node 8 benchmarks/training/throughput.py --tensor-model-parallel-size 4 ...

Windows of documents, none longer than a rank's tokens, are trained on by plain Megatron and by each
scheduler in each mode (all of them, unless chosen) in turn, in the same processes, so that a
machine whose speed drifts slows all. A way's steps follow each other as in training: the next one
is planned ahead, by processes that share the ranks' cores. Each way to train has a model of its
own, and all are in memory together: choose few ways for a large model. Flags that are not listed by
`--help` are `pretrain_gpt.py`'s, and hold for every way.

By itself the command starts as many processes as there are GPUs or cores. On a cluster torchrun (or
`launch/slurm/throughput.sh`) starts them on every node. On GPUs they talk by NCCL, else by gloo.

Reported for each way are medians over the rounds, summed over the batches:

* tokens/s, and the ratio of plain Megatron's time to the way's;
* MFU: model operations, without recomputation, over those that the devices could have done;
* pairs max/mean: core attention of the busiest rank over the mean, between two points at which all
  ranks wait for each other: a step of plain Megatron, a tick of `--distca`. And the same of the
  kernels' measured seconds;
* exposed: for which part of a step a rank waits for exchanges, on average; that is also where it
  waits for ranks that are late;
* MB sent: what all ranks send in core attention's exchanges, in all batches;
* peak MB: tensors of a step and the buffers of core attention, on the rank that has most, beside
  parameters, gradients and the optimizer's state;
* ideal: the ratio that perfect balance of the visible pairs would give if moving bytes and planning
  cost nothing.

Without pipeline stages the time of a step is taken to be `rest + c * pairs of the busiest rank`;
`c` and `rest` follow from the step itself and from one whose documents are all one block long, with
hardly a pair. Measured times can beat the ideal: kernels run faster on longer tasks. Processes that
the command starts on CPUs are pinned to a core each. With more processes than cores the wall clock
shows the amount of work, so the CPU seconds of each batch's busiest rank stand there, too, summed
over the batches.

With stages a batch is several micro-batches, and `--distca` is measured with each stage's servers
apart, too. On CPUs cores are usually fewer than processes then, so beside the wall clock stand the
CPU time of the ranks and the *replayed* time: how long the step would take with a core for each
process and with messages that take no time (`summary.py`). The ideal is that of passes that take
`rest + c * pairs`, fitted to plain Megatron's, with pairs perfectly shared out.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.training.run import begin, measure, measured, model_size, parsed
from benchmarks.training.setting import MIXES, MODES, Setting
from distca.machine import cpu_name
from distca.schedule import SCHEDULERS
from distca.simulate import peak_tflops

SET_HERE = {
    "--distca": "one way is without it",
    "--distca-scheduler": "give --schedulers",
    "--distca-tolerance": "give --tolerances",
    "--distca-ping-pong": "give --modes",
    "--no-distca-ping-pong": "give --modes",
    "--distca-pool-stages": "both ways are measured",
    "--no-distca-pool-stages": "both ways are measured",
    "--distca-servers": "plain Megatron has no dedicated servers",
    "--micro-batch-size": "it is 1",
    "--global-batch-size": "give --micro-batches",
    "--num-layers-per-virtual-pipeline-stage": "stages are not divided further here",
    "--data-path": "give --mixes",
    "--split": "give --mixes",
}
"""Flags of `pretrain_gpt.py` that are not for the user to set, and why."""
NOT_HERE = (
    *("--save", "--no-save-", "--load", "--no-load-", "--finetune", "--eval-", "--exit-", "--log-"),
    *("--tensorboard-", "--train-iters", "--distca-trace", "--distca-max-document-length"),
)
"""Prefixes of flags of `pretrain_gpt.py` that would do nothing here."""


def build_parser() -> Parser:
    parser = Parser(
        __doc__,
        {"tolerances": 0},
        epilog="All other flags are pretrain_gpt.py's, and hold for every way to train.",
    )
    parser.add_argument("--processes", type=int, help="default: torchrun's, or one a GPU or core")
    parser.add_argument(
        "--only-check",
        type=int,
        metavar="N",
        help="only check the flags, as torchrun with N processes would find them",
    )
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, help="default: twice the stages, or one")
    parser.add_argument("--seq-length", type=int, default=8192, help="tokens of a rank")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schedulers", nargs="+", default=list(SCHEDULERS), choices=[*SCHEDULERS])
    parser.add_argument(
        "--modes", nargs="+", default=list(MODES), choices=MODES, help="two nano-batches or one"
    )
    parser.add_argument(
        "--tolerances",
        type=float,
        nargs="+",
        default=[0.02],
        help="of server loads; small, as bytes between processes of one machine are cheap",
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        default=[""],
        metavar="FLAGS",
        help="further flags of ways with --distca, quoted; each is a variant, '' has none of them",
    )
    parser.add_argument("--mixes", nargs="+", default=list(MIXES), choices=MIXES)
    parser.add_argument("--seed", type=int, default=0, help="of the document lengths")
    parser.add_argument(
        "--peak-tflops",
        type=float,
        help="of a device, for MFU; default: what is known of the GPU, with --bf16",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="write throughput.json and throughput.md there"
    )
    return parser


def setting_of(args: argparse.Namespace, megatron_flags: Sequence[str], started: int) -> Setting:
    """Makes the setting of a measurement.

    Args:
        args: parsed flags of `build_parser`.
        megatron_flags: all other flags.
        started: processes that a launcher started; 0: there is none.

    Raises:
        ValueError: the flags don't go together, or are not for this command.
    """
    _refuse_flags([*megatron_flags, *" ".join(args.variants).split()])
    gpus = torch.cuda.device_count()
    processes = args.processes
    if processes is None:
        processes = started or gpus or len(os.sched_getaffinity(0))
    if started and processes != started:
        raise ValueError(
            f"--processes {processes}, but the launcher started {started}: leave it out"
        )
    if not started and gpus and processes > gpus:
        raise ValueError(f"--processes {processes} on {gpus} GPUs: give at most that")
    stages, tensor = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    if processes % (stages * tensor):
        raise ValueError(
            f"{processes} processes are not a multiple of tensor x pipeline size, "
            f"{tensor} x {stages}"
        )
    peak = args.peak_tflops
    if peak is None and gpus and "--bf16" in megatron_flags:
        peak = peak_tflops(torch.cuda.get_device_name())
    setting = Setting(
        processes=processes,
        stages=stages,
        micro_batches=args.micro_batches or (1 if stages == 1 else 2 * stages),
        seq_length=args.seq_length,
        layers=args.num_layers,
        hidden_size=args.hidden_size,
        batches=args.batches,
        rounds=args.rounds,
        schedulers=tuple(dict.fromkeys(args.schedulers)),
        modes=tuple(dict.fromkeys(args.modes)),
        tolerances=tuple(dict.fromkeys(args.tolerances)),
        mixes=tuple(dict.fromkeys(args.mixes)),
        seed=args.seed,
        tensor_parallel=tensor,
        megatron_flags=tuple(megatron_flags),
        peak_tflops=peak,
        variants=tuple(dict.fromkeys(args.variants)),
        shares_cores=not gpus and stages == 1 and processes > len(os.sched_getaffinity(0)),
    )
    for flags in setting.ways().values():
        parsed(setting, flags)
    return setting


def _refuse_flags(megatron_flags: Sequence[str]) -> None:
    for flag in megatron_flags:
        name = flag.partition("=")[0]
        if name in SET_HERE:
            raise ValueError(f"{name} is not for this benchmark: {SET_HERE[name]}")
        if name.startswith(NOT_HERE):
            raise ValueError(f"{name} does nothing here: leave it out")


def run_launched(setting: Setting, told: Mapping[str, str]) -> dict[str, Any] | None:
    """Measures in a process that a launcher started; returns the summaries on rank 0."""
    from megatron_patches.loop.failure_report import ending_the_job_on_failure

    with ending_the_job_on_failure(told):
        begin(setting, int(told["RANK"]), int(told["LOCAL_RANK"]))
        return measure(setting)


_Way = dict[str, Any]
_COLUMNS: dict[str, tuple[str, Callable[[_Way], str]]] = {
    "tokens/s": ("tokens_per_second", lambda way: f"{way['tokens_per_second']:.0f}"),
    "ratio": ("ratio", lambda way: f"{way['ratio']:.3f}"),
    "MFU": ("mfu", lambda way: f"{way['mfu']:.1%}"),
    "pairs max/mean": ("pairs_max_over_mean", lambda way: f"{way['pairs_max_over_mean']:.2f}"),
    "kernel s max/mean": (
        "kernels_max_over_mean",
        lambda way: f"{way['kernels_max_over_mean']:.2f}",
    ),
    "exposed": ("exposed_share", lambda way: f"{way['exposed_share']:.1%}"),
    "MB sent": (
        "bytes_sent_of_ranks",
        lambda way: f"{sum(way['bytes_sent_of_ranks']) / 1e6:.1f}",
    ),
    "peak MB": ("peak_bytes", lambda way: f"{way['peak_bytes'] / 1e6:.1f}"),
    "busiest CPU s": (
        "busiest_cpu_seconds",
        lambda way: f"{sum(way['busiest_cpu_seconds']):.2f}",
    ),
    "CPU s of ranks": (
        "replayed_seconds",
        lambda way: ", ".join(f"{cpu:.2f}" for cpu in way["cpu_seconds_of_ranks"]),
    ),
    "replayed s": ("replayed_seconds", lambda way: f"{way['replayed_seconds']:.2f}"),
    "replayed ratio": ("replayed_ratio", lambda way: f"{way['replayed_ratio']:.3f}"),
    "ideal": ("ideal_ratio", lambda way: f"{way['ideal_ratio']:.3f}"),
    "of ideal": (
        "ideal_ratio",
        lambda way: f"{way.get('replayed_ratio', way['ratio']) / way['ideal_ratio']:.1%}",
    ),
}
"""By title of a column: the figure that a way must have for it, and the function of its cell."""


def table(setting: Setting, summaries: dict[str, Any]) -> str:
    """Formats the figures as Markdown; a column for which no way has a figure is left out."""
    ways = [
        (mix, name, summary["ways"][name])
        for mix, summary in summaries.items()
        for name in setting.ways()
    ]
    shown = {
        title: cell
        for title, (key, cell) in _COLUMNS.items()
        if any(way.get(key) is not None for _, _, way in ways)
    }
    rows = []
    for mix, name, way in ways:
        cells = [
            cell(way) if way.get(_COLUMNS[title][0]) is not None else "-"
            for title, cell in shown.items()
        ]
        rows.append([mix, name, *cells])
    return pages.table(["mix", "way", *shown], rows)


def page(setting: Setting, figures: dict[str, Any]) -> str:
    """Makes the page of a measurement from what `throughput.json` keeps of it."""
    peak = "not known" if setting.peak_tflops is None else f"{setting.peak_tflops:g} TFLOP/s"
    model, versions = figures["model"], figures["versions"]
    lines = [
        "# Throughput",
        "",
        f"    {figures['command']}",
        "",
        f"{setting.processes} processes on {figures['device']} (peak: {peak}); "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
        + f". {model['layers']} layers of width {model['hidden_size']}, {model['heads']} heads and "
        f"{model['kv_heads']} key-value heads of {model['head_dim']}; tensor size "
        f"{setting.tensor_parallel}, {setting.stages} stages; {setting.micro_batches} "
        f"micro-batches of {setting.seq_length:,} tokens a rank; {setting.batches} batches of each "
        f"mix, {pages.medians(setting.rounds)}. What the columns mean: "
        "`benchmarks/training/throughput.py`.",
        "",
        table(setting, figures["mixes"]),
    ]
    return "\n".join(lines)


def save(folder: Path, setting: Setting, summaries: dict[str, Any], launched: bool) -> None:
    """Writes throughput.json and throughput.md, and prints the page.

    Args:
        folder: folder of the files, made if need be.
        setting: sizes and ways of the measurement.
        summaries: summary of each mix.
        launched: a launcher started the processes.
    """
    launcher = "torchrun ..." if launched else "python"
    figures = {
        "command": pages.typed("benchmarks/training/throughput.py", launcher),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name(),
        "versions": {name: version(name) for name in ("torch", "megatron-core")},
        "setting": asdict(setting),
        "model": asdict(model_size(parsed(setting, []))),
        "mixes": summaries,
    }
    pages.save(folder, "throughput", page(setting, figures), __file__, figures)


def main() -> None:
    parser = build_parser()
    args, megatron_flags = parser.parse_known_args()
    told = os.environ
    launched = "RANK" in told
    try:
        started = int(told["WORLD_SIZE"]) if launched else 0
        setting = setting_of(args, megatron_flags, args.only_check or started)
    except ValueError as error:
        parser.error(str(error))
    if args.only_check is not None:
        return
    summaries = run_launched(setting, told) if launched else measured(setting)
    if summaries is None:
        return
    if args.output is None:
        print(table(setting, summaries))
    else:
        save(args.output, setting, summaries, launched)


if __name__ == "__main__":
    main()
