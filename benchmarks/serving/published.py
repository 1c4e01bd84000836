"""Published times of prefills and decode steps beside simulated ones, with and without overheads.

    python benchmarks/serving/published.py --output benchmarks/results/serving

Rates and overheads are fitted to one half of the numbers that three papers publish, and judged on
the other half; then the halves are swapped. `published_times.py` has the numbers with their places,
`published_stacks.py` what predicts them, and `held_out.py` the fit. Writes `published.md` and
`published.json`, and prints the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.claims import span
from benchmarks.serving.held_out import Judged, Values, fit, halves, judge
from benchmarks.serving.published_claims import Seconds, claims, pairs
from benchmarks.serving.published_stacks import PARAMETERS, Stacks, plan_of, rates_alone, start
from benchmarks.serving.published_times import NUMBERS, PAPERS, UNUSED, Number, Run
from distca.cost.model_sizes import MODELS
from distca.plan.span import Floats
from distca.progress import track
from distca.schedule.serving.scheduled import ScheduledTokens
from distca.simulate import CLUSTERS, PUBLISHED
from distca.simulate.requests.costs import PlannedCosts
from distca.simulate.serving import (
    DECODE_OVERHEADS,
    EAGER_DECODE_OVERHEADS,
    PARTS,
    PREFILL_OVERHEADS,
    SHARED_DECODE_OVERHEADS,
    InferenceCosts,
    captured_by_engine,
    decode_overheads,
    simulate_step,
)
from distca.simulate.serving.iterations import simulate_iteration

SEED, ROUNDS, SEARCHES = 0, 3, 2
BLOCK = 16


class Fitted:
    """Fits with or without overheads, held out and to all numbers.

    Attributes:
        stacks: what predicts the numbers.
        judged: errors on held-out numbers, and of both fits on what they saw.
        values: parameters fitted to all numbers.
    """

    def __init__(self, overheads: bool) -> None:
        self.stacks, self._overheads = Stacks(), overheads
        self.all = range(len(self.stacks.groups))
        split = halves(self.stacks.groups, SEED)
        self.sizes = len(split[0]), len(split[1])
        self.judged: Judged = judge(self.stacks, split, self.fit)
        self.values = self.fit(self.all)

    def fit(self, numbers: Sequence[int]) -> dict[str, float]:
        """Fits to numbers; partitions of chains are searched for what is found, and it is fitted
        again."""
        parameters = PARAMETERS if self._overheads else rates_alone()
        values = start(self._overheads)
        for _ in range(SEARCHES):
            self.stacks.partition(values)
            values = fit(self.stacks, parameters, numbers, ROUNDS, start=values)
        self.stacks.partition(values, 64)
        return values

    @property
    def errors(self) -> Floats:
        """Held-out errors of the numbers, `[numbers]`."""
        return self.judged.errors[: len(NUMBERS)]

    @property
    def of_all(self) -> Floats:
        """Errors of the fit to all numbers, `[numbers]`."""
        return np.expm1(self.stacks.residuals(self.values, self.all, None)[: len(NUMBERS)])


def summary_section(fits: dict[str, Fitted]) -> Iterator[str]:
    """Errors and orders."""
    compared = pairs()
    papers = [np.array([n.run.paper == paper for n in NUMBERS]) for paper in PAPERS]
    rows = []
    for what, each in fits.items():
        for name, errors in (("held out", each.errors), ("fitted to all", each.of_all)):
            sizes = np.abs(errors)
            ours = [
                number.value * (1 + error) for number, error in zip(NUMBERS, errors, strict=True)
            ]
            ordered = np.mean([ours[first] < ours[second] for first, second in compared])
            of_papers = (
                f"{np.median(sizes[of]):.1%}" if of.any() else "none used" for of in papers
            )
            rows.append(
                (
                    *(what, name, f"{np.median(sizes):.1%}", *of_papers),
                    *(f"{np.mean(sizes <= 0.1):.0%}", f"{sizes.max():.0%}", f"{ordered:.1%}"),
                )
            )
    with_overheads, without = fits.values()
    counts = ", ".join(
        f"{int(of.sum())} of {paper}" for paper, of in zip(PAPERS, papers, strict=True)
    )
    orders = sum(with_overheads.sizes) - len(NUMBERS)
    better = "smaller" if with_overheads.judged.median < without.judged.median else "not smaller"
    yield from (
        f"{len(NUMBERS)} numbers: {counts}. Half of the numbers of each paper and kind of run, "
        f"drawn with seed {SEED}, and half of the {orders} orders without times are fitted by "
        f"{len(PARAMETERS)} parameters ({len(rates_alone())} without overheads), "
        f"{with_overheads.sizes[0]} and {with_overheads.sizes[1]} at a time. *Held out*: each "
        "number as predicted by the fit that did not see it. *In order*: share of the "
        f"{len(compared)} pairs of configurations for the same prompt whose published times differ "
        "by more than 5% that are in the published order.",
        "",
        pages.table(
            ["fit", "numbers", "median error", *PAPERS, "within 10%", "largest", "in order"], rows
        ),
        "",
        f"The held-out error with overheads is {better}, so `distca simulate` charges them for "
        "prefills, decode steps and requests. With `--baseline-ideal` it charges nothing. Which "
        "terms there are, and where their values start, was decided with all numbers in view, so a "
        "fourth system may have larger errors.",
        "",
    )


def parameters_section(fits: dict[str, Fitted]) -> Iterator[str]:
    """Fitted values, and the commands' defaults."""
    found = fits["with overheads"]
    begin = {name: each.start for name, each in PARAMETERS.items()}
    columns = begin, *found.judged.values, found.values
    rows = [
        (each.what, *(f"{of[name]:.3g}" for of in columns)) for name, each in PARAMETERS.items()
    ]
    prefill, decode = PREFILL_OVERHEADS, DECODE_OVERHEADS
    alone, shared = decode.iteration_seconds, SHARED_DECODE_OVERHEADS.host_layer_seconds
    yield from (
        "## Parameters",
        "",
        pages.table(["parameter", "start", "first half", "second half", "all"], rows),
        "",
        "A collective or a ring's step of a prefill takes about 0.7 ms in all three systems, "
        "whatever it exchanges: the host launches it, and all ranks wait for the last one. "
        "The papers' decode steps run as CUDA graphs. These are fixed: peaks, memory and links of "
        "the data sheets "
        "(Meta: 800 TFLOP/s), links at 86% and memory at 90% of their speeds, and kernels that "
        "exchanges slow down by 18%, as `distca simulate` charges them. Attention of few queries "
        "reads keys at that speed of the memory, and the gaps between kernels are in the rates: "
        "these numbers cannot tell them apart.",
        "",
        "The commands' overheads of collectives, exchanges and weights are the fit to all numbers: "
        f"{1e3 * prefill.collective_seconds:.2g} ms for a collective and for a ring's step of a "
        f"prefill, {1e6 * decode.collective_seconds:.2g} us for a collective and for an exchange "
        f"of a decode step, {1e6 * decode.hop_seconds:.2g} us for each doubling of a collective's "
        f"nodes, and weights read at {decode.weight_efficiency:.0%} of the memory's speed. What "
        "hosts do is measured on our engine, in CPU time of an AMD EPYC: "
        f"{1e3 * alone:.2g} ms to schedule and plan an iteration (1.2 ms with one sequence on 4 "
        "ranks, 1.7 ms with 64), "
        f"{1e3 * prefill.host_layer_seconds:.2g} ms to launch a layer of a prefill, and "
        f"{1e3 * shared:.2g} ms to launch a layer's attention where ranks that share keys decode, "
        "since no graph has it there. `decode_step.py` measures these with 2 layers and 4,000 "
        "cached tokens; [its page](decode_step.md) was made while the machine was busier.",
        "",
    )


