"""What CDSP gains in a simulated cluster, beside what the Tetris paper measured.

    python benchmarks/serving/cdsp_capacity.py --output benchmarks/results/serving

Eq. 1 is fitted to the paper's Table 1; the search is timed, and held against all nested groups and
chunk lengths; and capacity is searched for fixed degrees, greedy, single-chunk and CDSP: 16 prefill
ranks on two nodes, Poisson arrivals, lengths of the paper's three traces. Groups wait for nobody,
as Tetris plans them; `rank_groups.py` has what our engine makes of them. Writes `cdsp_capacity.md`
and `cdsp_capacity.png`, and prints the page.
"""

from __future__ import annotations

import itertools
import operator
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from distca.cost.model_sizes import MODELS
from distca.palette import BLACK, colour_in_turn
from distca.progress import track
from distca.schedule.serving.cdsp import (
    LOAD_AWARE,
    PREFILL_STRATEGIES,
    TABLE_1,
    Coefficients,
    ImprovementRates,
    PrefillModel,
    PrefillTimes,
    Search,
    plan_prefill,
    published_model,
)
from distca.schedule.serving.cdsp.load import Growth
from distca.simulate import CLUSTERS
from distca.simulate.requests import (
    PRESETS,
    RequestTrace,
    ServingCluster,
    describe_cluster,
    draw_trace,
    find_capacity,
    light_load,
    planned_seconds,
    profile_rates,
)
from distca.whole_file import writing

REQUESTS, SEEDS, PROFILED = 1000, (0, 1, 2), (97, 98, 99)
CONSTANT: tuple[Growth, ...] = (0.15, 0.25, 0.35, 0.45, (0.15, 4), (0.25, 4), (0.35, 4))
LEAST = {"short": 1.40, "medium": 1.20, "long": 1.10}
"""Capacity of CDSP over fixed SP 8 that was expected."""


def main() -> None:
    parser = Parser(__doc__, {"seeds": 0})
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    args = parser.parse_args()
    times = published_model()
    cluster = describe_cluster(times, CLUSTERS["dgx-a100"], MODELS["llama-8b"], 16, 2, 8)
    found = {
        name: measure(name, cluster, args.requests, args.seeds)
        for name in track(PRESETS, "cdsp_capacity", "traces")
    }
    page = [
        "# CDSP in a simulated cluster",
        "",
        "`python benchmarks/serving/cdsp_capacity.py --output DIR`",
        "",
        *fit_section(times),
        *search_section(times),
        *capacity_section(found, len(args.seeds), args.requests),
        *rates_section(found),
    ]
    args.output.mkdir(parents=True, exist_ok=True)
    pages.write(args.output / "cdsp_capacity.md", "\n".join(page), __file__)
    plot(found, args.output / "cdsp_capacity.png")
    print("\n".join(page))


class Measured:
    """Figures of one trace.

    Attributes:
        limit: seconds within which first tokens are wanted, mean of the seeds.
        wasted: rank-seconds of all prompts on groups of 8, over those on groups of one.
        ideal: requests a second of each seed that no group could exceed.
        capacities: requests a second of each seed, by strategy.
        constant: likewise of CDSP, by improvement rates and bounds that stay.
        by_mean: likewise of CDSP, by improvement rates of least mean time.
        profiled: improvement rates by load.
        curves: 99th percentiles of the first seed by strategy, by requests a second.
    """

    def __init__(self) -> None:
        self.limit = self.wasted = 0.0
        self.ideal: list[float] = []
        self.capacities: dict[str, list[float]] = {}
        self.constant: dict[Growth, list[float]] = {}
        self.by_mean: list[float] = []
        self.profiled: dict[str, ImprovementRates] = {}
        self.curves: dict[str, dict[float, float]] = {}

    def over_fixed(self, capacities: Sequence[float]) -> float:
        """Mean capacity over that of fixed SP 8."""
        return float(np.mean(capacities) / np.mean(self.capacities["fixed-8"]))


