"""What load Tetris' groups of ranks sustain in our engine, whose ranks have their iterations in
common.

    python benchmarks/serving/rank_groups.py --output benchmarks/results/serving

Requests of the paper's three traces on 16 prefill ranks, llama-8b by its Table 1. Our engine's own
scheduler gives prompts their ranks and feeds them; iterations take the fitted seconds. Beside it is
what the same plans would sustain if groups that share no ranks did not wait for each other, as in
the paper. Writes `rank_groups.md` and prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from distca.cost.model_sizes import MODELS
from distca.progress import track
from distca.schedule.serving.cdsp import ImprovementRates, published_model
from distca.schedule.serving.cdsp.load import Growth
from distca.simulate import CLUSTERS
from distca.simulate.requests import (
    PRESETS,
    RequestTrace,
    ServingCluster,
    describe_cluster,
    draw_trace,
    find_capacity,
    planned_seconds,
    prefill_seconds,
)

WAYS: dict[str, tuple[str, Growth]] = {
    "fixed-8": ("fixed-8", 0.0),
    "greedy": ("greedy", 0.0),
    "single-chunk, at most 4": ("single-chunk", (0.25, 4)),
    "cdsp": ("cdsp", 0.25),
    "cdsp, at most 4": ("cdsp", (0.25, 4)),
}
"""Strategy, improvement rate and most ranks of a group, by name."""
BLOCK = 1024
TOKENS = (65_536, 131_072, 262_144)
"""Most tokens of an iteration that are tried."""
SHOWN = 131_072
PART = 0.75
"""Share of the load that fixed groups of 8 sustain, for times to the first token."""


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    times, model = published_model(), MODELS["llama-8b"]
    cluster = describe_cluster(times, CLUSTERS["dgx-a100"], model, 16, 2, 8, block_size=BLOCK)
    traces = {name: draw_trace(PRESETS[name], args.requests, args.seed) for name in PRESETS}
    bears = [bears_of(name, traces[name], cluster) for name in track(traces, "groups", "traces")]
    load = PART * float(bears[0][1])
    page = [
        "# Groups of ranks in our engine",
        "",
        f"`{pages.typed('benchmarks/serving/rank_groups.py')}`",
        "",
        "Requests a second at which 99% of "
        f"{args.requests:,} requests have their first token within 25 times the mean of requests "
        "that are alone. 16 prefill ranks of dgx-a100 on two nodes, llama-8b by Table 1 of Tetris, "
        f"one seed. The engine's own scheduler, in iterations of {SHOWN:,} tokens, "
        f"{SHOWN // 16:,} of each rank, and blocks of {BLOCK:,}. In brackets: if groups that share "
        "no ranks did not wait for each other.",
        "",
        pages.table(["trace", *WAYS], [row[:1] + row[2:] for row in bears]),
        "",
        "Iterations are common to all ranks: each lasts as long as its slowest group, so ranks "
        "with short prefixes wait for those with long ones.",
        "",
        f"Seconds to the first token of the short trace at {load:.2f} requests a second, {PART:g} "
        "times what fixed groups of 8 sustain, by the most tokens of an iteration:",
        "",
        pages.table(["tokens", *(f"{way}, P50, P99" for way in WAYS)],
                    [*by_tokens(traces["short"].at_rate(load), cluster)]),
    ]  # fmt: skip
    pages.save(args.output, "rank_groups", "\n".join(page), __file__)


def bears_of(name: str, trace: RequestTrace, cluster: ServingCluster) -> list[str]:
    """Returns a row: the trace, what fixed groups of 8 sustain in the engine, and what each way
    does, in brackets where groups wait for nobody."""
    cells, first = [], 0.0
    for strategy, growth in WAYS.values():
        rates = ImprovementRates({0.0: growth})
        engine, planned = (
            find_capacity(
                trace,
                replace(cluster, max_num_batched_tokens=SHOWN),
                strategy,
                rates,
                precision=0.01,
                seconds_of=seconds_of,
            ).per_second
            for seconds_of in (prefill_seconds, planned_seconds)
        )
        first = first or engine
        cells.append(f"{engine:.2f} ({planned:.2f})")
    return [name, f"{first}", *cells]


def by_tokens(trace: RequestTrace, cluster: ServingCluster) -> Iterator[list[str]]:
    """Yields rows of percentiles, by the most tokens of an iteration."""
    for tokens in TOKENS:
        row = [f"{tokens:,}"]
        for strategy, growth in WAYS.values():
            rates = ImprovementRates({0.0: growth})
            at = replace(cluster, max_num_batched_tokens=tokens)
            seconds = prefill_seconds(trace, at, strategy, rates)
            row.append(", ".join(f"{each:.2f}" for each in np.percentile(seconds, [50, 99])))
        yield row


if __name__ == "__main__":
    main()