def comparisons_of(found: Fitted) -> list[dict[str, str]]:
    """Each comparison of the papers: its place, what it says, ours by the fit to all numbers, and
    whether the sign is right."""
    every, holds, ours = [*claims()], list[list[bool]](), list[str]()
    for values in (*found.judged.values, found.values):
        seconds = _seconds(found.stacks, values)
        holds.append([claim.holds(seconds) for claim in every])
        ours = [claim.ours(seconds) for claim in every]
    rows = []
    for number, claim in enumerate(every):
        wrong = [of[number] for of in holds].count(False)
        sign = f"wrong in {wrong} of {len(holds)} fits" if wrong else "right"
        rows.append(
            {"place": claim.place, "comparison": claim.what, "ours": ours[number], "sign": sign}
        )
    return rows


def claims_section(rows: Sequence[dict[str, str]]) -> Iterator[str]:
    """Comparisons."""
    right = sum(row["sign"] == "right" for row in rows)
    yield from (
        "## Comparisons that the papers make",
        "",
        f"{right} of {len(rows)} are right in the fits to both halves and to all numbers. Figures "
        "are of the fit to all. Of Tetris's decode steps (8 sequences of 32,000 tokens here) the "
        "paper gives neither batches nor lengths.",
        "",
        pages.table(["place", "comparison", "ours", "sign"], ([*row.values()] for row in rows)),
        "",
    )