def measure(name: str, cluster: ServingCluster, requests: int, seeds: Sequence[int]) -> Measured:
    """Searches capacities of a trace, and simulates it at fixed SP 8's."""
    found = Measured()
    traces = [draw_trace(PRESETS[name], requests, seed) for seed in seeds]
    found.limit = float(np.mean([25 * light_load(trace, cluster) for trace in traces]))
    on_8, on_1 = (
        sum(degree * cluster.times.seconds(degree, 0, r.prompt) for t in traces for r in t.requests)
        for degree in (8, 1)
    )
    found.wasted = on_8 / on_1
    found.ideal = [ideal_capacity(trace, cluster) for trace in traces]
    others = [draw_trace(PRESETS[name], requests, seed) for seed in PROFILED]
    for strategy in PREFILL_STRATEGIES:
        rates = ImprovementRates({0.0: 0.0})
        if strategy in LOAD_AWARE:
            rates = found.profiled[strategy] = profile_rates(others, cluster, strategy)
        found.capacities[strategy] = capacities(traces, cluster, strategy, rates)
        at = np.mean(found.capacities["fixed-8"])
        found.curves[strategy] = {
            rate: float(
                np.percentile(
                    planned_seconds(traces[0].at_rate(rate), cluster, strategy, rates), 99
                )
            )
            for rate in np.linspace(0.2, 1.6, 8) * at
        }
    for constant in CONSTANT:
        rates = ImprovementRates({0.0: constant})
        found.constant[constant] = capacities(traces, cluster, "cdsp", rates)
    rates = profile_rates(others, cluster, "cdsp", judge=lambda seconds: float(np.mean(seconds)))
    found.by_mean = capacities(traces, cluster, "cdsp", rates)
    return found


def capacities(
    traces: Sequence[RequestTrace], cluster: ServingCluster, strategy: str, rates: ImprovementRates
) -> list[float]:
    return [
        find_capacity(trace, cluster, strategy, rates, seconds_of=planned_seconds).per_second
        for trace in traces
    ]


def ideal_capacity(trace: RequestTrace, cluster: ServingCluster) -> float:
    """Capacity of ranks that are never idle while prompts wait, work on them in turn, each at its
    least rank-seconds, and are done as soon as with its best group: an upper bound."""
    times, limit = cluster.times, 25 * light_load(trace, cluster)
    alone = [[times.seconds(s, 0, r.prompt) for s in times.degrees] for r in trace.requests]
    work = [min(map(operator.mul, times.degrees, seconds)) for seconds in alone]

    def holds(per_second: float) -> bool:
        waiting, before, seconds = 0.0, 0.0, []
        for request, each, least in zip(
            trace.at_rate(per_second).requests, alone, work, strict=True
        ):
            waiting = max(0.0, waiting - (request.arrival - before))
            seconds.append(waiting + min(each))
            waiting, before = waiting + least / cluster.prefill_ranks, request.arrival
        return float(np.percentile(seconds, 99)) <= limit

    low, high = 0.0, 100.0
    while high - low > 0.001 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def fit_section(times: PrefillModel) -> Iterator[str]:
    """Errors of the fit, and of plain least squares."""
    plain = []
    for degree in times.degrees:
        rows = [each for each in TABLE_1 if each.degree == degree]
        tokens = np.array([each.tokens for each in rows]) / 1e5
        seconds = np.array([each.seconds for each in rows])
        columns = np.stack([np.ones_like(tokens), tokens, tokens**2], 1)
        plain.append(columns @ np.linalg.lstsq(columns, seconds, rcond=None)[0] / seconds - 1)
    yield from (
        "## Eq. 1, fitted to Table 1",
        "",
        "Largest relative error of a row, by degree. Relative errors are what the fit minimizes; "
        "plain least squares serves the longest prompts alone.",
        "",
    )
    of_degree = [
        max(map(abs, times.errors([e for e in TABLE_1 if e.degree == s]))) for s in times.degrees
    ]
    yield from table(
        ["SP", *map(str, times.degrees)],
        [
            ["fitted by relative errors", *(f"{error:.1%}" for error in of_degree)],
            ["by least squares", *(f"{np.abs(errors).max():.1%}" for errors in plain)],
        ],
    )
    yield ""


