"""Claims of Tetris on load and first tokens: Sections 7.1 to 7.3."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.claims import Claim, number, span, stored_json, stored_table
from benchmarks.serving.papers.verdicts import (
    holds,
    judged,
    made_by,
    missing,
    not_possible,
    tests,
)
from distca.simulate.requests import PRESETS, draw_trace

CAPACITY = made_by("cdsp_capacity")
ABLATIONS = made_by("cdsp_ablations", "--requests 500 --seeds 0 1 --output DIR")
MODELS = "llama-8b", "llama-70b"
TRACES = "the paper's traces, and its prefills of 70B, are not published (see above)"
NOTE = (
    "*Tetris's traces*: its requests come from production and are not published. Here they arrive "
    "as a Poisson process, with lengths of a log-normal of its means and ends. Prefills of 8B take "
    "what its Table 1 says. It lists none of 70B, so that they are simulated, with overheads."
)
"""What the page says of all rows on load."""


def ablated(model: str) -> list[dict[str, Any]]:
    """Figures of a model's mixes, short prompts first."""
    found = [each for each in stored_json("serving/cdsp_ablations") if each["model"] == model]
    assert [each["trace"] for each in found] == [*PRESETS]
    return found


def at_best_load(model: str, at: int) -> list[float]:
    """Seconds of baselines over CDSP's at the best baseline's load, by percentile."""
    return [
        pair[at]
        for each in ablated(model)
        for name, pair in each["over_cdsp"].items()
        if name != "single-chunk"
    ]