def _seconds(stacks: Stacks, values: Values) -> Seconds:
    """Tells the seconds of runs by values, with partitions that are searched for these."""
    stacks.partition(values, 64)

    @cache
    def seconds(run: Run) -> float:
        return stacks.seconds(run, values)

    return seconds


def predicted(found: Fitted) -> list[dict[str, Any]]:
    """Each number: its paper and place, the run, what is published, and ours, held out; seconds, or
    the ratio to the run that `run` names last."""
    return [
        {
            "place": f"{number.run.paper}, {number.place}",
            "run": number.run.said + (f"; over {number.over.said}" if number.over else ""),
            "ratio": number.over is not None,
            "published": number.value,
            "ours": float(number.value * (1 + error)),
        }
        for number, error in zip(NUMBERS, found.errors, strict=True)
    ]


def numbers_section(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """All numbers."""
    cells = []
    for row in rows:
        published, ours = f"{row['published']:g}", f"{row['ours']:.3f}"
        if not row["ratio"]:
            published, ours = f"{published} s", f"{row['ours']:.4g} s"
        error = row["ours"] / row["published"] - 1
        cells.append((row["place"], row["run"], published, ours, f"{error:+.0%}"))
    yield from (
        "## All numbers",
        "",
        "Ours are held-out predictions, with overheads.",
        "",
        pages.table(["place", "run", "published", "ours", "error"], cells),
        "",
    )


def command_seconds(run: Run) -> float:
    """Seconds of a run of Tetris or Meta by the commands' defaults: the cluster's own rates, and
    overheads that hold for our engine."""
    base = CLUSTERS["dgx-h100" if run.paper == "Meta" else "dgx-a100"]
    speed = run.gb_per_s or base.network_gb_per_s
    costs = InferenceCosts(
        MODELS[run.model],
        replace(base, charges=PUBLISHED, network_gb_per_s=speed),
        run.tensor_parallel,
        mlp_dtype_bytes=1 if run.paper == "Meta" else 2,
        overheads=PREFILL_OVERHEADS,
        decode_overheads=decode_overheads(
            captured_by_engine(run.ranks, run.tensor_parallel, -(-run.sequences // run.ranks))
        ),
    )
    return simulate_step([plan_of(run)] * costs.model.layers, costs).seconds


def by_command() -> list[tuple[Number, float]]:
    """Numbers of Tetris and Meta, and what the commands' defaults predict."""
    of = [each for each in NUMBERS if each.run.paper != "KV-Runahead"]
    return [
        (each, command_seconds(each.run) / (command_seconds(each.over) if each.over else 1.0))
        for each in of
    ]


def commands_section() -> Iterator[str]:
    """How far the commands' defaults are from the numbers, without a fit to each system."""
    of: dict[tuple[str, str], list[float]] = {}
    decoded = []
    for number, ours in by_command():
        kind = "decode" if number.run.kind == "decode" else "prefill"
        error = ours / number.value - 1
        of.setdefault((number.run.paper, kind), []).append(error)
        if kind == "decode":
            times = f"{1e3 * number.value:.1f}", f"{1e3 * ours:.1f}", f"{error:+.0%}"
            decoded.append((number.place, number.run.said, *times))
    rows = [
        (paper, kind, len(errors), f"{np.median(np.abs(errors)):.1%}", f"{span(errors, '+.0%')}")
        for (paper, kind), errors in of.items()
    ]
    yield from (
        "## The commands' defaults",
        "",
        "The errors above are those of fits, which have rates of each system. They do not hold for "
        "`distca simulate`, whose defaults have the rates of the named cluster and the host times "
        "of our engine. For the same runs of Tetris and Meta it predicts:",
        "",
        pages.table(["paper", "runs", "numbers", "median error", "errors"], rows),
        "",
        "Decoded tokens, in ms:",
        "",
        pages.table(["place", "run", "published", "by the defaults", "error"], decoded),
        "",
        "Our engine captures no CUDA graphs with tensor parallelism, so its hosts launch each "
        f"layer in {1e3 * EAGER_DECODE_OVERHEADS.host_layer_seconds:.2g} ms, as in a prefill. This "
        "takes longer than all else of the step, whatever the number of nodes. With "
        "`--cuda-graphs whole` whole steps are in graphs, as in the papers' systems. "
        "Meta's steps go round a ring. In our engine queries go to all ranks at once, "
        "so four nodes take as long as two.",
        "",
    )


def unused_section() -> Iterator[str]:
    """What is left out."""
    yield from (
        "## What else the papers say",
        "",
        pages.table(["place", "what it says", "here"], UNUSED),
        "",
        "What does not fit, and signs that are wrong:",
        "",
        "* *KV-Runahead at 10 GB/s.* Published chains on 4 GPUs gain little over 2, and nothing "
        "with 2K tokens; all-gathers lose more. The authors turned direct copies between GPUs "
        "off, so all links share the host's memory. Here each link has its speed alone.",
        "* *KV-Runahead at 1 GB/s.* 12K tokens on 2 GPUs move more bytes than such a link carries "
        "in the published time, 4K tokens take longer than on one GPU, which is a partition, too, "
        "and 1K tokens on 4 GPUs take 1.7 times as long as on 2.",
        "* *Falcon 1B with 1K to 4K tokens.* Its hosts launch a layer in 2.5 to 2.8 ms, those of "
        "Llama in about 3. One number stands for all models.",
        "* *Llama 30B with 2K tokens on 4 GPUs.* Its large matrices reach more of the peak than "
        "those of 7B. One share stands for all models, too.",
        "* *Llama 7B with 16K tokens on 8 GPUs.* Chains gain about as much with one key-value "
        "head as with all 32 here, and 5% more in the paper, so that the order of the gains is "
        "that of small differences.",
        "* *Tetris, 32K tokens with SP 16.* The published 0.53 s lie 10% below what the other "
        "lengths let expect, so that SP 8 is as fast here.",
        "* *Meta.* A ring's step takes about 0.4 ms where 16 nodes share 128K tokens, rather than "
        "0.7.",
        "",
    )


def breakdown_section() -> Iterator[str]:
    """What iterations of each kind spend their time on."""
    rows = []
    for model, tensor, ranks in (("llama-8b", 1, 4), ("llama-70b", 8, 2), ("llama-405b", 8, 4)):
        cluster = replace(CLUSTERS["dgx-h100"], charges=PUBLISHED)
        bytes_of_mlp = 1 if model == "llama-405b" else 2
        decode = decode_overheads(captured_by_engine(ranks, tensor, 16 // ranks))
        costs = InferenceCosts(
            *(MODELS[model], cluster, tensor, 2, bytes_of_mlp),
            *(PREFILL_OVERHEADS, decode),
        )
        planned = PlannedCosts(costs, ranks, BLOCK)
        chunk = [_feed(0, 24_576, 8192, ranks)]
        decoded = [_feed(number, 32_000, 1, ranks) for number in range(1, 17)]
        kinds = {"chunk of a prompt": chunk, "decode": decoded, "mixed": [*chunk, *decoded]}
        for kind, feeds in kinds.items():
            spent = simulate_iteration(planned.plan(feeds), costs).of_last()
            total = sum(spent.values())
            cells = (f"{1e3 * spent[part]:.2f} ({spent[part] / total:.0%})" for part in PARTS)
            where = f"{model}, {ranks} ranks of {tensor}"
            rows.append((where, kind, f"{1e3 * total:.2f}", *cells))
    yield from (
        "## What iterations spend their time on",
        "",
        "ms on H100s with the commands' defaults, of the rank that ends last. Iterations: 8,192 "
        "new tokens of a prompt over 24,576 cached ones; a token of each of 16 sequences over "
        "32,000 cached ones; both together.",
        "",
        pages.table(["model", "iteration", "ms", *PARTS], rows),
        "",
        *(f"* *{part}*: {what}." for part, what in PARTS.items()),
        "",
    )


def _feed(number: int, cached: int, new: int, ranks: int) -> ScheduledTokens:
    blocks = -(-(cached + new) // BLOCK)
    return ScheduledTokens(number, cached, new, (np.arange(blocks) + number) % ranks)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, default=Path("."), help="folder of the page")
    output = parser.parse_args().output
    kinds = {"with overheads": True, "without": False}
    fits = {
        name: Fitted(overheads) for name, overheads in track(kinds.items(), "published", "fits")
    }
    comparisons, numbers = comparisons_of(fits["with overheads"]), predicted(fits["with overheads"])
    titles = (f"*{name}*: {title}." for name, title in PAPERS.items())
    lines = [
        "# Published prefills and decode steps, beside simulated ones",
        "",
        "By `python benchmarks/serving/published.py --output DIR`; nothing here was measured on "
        "GPUs by us.",
        "",
        " ".join(titles),
        "",
        *summary_section(fits),
        *claims_section(comparisons),
        *parameters_section(fits),
        *commands_section(),
        *breakdown_section(),
        *unused_section(),
        *numbers_section(numbers),
    ]
    figures = {"numbers": numbers, "comparisons": comparisons}
    pages.save(output, "published", "\n".join(lines).rstrip(), __file__, figures)


if __name__ == "__main__":
    main()
