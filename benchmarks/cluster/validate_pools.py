"""Server pools and shared heads on real processes, beside what the simulator says of them.

    python benchmarks/training/throughput.py --processes 4 --micro-batches 4 --modes whole \\
        --schedulers tiles --variants "" "--distca-pool-size 2" "--distca-head-parallel-size 2" \\
        --output STEPS
    distca profile --dtype fp32 --head-dim 32 --heads 8 --kv-heads 2 --output profile.json
    python benchmarks/cluster/validate_pools.py --steps STEPS/throughput.json \\
        --profile profile.json --output DIR

Processes that outnumber the cores share them, so that the wall clock shows the sum of the work.
Compared are bytes, which must be equal, and CPU seconds of each batch's busiest rank: those that
its process took beside those in which the simulated rank computes. Both leave out waiting. Other
work on the machine makes CPU seconds longer, by caches and memory that are shared.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.cluster.this_machine import describe_machine
from benchmarks.cluster.validate_simulator import batches_of, saved_steps, without_folders
from benchmarks.training.run import parsed
from benchmarks.training.setting import PLAIN, Setting
from distca.cost.model_sizes import ModelSize
from distca.cost.profile import Profile
from distca.machine import cpu_name
from distca.schedule import GlobalBatchPlanner, documents_in_turn
from distca.simulate import Cluster, ModelCosts, simulate_ticks
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.parallel import ParallelSizes
from megatron_patches.flags.planning import PlannerConfig


@dataclass(frozen=True)
class Row:
    """A mix of documents, trained in one way.

    Attributes:
        mix: name of the mix.
        way: name of the way.
        measured: CPU seconds of the busiest rank, summed over the batches.
        predicted: seconds for which the busiest simulated rank computes; NaN: not simulated.
        sent: bytes that all ranks sent.
        simulated: bytes that all simulated ranks send.
    """

    mix: str
    way: str
    measured: float
    predicted: float
    sent: int
    simulated: int

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def predict(
    setting: Setting,
    model: ModelSize,
    mix: str,
    flags: list[str],
    machine: Cluster,
    profile: Profile,
) -> tuple[float, int]:
    """Simulates a mix's batches in one way; returns the seconds of the busiest ranks, and bytes.

    Args:
        setting: sizes of the measured steps.
        model: sizes of the trained model.
        mix: name of the mix.
        flags: flags of the way.
        machine: description of this machine.
        profile: kernel times of all heads.
    """
    args = parsed(setting, flags)
    # Megatron-LM pads it when it builds the tokenizer.
    args.padded_vocab_size = model.vocab_size
    config = DistcaConfig.from_args(args)
    sizes = ParallelSizes.from_args(args, config.head_parallel)
    servers = sizes.servers(config.dedicated)
    planning = PlannerConfig.from_args(config, args, servers)
    planner = GlobalBatchPlanner(
        np.arange(servers, dtype=np.int64)[None],
        planning.schedule,
        planning.options(forward_only=False),
        planning.masks,
        linear_work=planning.linear_work,
        row_multiple=planning.sequence_shards * planning.head_parallel,
    )
    costs = ModelCosts(model, machine, dtype_bytes=4, head_parallel=config.head_parallel)
    cost_model = _of_heads(profile, config.head_parallel)
    seconds, sent = 0.0, 0
    for windows in batches_of(setting, mix):
        outcome = simulate_ticks(
            planner.plan(documents_in_turn(windows)), costs, cost_model=cost_model
        )
        seconds += float(outcome.computed.max())
        sent += config.head_parallel * sum(int(each.sum()) for each in outcome.bytes_sent.values())
    return seconds, sent


def _of_heads(profile: Profile, parts: int) -> Profile:
    """Returns the profile of a part of the heads: kernels on a CPU take as long for each head."""
    shape = profile.shape
    return replace(
        profile,
        full_seconds=tuple(tuple(s / parts for s in row) for row in profile.full_seconds),
        diagonal_seconds=tuple(tuple(s / parts for s in row) for row in profile.diagonal_seconds),
        shape=replace(shape, heads=shape.heads // parts, kv_heads=max(shape.kv_heads // parts, 1)),
    )


def rows_of(saved: dict[str, Any], profile: Profile) -> list[Row]:
    """Compares all mixes and ways.

    Args:
        saved: `throughput.json` of steps whose processes share cores.
        profile: kernel times of all heads.
    """
    setting, model = Setting.of_json(saved["setting"]), ModelSize(**saved["model"])
    mixes = saved["mixes"]
    rest = statistics.median(
        seconds for mix in mixes.values() for seconds in mix["short_cpu_seconds"]
    )
    machine = describe_machine(setting, model, profile, rest / setting.micro_batches)
    found = []
    for mix, summary in mixes.items():
        for way, flags in setting.ways().items():
            of_way = summary["ways"][way]
            predicted, simulated = float("nan"), 0
            if way != PLAIN:
                predicted, simulated = predict(setting, model, mix, flags, machine, profile)
            measured = sum(of_way["busiest_cpu_seconds"])
            sent = sum(of_way["bytes_sent_of_ranks"])
            found.append(Row(mix, way, measured, predicted, sent, simulated))
    return found


def page(saved: dict[str, Any], rows: list[Row], command: str, profile: Profile) -> str:
    """Formats the comparison as Markdown."""
    setting = Setting.of_json(saved["setting"])
    plain = {row.mix: row.measured for row in rows if row.way == PLAIN}
    ours = [row for row in rows if row.way != PLAIN]
    errors = [abs(row.error) for row in ours]
    equal = sum(row.sent == row.simulated for row in ours)
    table = [
        [
            *(row.mix, row.way, f"{row.measured:.2f}", f"{plain[row.mix] / row.measured:.3f}"),
            *(
                ("-",) * 3
                if row.way == PLAIN
                else (f"{row.predicted:.2f}", f"{row.error:+.1%}", f"{row.sent / 1e6:.1f}")
            ),
        ]
        for row in rows
    ]
    return "\n".join(
        [
            "# Server pools and shared heads on real processes",
            "",
            f"    {saved['command']}",
            f"    {command}",
            "",
            f"{setting.processes} processes on {cpu_name()}, torch {torch.__version__}, that "
            f"share its cores. Kernels: {profile.description}. {setting.layers} layers of width "
            f"{setting.hidden_size}; {setting.micro_batches} micro-batches of "
            f"{setting.seq_length:,} tokens a rank; {setting.batches} batches of each mix, "
            f"{pages.medians(setting.rounds)}.",
            "",
            "CPU seconds are those of each batch's busiest rank, and the ratio is plain Megatron's "
            "over them.",
            "",
            pages.table(["mix", "way", "CPU s", "ratio", "simulated s", "error", "MB sent"], table),
            "",
            f"Simulated bytes are those sent in {equal} of {len(ours)} rows. The median error of "
            f"seconds is {statistics.median(errors):.1%}, the largest {max(errors):.1%}.",
        ]
    )


def main() -> None:
    """Compares steps that `throughput.py` measured with the simulator."""
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=Path, metavar="FILE", required=True)
    parser.add_argument("--profile", type=Path, metavar="FILE", required=True)
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    args = parser.parse_args()
    saved = saved_steps(parser, args.steps)
    if not saved["setting"].get("shares_cores"):
        parser.error(f"{args.steps}: its processes had a core each: give --processes more of them")
    torch.set_num_threads(1)
    profile = Profile.load(args.profile)
    rows = rows_of(saved, profile)
    folders = {args.steps.parent: "STEPS", args.profile.parent: "PROFILE", args.output: "DIR"}
    command = without_folders(pages.typed("benchmarks/cluster/validate_pools.py"), folders)
    text = page(saved, rows, command, profile)
    figures = {"setting": saved["setting"], "rows": [asdict(row) for row in rows]}
    pages.save(args.output, "pools", text, __file__, figures)


if __name__ == "__main__":
    main()