def evaluation() -> list[Claim]:
    """Sections 7.1 to 7.3."""
    drawn = {name: draw_trace(preset, 1000, 0) for name, preset in PRESETS.items()}
    means = [np.mean([r.prompt for r in trace.requests]) / 1024 for trace in drawn.values()]
    (small, large) = (ablated(name) for name in MODELS)
    gains = [[each["capacities"]["cdsp"] / each["load"] for each in of] for of in (small, large)]
    paper = stored_table("serving/cdsp_capacity", "trace", "limit, s")
    others = [number(row["CDSP over fixed-8"]) for row in paper]
    worst = all(
        min(each["capacities"], key=each["capacities"].__getitem__) == "fixed-16" for each in small
    )
    throughput = [
        [each["capacities"]["cdsp"] / each["capacities"][name] for each in of for name in names]
        for of, names in (
            (small, ("fixed-8", "fixed-16", "greedy")),
            (large, ("fixed-8", "greedy")),
        )
    ]
    constant = [
        [ratio[0] for each in of for rates in each["constant"].values() for ratio in rates.values()]
        for of in (small, large)
    ]
    chunks = [
        [
            max(ratio[at] for ratio in each[way].values())
            for each in of
            for way in ("without_chunks", "bounded")
        ]
        for of in (small, large)
        for at in (0, 1)
    ]
    alone = [
        each["capacities"]["cdsp"] / each["capacities"]["single-chunk"] for each in small + large
    ]
    light = [each["constant"][rate]["0.25"][0] for each in small for rate in ("0.1", "0.7")]
    lighter = light[0::2], light[1::2]
    return [
        Claim(
            "Section 7.1: traces of production, mean lengths",
            "23.6K, 32.8K and 50.1K tokens",
            f"drawn: {', '.join(f'{mean:.1f}K' for mean in means)}; ends are the paper's",
            judged(means, [23.6, 32.8, 50.1], "the draw has few requests"),
            tests("simulate/test_requests"),
        ),
        Claim(
            "Section 7.1: arrivals of production",
            "timestamps of the traces, scaled",
            "Poisson arrivals; `distca simulate --serving --trace FILE` takes real ones",
            not_possible("the traces are not published"),
            tests("commands/test_serving_requests"),
        ),
        Claim(
            "Figure 8: load over that of the best baseline, Llama 8B",
            "1.20 to 1.45 times",
            f"{span(gains[0])} times (with 1,000 requests of 3 seeds {span(others)})",
            judged([min(gains[0]), max(gains[0])], [1.20, 1.45], TRACES),
            f"{CAPACITY}; {ABLATIONS}",
        ),
        Claim(
            "Figure 8: order of the baselines, Llama 8B",
            "fixed SP 16 is worst, LoongServe's greedy is between SP 16 and SP 8",
            "the same in all three mixes" if worst else "another order",
            holds(worst, "the order", TRACES),
            ABLATIONS,
        ),
        Claim(
            "Figure 8: load over that of the best baseline, Llama 70B",
            "1.21 to 1.43 times",
            f"{span(gains[1])} times, by simulated prefills on 8 ranks of 4 A100s",
            judged([min(gains[1]), max(gains[1])], [1.21, 1.43], TRACES),
            ABLATIONS,
        ),
        Claim(
            "Figure 8: TBT of LoongServe over that of large TP",
            "P50 55% to 67% higher, P99 comparable",
            "decode ranks have one size of TP in a simulation",
            missing("LoongServe's decoding on prefill ranks"),
            tests("simulate/test_requests"),
        ),
        Claim(
            "Figure 9: first tokens of baselines over Tetris's at the best one's load, P50",
            "8B 1.64 to 2.78 times, 70B 2.86 to 4.17 times",
            " and ".join(f"{span(at_best_load(name, 0))} ({name})" for name in MODELS),
            judged(
                [x for name in MODELS for f in (min, max) for x in [f(at_best_load(name, 0))]],
                [1.64, 2.78, 2.86, 4.17],
                f"worse baselines are far beyond their own load; {TRACES}",
            ),
            ABLATIONS,
        ),
        Claim(
            "Figure 9: the same at P99",
            "8B 1.52 to 3.13 times, 70B 2.27 to 4.35 times",
            " and ".join(f"{span(at_best_load(name, 1))} ({name})" for name in MODELS),
            judged(
                [x for name in MODELS for f in (min, max) for x in [f(at_best_load(name, 1))]],
                [1.52, 3.13, 2.27, 4.35],
                f"as for P50; {TRACES}",
            ),
            ABLATIONS,
        ),
        Claim(
            "Figure 10: throughput over that of each baseline at its highest load",
            "8B 1.24 to 3.38 times, 70B 1.15 to 1.81 times",
            f"{span(throughput[0])} and {span(throughput[1])} times",
            judged(
                [f(of) for of in throughput for f in (min, max)], [1.24, 3.38, 1.15, 1.81], TRACES
            ),
            ABLATIONS,
        ),
        Claim(
            "Figures 11 and 12: fixed improvement rates over those by load",
            "small rates suit light loads, large ones heavy loads; rates by load are near the best",
            f"at a quarter of the load medians of 8B are {span(lighter[0])} times as long with "
            f"0.1, and {span(lighter[1])} times with 0.7; over all loads and rates 8B takes "
            f"{span(constant[0])} and 70B {span(constant[1])} times as long",
            holds(
                max(lighter[0]) < min(lighter[1]) and min(*constant[0], *constant[1]) > 0.9,
                f"up to {1 - min(*constant[0], *constant[1]):.0%} where another rate is better",
                "rates are profiled on other requests than those that are measured, as in serving",
            ),
            ABLATIONS,
        ),
        Claim(
            "Figure 13: first tokens of single chunks over those of CDSP, at most, by load",
            "P50 2.33 to 4.17 (8B) and 2.71 to 4.77 (70B), P99 2.64 to 3.58 and 2.43 to 3.23",
            f"P50 {span(chunks[0])} and {span(chunks[2])}, P99 {span(chunks[1])} and "
            f"{span(chunks[3])}; in load {span(alone)} times",
            judged(
                [f(of) for n in (0, 2, 1, 3) for of in [chunks[n]] for f in (min, max)],
                [2.33, 4.17, 2.71, 4.77, 2.64, 3.58, 2.43, 3.23],
                "the reason was not found; chunks gain as little with bounds on groups as without, "
                f"and {TRACES}",
            ),
            ABLATIONS,
        ),
    ]
