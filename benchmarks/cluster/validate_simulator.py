"""The simulator against real processes of this machine: predicted and measured seconds of a step.

    python benchmarks/cluster/validate_simulator.py --output results/
    python benchmarks/cluster/validate_simulator.py --throughput FILE --pipeline FILE --profile FILE

Without `--throughput` it runs `benchmarks/training/throughput.py` with the schedulers and mixes
below, whole micro-batches and two nano-batches, and without `--pipeline` once more with a pipeline
of all processes; without `--profile` it measures the attention kernel by `distca profile`. The
steps' JSON may come from any runs of `throughput.py` without tensor parallelism, on the same
machine, with a core for each process.

The machine as the simulator knows it is measured apart from the steps that are predicted. Measured
while the other processes' cores are as busy as in steps: kernel times (forward by the profile,
backward over forward here), and the rate at which rows are copied. Measured alone: the speed of an
exchange between two processes and the share of a core that it takes, and one number from the steps
of documents of one block, without a pipeline: the time of everything but core attention. Planning
is timed, too, and added, since processes that plan ahead share the ranks' cores in these runs.
Predicted are then the steps of every mix, with every scheduler and without `--distca`: plain
Megatron by `simulate_baseline`, the reference of published speed-ups, too. Context parallelism has
groups of all ranks where this command runs the steps.

Reported: the error of each, the median of all, the error of `tiles`' speed over another way's, and
whether a mix's schedulers, and plain Megatron among them, rank as measured in each mode. Pairs
whose measured times are closer than `TIE` are not ranked, nor are pairs that make the same plans;
all others must be predicted apart, by more than `SAME`, and in the measured order.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.cluster.this_machine import beside_busy_processes, describe_machine
from benchmarks.training.run import parsed
from benchmarks.training.setting import (
    MODES,
    PLAIN,
    SHORT,
    Setting,
    document_lengths,
)
from distca.attention.kernel_timing import fastest
from distca.cost.model_sizes import ModelSize
from distca.cost.profile import Profile
from distca.machine import cpu_name
from distca.plan.span import Int64s
from distca.simulate import (
    BaselineLayout,
    Cluster,
    ModelCosts,
    plan_global_batch,
    simulate_baseline,
    simulate_ticks,
)
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.parallel import ParallelSizes
from megatron_patches.flags.planning import linear_work, schedule_config

SCHEDULERS = ("packed", "per-document-cp", "greedy", "tiles")
MIXES = ("long-tail", "pretrain", "lognormal", "fixed")
TIE, SAME = 0.02, 0.005
"""Relative differences below which measured medians count as equal, and below which predictions
are a tie."""


@dataclass(frozen=True)
class Prediction:
    """Measured and predicted seconds of a mix's steps, trained in one way.

    Attributes:
        stages: number of pipeline stages.
        mix: name of the mix of document lengths.
        way: name of the way to train; `PLAIN`: without `--distca`.
        mode: one of `MODES`; empty for `PLAIN`.
        measured: measured seconds of all batches.
        predicted: predicted seconds of all batches.
        plans: digest of all plans; `PLAIN` where there are none.
    """

    stages: int
    mix: str
    way: str
    mode: str
    measured: float
    predicted: float
    plans: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def batches_of(setting: Setting, mix: str) -> list[list[Int64s]]:
    """Lengths of the documents in each micro-batch of each batch."""
    lengths = np.array(document_lengths(setting, mix))
    number = (np.cumsum(lengths) - 1) // (setting.data_parallel_size * setting.seq_length)
    found = [lengths[number == n] for n in range(setting.batches * setting.micro_batches)]
    return [list(batch) for batch in zip(*[iter(found)] * setting.micro_batches, strict=True)]


def predict_plain(
    setting: Setting, model: ModelSize, mix: str, machine: Cluster, profile: Profile
) -> float:
    """Predicts seconds of all batches of a mix without `--distca`."""
    costs = ModelCosts(model, machine, dtype_bytes=4)
    layout = BaselineLayout(setting.stages, setting.data_parallel_size, 1, setting.micro_batches)
    return sum(
        simulate_baseline("plain", np.concatenate(mine), layout, costs, cost_model=profile).seconds
        for mine in batches_of(setting, mix)
    )


def predict(
    setting: Setting,
    model: ModelSize,
    mix: str,
    args: argparse.Namespace,
    machine: Cluster,
    profile: Profile,
) -> tuple[float, str]:
    """Predicts seconds of all batches of a mix with `--distca`; returns a digest of plans, too.

    Args:
        setting: sizes of the measured steps.
        model: sizes of the trained model.
        mix: name of the mix.
        args: parsed flags of the measured steps, by which they were planned.
        machine: description of this machine.
        profile: kernel times.
    """
    costs = ModelCosts(model, machine, dtype_bytes=4)
    flags = DistcaConfig.from_args(args)
    config = schedule_config(flags, args, setting.processes)
    options = flags.execution_options(ParallelSizes.from_args(args).chunks)
    seconds, digest = 0.0, hashlib.sha1()
    for mine in batches_of(setting, mix):
        make_plans = partial(
            plan_global_batch,
            *(mine, setting.stages, setting.data_parallel_size, config, options),
            linear_work=linear_work(args),
        )
        seconds += fastest(make_plans, lambda: None, 0.1)
        planned = make_plans()
        seconds += simulate_ticks(planned, costs, cost_model=profile).seconds
        for plan in (plan for tick in planned.ticks for plan in tick.plans):
            for part in (plan.placement, plan.tasks):
                for column in fields(part):
                    digest.update(np.ascontiguousarray(getattr(part, column.name)).tobytes())
    return seconds, digest.hexdigest()


Pair = tuple[Prediction, Prediction]


def pairs_apart(predictions: list[Prediction]) -> list[Pair]:
    """Pairs that were measured apart, and have different plans."""
    return [
        (one, other)
        for one, other in itertools.combinations(predictions, 2)
        if abs(one.measured / other.measured - 1) > TIE and one.plans != other.plans
    ]


def is_misplaced(pair: Pair) -> bool:
    """Whether a pair is not predicted apart, or in the other order."""
    one, other = pair
    tie = abs(one.predicted / other.predicted - 1) <= SAME
    return tie or (one.measured < other.measured) != (one.predicted < other.predicted)


def ratio_errors(predictions: Sequence[Prediction]) -> list[float]:
    """Returns the errors of `tiles`' speed over that of ways without DistCA's schedulers, each of
    the same mix: above 0 where the simulator flatters `tiles`."""
    ours = [p for p in predictions if re.fullmatch("tiles, [a-z-]+", p.way)]
    others = [p for p in predictions if not re.search("tiles|greedy|apart", p.way)]
    return [
        (other.predicted / mine.predicted) / (other.measured / mine.measured) - 1
        for mine in ours
        for other in others
        if other.mode in ("", mine.mode) and other.mix == mine.mix
    ]


def of_ratios(predictions: Sequence[Prediction], stages: int, mode: str) -> str:
    """States the errors of ratios in words."""
    errors = ratio_errors([p for p in predictions if p.stages == stages and p.mode in ("", mode)])
    return (
        f"{stages} stages, {mode}: {statistics.median(errors):+.1%} in the median, "
        f"{min(errors):+.1%} to {max(errors):+.1%}, above 0 in {sum(each > 0 for each in errors)} "
        f"of {len(errors)}"
    )


def ranking(predictions: list[Prediction]) -> str:
    """States in words whether the measured order is predicted."""
    wrong = [pair for pair in pairs_apart(predictions) if is_misplaced(pair)]
    if not wrong:
        return "ranked as measured"
    named = (
        f"{one.way} and {other.way} ({abs(one.measured / other.measured - 1):.1%} apart)"
        for one, other in wrong
    )
    return f"ranked as measured, but for {'; '.join(named)}"


def predictions_of(
    setting: Setting,
    model: ModelSize,
    seconds: dict[str, dict[str, list[float]]],
    machine: Cluster,
    profile: Profile,
) -> list[Prediction]:
    """Predicts every mix without `--distca`, and in each way with it.

    Args:
        setting: sizes of the measured steps.
        model: sizes of the trained model.
        seconds: measured seconds of each batch, by mix and way.
        machine: description of this machine.
        profile: kernel times.
    """
    found = []
    for mix in setting.mixes:
        for name, flags in setting.ways().items():
            measured, mode = sum(seconds[mix][name]), ""
            if name == PLAIN:
                predicted, plans = predict_plain(setting, model, mix, machine, profile), PLAIN
            else:
                args = parsed(setting, flags)
                # Megatron-LM pads it when it builds the tokenizer.
                args.padded_vocab_size = model.vocab_size
                mode = MODES[0] if DistcaConfig.from_args(args).ping_pong else MODES[1]
                predicted, plans = predict(setting, model, mix, args, machine, profile)
            found.append(Prediction(setting.stages, mix, name, mode, measured, predicted, plans))
    return found


def report(
    settings: Sequence[Setting],
    machine: Cluster,
    profile: Profile,
    found: list[Prediction],
    commands: list[str],
) -> str:
    """Formats predictions as a page of Markdown."""
    lines = [
        "# The simulator against real processes",
        "",
        *(f"    {command}" for command in commands),
        "",
        f"On {cpu_name()}, torch {torch.__version__}. Kernels: {profile.description}.",
        "",
        *(
            f"* {s.processes} processes, {s.stages} stages: {s.layers} layers of width "
            f"{s.hidden_size}, {s.micro_batches} micro-batches of {s.seq_length:,} tokens a rank, "
            f"{s.batches} batches of each mix, {', '.join(s.modes)}; {pages.medians(s.rounds)}."
            for s in settings
        ),
        "",
        f"Measured rates: the backward pass takes {machine.backward_over_forward:.2f} times as "
        f"long as forward; copies reach {machine.copy_gb_per_s:.1f} GB/s; exchanges reach "
        f"{machine.network_gb_per_s:.2f} GB/s after a latency of "
        f"{1e3 * machine.network_latency:.2f} ms and take {machine.charges.interference:.0%} of a "
        f"core; all but core attention runs at {1e3 * machine.peak_tflops:.1f} GFLOP/s.",
        "",
        pages.table(
            ["stages", "mix", "way", "measured s", "predicted s", "error"],
            [
                [
                    p.stages,
                    p.mix,
                    p.way,
                    f"{p.measured:.3f}",
                    f"{p.predicted:.3f}",
                    f"{p.error:+.1%}",
                ]
                for p in found
            ],
        ),
    ]
    errors = [abs(p.error) for p in found]
    lines += ["", f"Median error {statistics.median(errors):.1%}, largest {max(errors):.1%}.", ""]
    lines += [
        "Errors of the speed of `tiles` over that of plain Megatron, context parallelism, WLB-LLM "
        "and packed documents, of the same mix. Above 0 the simulator flatters `tiles`:",
        "",
        *(f"* {of_ratios(found, s.stages, mode)}" for s in settings for mode in s.modes),
        "",
    ]
    groups = {
        f"{s.stages} stages, {mix}, {mode}": [
            p for p in found if (p.stages, p.mix) == (s.stages, mix) and p.mode in ("", mode)
        ]
        for s in settings
        for mix, mode in itertools.product(s.mixes, s.modes)
    }
    apart = [pair for mine in groups.values() for pair in pairs_apart(mine)]
    right = sum(not is_misplaced(pair) for pair in apart)
    lines += [
        f"Of {len(apart)} pairs of ways of a mix and mode that were measured more than {TIE:.0%} "
        f"apart {right} are predicted in that order, and more than {SAME:.1%} apart:",
        "",
        *(f"* {name}: {ranking(mine)}" for name, mine in groups.items()),
    ]
    return "\n".join(lines)


def run(*arguments: str) -> str:
    """Runs a command of this repository; returns it as one would type it."""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, *arguments], check=True, cwd=root)
    return " ".join(["python", *arguments]).replace("python -m distca", "distca")


def saved_steps(parser: Parser, file: Path) -> dict[str, Any]:
    """Reads the steps that `throughput.py` measured."""
    saved: dict[str, Any] = json.loads(file.read_text())
    if "model" not in saved:
        parser.error(f"{file} is not a throughput.json that `throughput.py --output` wrote")
    return saved


def _steps(parser: Parser, file: Path) -> dict[str, Any]:
    """Reads steps of processes that had a core each."""
    saved = saved_steps(parser, file)
    setting = Setting.of_json(saved["setting"])
    if setting.tensor_parallel > 1 or (setting.micro_batches > 1 and setting.stages == 1):
        parser.error(
            f"{file}: measured with tensor parallelism, or with several micro-batches and no "
            "pipeline: measure without"
        )
    return saved


def without_folders(command: str, folders: dict[Path, str]) -> str:
    """Puts names where a command has folders of this machine, which mean nothing to a reader.

    Args:
        command: command as it was typed.
        folders: names of the folders.
    """
    # A folder before the one that it lies in.
    for folder in sorted(folders, key=lambda each: len(str(each)), reverse=True):
        found = rf"(?<![^\s=]){re.escape(str(folder))}(?=/|\s|$)"
        command = re.sub(found, folders[folder], command)
    return command


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--throughput", type=Path, metavar="FILE", help="steps of throughput.py")
    parser.add_argument("--pipeline", type=Path, metavar="FILE", help="those with a pipeline")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="made by `distca profile`")
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mixes", nargs="+", default=list(MIXES))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    typed = " ".join(["python benchmarks/cluster/validate_simulator.py", *sys.argv[1:]])
    folders = {args.output: "DIR", args.output.absolute(): "DIR"}
    given_files = (args.throughput, "STEPS"), (args.pipeline, "PIPELINE"), (args.profile, "PROFILE")
    for file, name in given_files:
        if file is not None:
            folders.setdefault(file.parent, name)
    args.output = args.output.absolute()
    args.output.mkdir(parents=True, exist_ok=True)
    measured = []
    for given, name, stages in (
        (args.throughput, "throughput", 1),
        (args.pipeline, "pipeline", args.processes),
    ):
        measured.append(given or args.output / name / "throughput.json")
        if given is None:
            run(
                *("benchmarks/training/throughput.py", "--modes", *args.modes),
                *("--schedulers", *SCHEDULERS, "--mixes", *args.mixes),
                *("--processes", str(args.processes)),
                *("--pipeline-model-parallel-size", str(stages)),
                *("--distca-context-parallel-size", str(args.processes // stages)),
                *("--output", str(args.output / name)),
                *("--seq-length", str(args.seq_length), "--hidden-size", str(args.hidden_size)),
                *("--batches", str(args.batches), "--rounds", str(args.rounds)),
            )
    saved = [_steps(parser, file) for file in measured]
    settings = [Setting.of_json(each["setting"]) for each in saved]
    models = [ModelSize(**each["model"]) for each in saved]
    commands = [without_folders(typed, folders)]
    for file, each in zip(measured, saved, strict=True):
        # It says DIR for the folder that it wrote to.
        where = folders.get(file.parent, f"DIR/{file.parent.name}")
        commands.append(str(each["command"]).replace("DIR", where))
    setting, model = settings[0], models[0]
    if setting.stages > 1:
        parser.error(f"{measured[0]}: measured with a pipeline: give it as --pipeline")
    if args.profile is None:
        args.profile = args.output / "simulator_profile.json"
        with beside_busy_processes(setting.processes):
            profiled = run(
                *("-m", "distca", "profile", "--dtype", "fp32"),
                *("--head-dim", str(model.head_dim)),
                *("--heads", str(model.heads), "--kv-heads", str(model.kv_heads)),
                *("--max-length", str(setting.seq_length), "--output", str(args.profile)),
            )
        commands.append(without_folders(profiled, folders))
    profile = Profile.load(args.profile)
    torch.set_num_threads(1)
    seconds = [{mix: file["mixes"][mix]["seconds"] for mix in file["mixes"]} for file in saved]
    rest = statistics.median(value for mix in seconds[0].values() for value in mix[SHORT])
    machine = describe_machine(setting, model, profile, rest)
    found = [
        prediction
        for each in zip(settings, models, seconds, strict=True)
        for prediction in predictions_of(*each, machine, profile)
    ]
    text = report(settings, machine, profile, found, commands)
    rows = [asdict(p) | {"error": p.error} for p in found]
    figures = {
        "settings": [each["setting"] for each in saved],
        "machine": asdict(machine),
        "predictions": rows,
    }
    pages.save(args.output, "simulator", text, __file__, figures)


if __name__ == "__main__":
    main()
