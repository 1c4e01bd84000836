"""What the scheduler's tolerance buys: step time and bytes (the paper's Figure 12).

    python benchmarks/plans/tolerance.py --output benchmarks/results

With a higher tolerance servers may differ more in load, and fewer bytes move. Measured: training
steps on real processes of this machine, between which bytes are cheap. By the cost model: one
layer's core attention of an 8B model, where a server computes and moves bytes at the same time, so
that the longer of the two counts. Kernels are taken to run at one rate, links at those of
`distca.cost.link` with 8 GPUs a node; both are assumptions, not measurements.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.training.run import measured
from benchmarks.training.setting import LONG_TAIL, Setting
from distca.cost.kernel_time import AnalyticCost
from distca.cost.link import Links
from distca.cost.model_sizes import MODELS
from distca.cost.volume import plan_bytes
from distca.documents.lengths import DISTRIBUTIONS, draw
from distca.palette import BLUE, ORANGE
from distca.plan import Mask
from distca.runtime.kernel_timing import cpu_name
from distca.schedule import ScheduleConfig, even_capacities, make_scheduler

SCHEDULERS = ("greedy", "tiles")


@dataclass(frozen=True)
class Modelled:
    """Cost of one layer's core attention, forward, on the busiest server.

    Attributes:
        compute_ms: time of kernels.
        link_ms: time for which links are busy.
        megabytes: bytes that all servers send.
    """

    compute_ms: float
    link_ms: float
    megabytes: float


def modelled(
    tolerances: list[float],
    servers: int,
    tokens: int,
    batches: int,
    mix: str,
    flops_per_second: float,
) -> dict[str, list[Modelled]]:
    """Averages the cost model's figures over batches, for each scheduler and tolerance.

    Args:
        tolerances: tolerances of the scheduler.
        servers: number of servers, one GPU each, in nodes of 8.
        tokens: tokens that each server owns.
        batches: number of batches of documents.
        mix: a distribution of `distca/documents/lengths.py`.
        flops_per_second: rate of the kernels.
    """
    shape = MODELS["llama-8b"].attention_shape()
    cost_model, links = AnalyticCost.of_shape(shape, flops_per_second), Links(ranks_per_node=8)
    capacities = even_capacities(servers * tokens, servers)
    found: dict[str, list[Modelled]] = {}
    for name in SCHEDULERS:
        found[name] = []
        for tolerance in tolerances:
            config = ScheduleConfig(
                tolerance=tolerance, shape=shape, cost_model=cost_model, links=links
            )
            rows = []
            for seed in range(batches):
                lengths = draw(DISTRIBUTIONS[mix], servers * tokens, seed)
                plan = make_scheduler(name, config).plan(lengths, capacities, Mask())
                tasks = plan.tasks
                seconds = np.zeros(servers)
                np.add.at(
                    seconds,
                    tasks.server,
                    cost_model.seconds(
                        tasks.q_end - tasks.q_start,
                        tasks.kv_end - tasks.kv_start,
                        tasks.pairs(plan.mask),
                    ),
                )
                moved = plan_bytes(plan, shape).forward()
                link = links.busy_seconds(moved)
                rows.append((1e3 * seconds.max(), 1e3 * link.max(), moved.total / 1e6))
            found[name].append(Modelled(*(float(mean) for mean in np.mean(rows, axis=0))))
    return found


def from_processes(setting: Setting) -> dict[str, list[dict[str, float]]]:
    """Measures seconds and megabytes of all steps, for each scheduler and tolerance."""
    (summary,) = measured(setting).values()
    return {
        name: [
            {
                "seconds": way["seconds"],
                "megabytes": sum(way["bytes_sent_of_ranks"]) / 1e6,
            }
            for tolerance in setting.tolerances
            for way in [summary["ways"][f"{name}, tolerance {tolerance:g}"]]
        ]
        for name in setting.schedulers
    } | {"plain": [{"seconds": summary["ways"]["plain"]["seconds"], "megabytes": 0.0}]}


def table(
    tolerances: list[float],
    processes: dict[str, list[dict[str, float]]],
    model: dict[str, list[Modelled]],
    servers: int,
) -> str:
    """The figures as Markdown."""
    header = ["tolerance"]
    for name in SCHEDULERS:
        header += [f"{name}: steps, s", "MB"]
    for name in SCHEDULERS:
        header += [f"{name} on {servers}: compute, ms", "links, ms", "MB"]
    rows = []
    for number, tolerance in enumerate(tolerances):
        row = [f"{tolerance:g}"]
        for name in SCHEDULERS:
            each = processes[name][number]
            row += [f"{each['seconds']:.3f}", f"{each['megabytes']:.1f}"]
        for name in SCHEDULERS:
            one = model[name][number]
            row += [f"{one.compute_ms:.2f}", f"{one.link_ms:.2f}", f"{one.megabytes:.0f}"]
        rows.append(row)
    return pages.table(header, rows, "---:")


def plot(
    tolerances: list[float],
    processes: dict[str, list[dict[str, float]]],
    model: dict[str, list[Modelled]],
    servers: int,
    path: Path,
) -> None:
    """Measured on the left, modelled on the right; time and bytes have an axis each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    bytes_axes = [panel.twinx() for panel in panels]
    for name, color in zip(SCHEDULERS, (BLUE, ORANGE), strict=True):
        style: dict[str, Any] = {"color": color, "marker": "o"}
        dashed = style | {"linestyle": "--", "marker": "."}
        panels[0].plot(tolerances, [each["seconds"] for each in processes[name]], **style)
        bytes_axes[0].plot(tolerances, [each["megabytes"] for each in processes[name]], **dashed)
        longer = [max(each.compute_ms, each.link_ms) for each in model[name]]
        panels[1].plot(tolerances, longer, label=f"{name}: time", **style)
        bytes_axes[1].plot(
            tolerances, [each.megabytes for each in model[name]], label=f"{name}: bytes", **dashed
        )
    panels[0].axhline(processes["plain"][0]["seconds"], color="grey", label="plain Megatron")
    panels[0].set(title="real processes", ylabel="all steps, seconds", xlabel="tolerance")
    panels[1].set(
        title=f"cost model, {servers} servers",
        ylabel="compute or links of a layer, ms",
        xlabel="tolerance",
    )
    for axis in bytes_axes:
        axis.set(ylabel="bytes moved, MB (dashed)", ylim=(0, None))
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--tolerances",
        type=float,
        nargs="+",
        default=[0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5],
    )
    parser.add_argument("--servers", type=int, default=64, help="of the cost model")
    parser.add_argument("--tokens", type=int, default=65536, help="of each of those servers")
    parser.add_argument("--tflops", type=float, default=400.0, help="of its kernels")
    parser.add_argument(
        "--mix", choices=list(DISTRIBUTIONS), default="prolong", help="of the cost model"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    setting = Setting(
        processes=args.processes,
        stages=1,
        micro_batches=1,
        seq_length=args.seq_length,
        layers=args.layers,
        hidden_size=args.hidden_size,
        batches=args.batches,
        rounds=args.rounds,
        schedulers=SCHEDULERS,
        modes=("ping-pong",),
        tolerances=tuple(args.tolerances),
        mixes=(LONG_TAIL,),
        seed=0,
    )
    model = modelled(
        args.tolerances, args.servers, args.tokens, args.batches, args.mix, 1e12 * args.tflops
    )
    processes = from_processes(setting)
    links = Links()
    page = [
        "# Step time and bytes by tolerance",
        "",
        f"    {pages.typed('benchmarks/plans/tolerance.py')}",
        "",
        f'Two jobs. Measured ("steps"): {setting.processes} processes on {cpu_name()}, '
        f"{setting.layers} layers of width {setting.hidden_size}, {setting.seq_length:,} tokens a "
        f"rank, long-tailed documents, {setting.batches} steps; plain Megatron takes "
        f"{processes['plain'][0]['seconds']:.3f} s. By the cost model: a layer of llama-8b, "
        f"forward, on {args.servers} servers of {args.tokens:,} tokens, documents as in "
        f'"{args.mix}", kernels at {args.tflops:g} TFLOP/s, 8 servers a node with links of '
        f"{links.node_gb_per_s:g} GB/s inside and {links.network_gb_per_s:g} outside; compute "
        "and links of the busiest server. Nothing of the second was measured.",
        "",
        table(args.tolerances, processes, model, args.servers),
        "",
        "![Step time and bytes by tolerance](tolerance.png)",
    ]
    figures = {
        "setting": asdict(setting),
        "processes": processes,
        "model": {name: [asdict(each) for each in rows] for name, rows in model.items()},
    }
    pages.save(args.output, "tolerance", "\n".join(page), figures)
    plot(args.tolerances, processes, model, args.servers, args.output / "tolerance.png")


if __name__ == "__main__":
    main()