def search_section(times: PrefillModel) -> Iterator[str]:
    """CPU milliseconds of a plan by ranks, and its gap to brute force."""
    wide = dict(times.coefficients)
    for degree in (32, 64, 128):
        of = wide[degree // 2]
        wide[degree] = Coefficients(1.8 * of.a, of.b / 2, of.c / 2, of.d / 2)
    drawn, rows = np.random.default_rng(0), []
    for ranks in (8, 16, 32, 64, 128):
        model = PrefillModel("", "", wide).only(s for s in wide if s <= ranks)
        search, spent, chunks = Search(model), [], []
        for _ in range(1000):
            queued, tokens = drawn.uniform(0, 10, ranks).tolist(), int(drawn.integers(4096, 262144))
            before = time.process_time()
            plan = plan_prefill(search, queued, 8, tokens)
            spent.append(1e3 * (time.process_time() - before))
            chunks.append(len(plan.chunks))
        paper = {8: "23", 16: "26", 32: "23", 64: "25", 128: "31"}[ranks]
        rows.append(
            [
                f"{ranks}",
                *(f"{f(spent):.2f}" for f in (np.mean, max)),
                f"{np.mean(chunks):.1f}",
                paper,
            ]
        )
    gaps = []
    for _ in range(300):
        queued, tokens = drawn.uniform(0, 8, 4).tolist(), int(drawn.integers(8_000, 200_000))
        ttft = plan_prefill(Search(times), queued, 4, tokens).ttft
        gaps.append(ttft / min(ttft, best_of_all(times, queued, tokens, 32)) - 1)
    yield from (
        "## The search",
        "",
        "CPU milliseconds of a plan in Python, 1,000 random queues and lengths each (degrees above "
        "16 are extrapolated); the paper's C++ beside it.",
        "",
    )
    yield from table(["ranks", "mean ms", "longest ms", "chunks", "paper's mean, us"], rows)
    yield from (
        "",
        f"On 4 ranks, all nested groups with chunks in 32nds of the prompt are {np.mean(gaps):.2%} "
        f"faster on average, and {max(gaps):.1%} at most (300 random queues).",
        "",
    )


def capacity_section(found: dict[str, Measured], seeds: int, requests: int) -> Iterator[str]:
    yield from (
        "## Capacity",
        "",
        f"Requests a second at which 99% of {requests:,} requests have their first token within 25 "
        f"times the mean of requests that are alone; mean of {seeds} seeds. 16 prefill ranks of "
        "dgx-a100 on two nodes, llama-8b by Table 1, two decode ranks of TP 8. Improvement rates "
        "are profiled on requests of three other seeds. Groups that share no ranks do not wait for "
        "each other here, as in the paper; [our engine's do](rank_groups.md).",
        "",
    )
    rows = []
    for name, of in found.items():
        ratios = [of.over_fixed(each) for each in of.capacities.values()]
        cells = [f"{np.mean(each):.2f}" for each in of.capacities.values()]
        bound = f"{of.over_fixed(of.ideal):.2f}"
        rows.append(
            [name, f"{of.limit:.1f}", *cells, bound, f"{ratios[-1]:.3f}", f"{LEAST[name]:.2f}"]
        )
    yield from table(
        ["trace", "limit, s", *PREFILL_STRATEGIES, "bound", "CDSP over fixed-8", "expected"], rows
    )
    yield from (
        "",
        "The paper, on 16 and 16 GPUs with its own traces: Tetris sustains 1.20 to 1.45 times fixed"
        " SP 8's load, its best baseline; SP 16 is the worst, and LoongServe (greedy) between.",
        "",
        "CDSP over fixed SP 8, with improvement rates that stay what they are, with groups of any "
        "size and of at most 4 ranks; by load, where those of least mean time to the first token "
        "were profiled, and, as above, of least P99:",
        "",
    )
    yield from table(
        ["trace", *map(said, CONSTANT), "by load, mean", "by load, P99", "its seeds"],
        [
            [
                name,
                *(f"{of.over_fixed(of.constant[rate]):.3f}" for rate in CONSTANT),
                f"{of.over_fixed(of.by_mean):.3f}",
                f"{of.over_fixed(of.capacities['cdsp']):.3f}",
                " ".join(
                    f"{mine / fixed:.3f}"
                    for mine, fixed in zip(
                        of.capacities["cdsp"], of.capacities["fixed-8"], strict=True
                    )
                ),
            ]
            for name, of in found.items()
        ],
    )
    wasted = ", ".join(f"{of.wasted:.2f} ({name})" for name, of in found.items())
    yield from (
        "",
        "What can be gained is the time that groups of 8 waste: over one rank for each prompt they "
        f"take {wasted} times the rank-seconds. The bound is that of ranks that are never idle "
        "while prompts wait, do each in its least rank-seconds, and lose no time by small groups. "
        "Long prompts need larger ones to be within the limit at all: 190K tokens take one rank "
        "59 s. But a group of 8 is a whole node here, and waits for the last of its ranks: under "
        "load it loses more than it gains. So improvement rates are profiled together with the "
        "most ranks of a group, which the paper does not bound. It says neither which of its "
        "traces gains 20% and which 45%, nor more of their lengths than shortest, longest and "
        "mean: sigma (0.75) is ours. Ten requests of 1,000 decide a 99th percentile.",
        "",
    )


def rates_section(found: dict[str, Measured]) -> Iterator[str]:
    yield from (
        "Improvement rates by load, and the most ranks of a group where there is a bound: "
        + "; ".join(
            f"{name} "
            + ", ".join(
                f"{load:.2f}: {said(growth)}"
                for load, growth in of.profiled["cdsp"].by_arrivals.items()
            )
            for name, of in found.items()
        ),
        "",
        "![Late first tokens by load](cdsp_capacity.png)",
    )


def said(growth: Growth) -> str:
    return f"{growth[0]:g} ({growth[1]})" if isinstance(growth, tuple) else f"{growth:g}"


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Formats a Markdown table."""
    for row in (heading, ["---"] * len(heading), *rows):
        yield f"| {' | '.join(row)} |"


def plot(found: dict[str, Measured], path: Path) -> None:
    """Draws 99th percentiles over the load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(found), 4), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    colour_in_turn(*panels)
    for axes, (name, of) in zip(panels, found.items(), strict=True):
        for strategy, curve in of.curves.items():
            axes.plot(list(curve), list(curve.values()), marker="o", label=strategy)
        axes.axhline(of.limit, color=BLACK, linestyle="--", linewidth=1.0)
        axes.set(title=name, xlabel="requests/s", ylim=(0, 2 * of.limit))
    panels[0].set_ylabel("P99 of seconds to the first token (dashed: limit)")
    panels[0].legend()
    with writing(path) as written:
        figure.savefig(written, dpi=110)


def best_of_all(
    times: PrefillTimes, queued: Sequence[float], tokens: int, pieces: int = 16
) -> float:
    """Least time to the first token over all nested groups, and chunks of that many parts.

    For few ranks of one node: groups are all subsets whose size is a degree.
    """
    groups = [
        frozenset(ranks)
        for degree in times.degrees
        for ranks in itertools.combinations(range(len(queued)), degree)
    ]
    edges = [tokens * piece // pieces for piece in range(pieces + 1)]
    # Earliest end of that many pieces, the last of them on a group. Nothing is done at once.
    ends: dict[tuple[frozenset[int], int], float] = {(frozenset(), 0): 0.0}
    for group in groups:
        free = max(queued[rank] for rank in group)
        before = [(done, end) for (part, done), end in ends.items() if part < group]
        for done, end in before:
            for upto in range(done + 1, pieces + 1):
                size = edges[upto] - edges[done]
                found = max(end, free) + times.seconds(len(group), edges[done], size)
                if found < ends.get((group, upto), float("inf")):
                    ends[group, upto] = found
    return min(end for (_, done), end in ends.items() if done == pieces)


if __name__ == "__main__":
    main()
