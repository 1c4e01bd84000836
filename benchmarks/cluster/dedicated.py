"""What dedicated attention servers gain or cost, which hold no model; simulated.

    python benchmarks/cluster/dedicated.py --output results/

The paper leaves them to future work (Section 8); training has them with `--distca-servers
dedicated:N`. As many GPUs train the same documents in several divisions: all servers with the
model, or some that compute attention alone and the others with their share of the tokens. Dedicated
servers take more attention by `--distca-server-speeds`, and several speeds are tried. Each division
has its fastest number of micro-batches that fits in memory. Writes `dedicated.md`, and prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.cluster.sweep import paper_distribution
from distca.cost.model_sizes import MODELS
from distca.documents.lengths import draw
from distca.plan.span import Int64s
from distca.progress import track
from distca.schedule import ExecutionOptions, ScheduleConfig
from distca.simulate import (
    CLUSTERS,
    ModelCosts,
    Outcome,
    pack_sequences,
    plan_global_batch,
    simulate_ticks,
)

CLUSTER, MODEL = CLUSTERS["dgx-h200"], "llama-8b"
TENSOR, SERVERS = 2, 32
DEDICATED = (0, 8, 16)
"""Dedicated servers; the others hold the model, and must divide a micro-batch's tokens."""
SPEEDS = (1.0, 2.0, 3.0, 4.0)
"""Speeds of dedicated servers, to those with the model, by which they are given attention."""
MICRO_BATCHES = (8, 16, 24)
JOBS = [(131_072, 48), (262_144, 24)]
"""Longest document, and sequences of a global batch as long."""
TOLERANCE = 0.05


class Division(NamedTuple):
    """A division of the servers, and how attention is shared out."""

    dedicated: int
    speed: float
    micro_batches: int


def divisions(context: int, sequences: int) -> list[Division]:
    """All divisions that are tried: those that divide a job's sequences and tokens."""
    return [
        Division(dedicated, speed, number)
        for dedicated in DEDICATED
        for speed in (SPEEDS if dedicated else SPEEDS[:1])
        for number in MICRO_BATCHES
        if sequences % number == 0
        if sequences // number * context % (2 * (SERVERS - dedicated)) == 0
    ]


def outcome(division: Division, sequences: Sequence[Int64s]) -> Outcome:
    """Simulates a global batch."""
    costs = ModelCosts(MODELS[MODEL], CLUSTER, TENSOR)
    ranks = SERVERS - division.dedicated
    config = ScheduleConfig(
        tolerance=TOLERANCE,
        shape=costs.shape,
        cost_model=CLUSTER.attention_cost(costs.shape),
        links=CLUSTER.links(TENSOR),
        server_speeds=(1.0,) * ranks + (division.speed,) * division.dedicated,
    )
    each = len(sequences) // division.micro_batches
    windows = [np.concatenate(sequences[n : n + each]) for n in range(0, len(sequences), each)]
    planned = plan_global_batch(
        windows, 1, ranks, config, ExecutionOptions("tiles"), dedicated=division.dedicated
    )
    return simulate_ticks(planned, costs)


def report(job: tuple[int, int], outcomes: dict[Division, list[Outcome]]) -> list[list[str]]:
    """Rows of a job: each number of dedicated servers with its fastest division that fits."""
    rows = []
    seconds = {
        division: np.array([each.seconds for each in runs])
        for division, runs in outcomes.items()
        if all(each.fits for each in runs)
    }
    best = {
        number: min(
            (division for division in seconds if division.dedicated == number),
            key=lambda division: float(seconds[division].sum()),
            default=None,
        )
        for number in DEDICATED
    }
    first = best[0]
    assert first is not None, "nothing fits with the model on all servers"
    for number, division in best.items():
        cells = [f"{job[0] // 1024}K", f"{SERVERS - number}", f"{number}"]
        if division is None:
            rows.append([*cells, *["out of memory"] * 6])
            continue
        runs = outcomes[division]
        ratios = seconds[first] / seconds[division]
        mean = float(seconds[first].sum() / seconds[division].sum())
        memory = np.max([each.memory_bytes for each in runs], axis=0) / 1e9
        computed = np.mean([each.computed / each.seconds for each in runs], axis=0)
        ranks = SERVERS - number
        rows.append(
            [
                *cells,
                f"{division.micro_batches}",
                f"{division.speed:g}" if number else "-",
                f"{mean:.3f} ({ratios.min():.3f} to {ratios.max():.3f})",
                f"{1 - computed[:ranks].mean():.1%}",
                f"{1 - computed[ranks:].mean():.1%}" if number else "-",
                f"{memory[:ranks].max():.0f}" + (f", {memory[ranks:].max():.0f}" if number else ""),
            ]
        )
    return rows


def in_short(rows: Sequence[Sequence[str]]) -> str:
    """The sentence that the page of claims has."""
    told = [
        f"{speed.split()[0]} ({context}, {dedicated} of {SERVERS} servers dedicated)"
        for context, _, dedicated, _, _, speed, *_ in rows
        if dedicated != "0"
    ]
    return f"In short: {', '.join(told)} times as fast as with the model on all servers."


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    parser.add_argument("--batches", type=int, default=3)
    args = parser.parse_args()
    tried = [(job, division) for job in JOBS for division in divisions(*job)]
    found: dict[tuple[int, int], dict[Division, list[Outcome]]] = {job: {} for job in JOBS}
    for (context, count), division in track(tried, "dedicated", "divisions"):
        lengths = paper_distribution("pretrain", context)
        batches = [
            pack_sequences(draw(lengths, count * context, seed), count, context)
            for seed in range(args.batches)
        ]
        found[context, count][division] = [outcome(division, each) for each in batches]
    rows = [row for job in JOBS for row in report(job, found[job])]
    head = ["longest", "servers with the model", "dedicated", "micro-batches", "their speed"]
    head += ["speed over all with the model", "idle", "idle, dedicated", "GB a GPU"]
    speeds = ", ".join(f"{speed:g}" for speed in SPEEDS)
    page = "\n".join(
        [
            "# Dedicated servers",
            "",
            f"Simulated, not measured: `{pages.typed('benchmarks/cluster/dedicated.py')}`.",
            "",
            f"{MODEL} on {SERVERS * TENSOR} GPUs of {CLUSTER.name}, TP {TENSOR}, no pipeline, "
            f"`tiles` with ping-pong and a tolerance of {TOLERANCE}, {args.batches} global "
            f"batches of {' and '.join(f'{n} sequences of {c // 1024}K' for c, n in JOBS)} tokens, "
            'documents as in the paper\'s "Pretrain". Dedicated servers hold no model and compute '
            "attention alone; the others have their share of the tokens. Each row has the fastest "
            f"of {', '.join(map(str, MICRO_BATCHES))} micro-batches that divide it and fit, and of "
            f"speeds (`--distca-server-speeds`) of {speeds}. Speeds over all with the model: of "
            "all batches, with the least and the greatest of one.",
            "",
            in_short(rows),
            "",
            pages.table(head, rows),
        ]
    )
    pages.save(args.output, "dedicated", page, __file__)


if __name__ == "__main__":
    main()
