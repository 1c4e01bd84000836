"""CDSP without its parts, beside the ablations of the Tetris paper.

    python benchmarks/serving/cdsp_ablations.py --output benchmarks/results/serving

Requests of the paper's three mixes are planned as they arrive, as in `cdsp_capacity.py`: Llama 8B
on 16 prefill ranks by the paper's Table 1, and Llama 70B on 8 ranks of 4 GPUs, with simulated
prefills, since the paper lists none. Compared are first tokens with and without chunks (Figure 13),
with improvement rates that stay what they are (Figures 11 and 12), and those of other strategies at
the load that the best of them sustains (Figures 8 to 10).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.claims import span
from distca.cost.model_sizes import MODELS
from distca.plan import Mask
from distca.progress import track
from distca.schedule.serving import nobody_holds, shard_evenly, step_plan
from distca.schedule.serving.cdsp import (
    ImprovementRates,
    Prefill,
    PrefillModel,
    least_by_rate,
    published_model,
)
from distca.schedule.serving.cdsp.load import IMPROVEMENT_RATES, Growth
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
)
from distca.simulate.requests.traces import K
from distca.simulate.serving import PREFILL_OVERHEADS, InferenceCosts, simulate_step

A100 = CLUSTERS["dgx-a100"]
LOADS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75)
"""Loads, over the one that the best baseline sustains."""
BASELINES = ("fixed-8", "fixed-16", "greedy")
CONSTANT = (0.1, 0.3, 0.5, 0.7)
"""Improvement rates of Figures 11 and 12."""
PROFILED = (97, 98)
"""Seeds of the requests on which improvement rates are profiled."""
PERCENTILES = 50, 99
_TENSOR, _RANKS = 4, 8
"""GPUs of a rank of Llama 70B, and its prefill ranks: half of eight nodes, as in the paper."""


@dataclass(frozen=True)
class Ablated:
    """What parts of CDSP do to requests of a mix. Pairs are of the percentiles 50 and 99.

    Attributes:
        model, trace: what was served.
        capacities: requests a second by strategy, as in `cdsp_capacity.py`.
        load: requests a second that the best baseline sustains.
        over_cdsp: seconds to the first token at that load over CDSP's, by strategy.
        without_chunks: those of single chunks over CDSP's, by load over `load`; both have the
            improvement rate that serves CDSP best at the load, as in the paper.
        bounded: likewise, where the most ranks of a group are profiled, too, for each of both.
        constant: those of CDSP with an improvement rate that stays over those with the profiled
            one, by rate and by load.
    """

    model: str
    trace: str
    capacities: dict[str, float]
    load: float
    over_cdsp: dict[str, list[float]] = field(default_factory=dict)
    without_chunks: dict[float, list[float]] = field(default_factory=dict)
    bounded: dict[float, list[float]] = field(default_factory=dict)
    constant: dict[float, dict[float, list[float]]] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """The baseline that sustains most."""
        return max((n for n in BASELINES if n in self.capacities), key=self.capacities.__getitem__)


@dataclass(frozen=True)
class Served:
    """Requests of a mix on a cluster.

    Attributes:
        cluster: prefill ranks, and how long they take.
        traces: requests that are measured.
        others: requests on which improvement rates are profiled.
        limit: seconds within which first tokens are wanted.
    """

    cluster: ServingCluster
    traces: Sequence[RequestTrace]
    others: Sequence[RequestTrace]
    limit: float

    def capacity(self, strategy: str, rates: ImprovementRates) -> float:
        """Mean over the traces of the requests a second that are sustained."""
        found = (
            find_capacity(
                trace, self.cluster, strategy, rates, self.limit, seconds_of=planned_seconds
            )
            for trace in self.traces
        )
        return float(np.mean([each.per_second for each in found]))

    def percentiles(
        self, strategy: str, growth: Growth, load: float, others: bool = False
    ) -> np.ndarray:
        """Seconds to the first token at a load, means over the traces, float64 `[percentiles]`."""
        rates, traces = ImprovementRates({0.0: growth}), self.others if others else self.traces
        seconds = [
            planned_seconds(each.at_rate(load), self.cluster, strategy, rates) for each in traces
        ]
        return np.mean([np.percentile(each, PERCENTILES) for each in seconds], axis=0)

    def profiled(self, strategy: str, load: float, growths: Sequence[Growth], at: int) -> Growth:
        """The improvement rate of the least percentile, on other requests; `at` is its place."""
        tried = [(load, g, float(self.percentiles(strategy, g, load, True)[at])) for g in growths]
        return least_by_rate(tried).by_arrivals[load]


def simulated_times(model: str, tensor_parallel: int, degrees: Sequence[int]) -> PrefillModel:
    """Eq. 1 of a model for which the paper lists no prefills, fitted to simulated ones of 4K to
    256K tokens."""
    costs = InferenceCosts(MODELS[model], A100, tensor_parallel, overheads=PREFILL_OVERHEADS)
    kernels, mask, none = costs.attention_cost(), Mask(), np.array([0])
    found = []
    for degree in degrees:
        for tokens in (4096 << doubled for doubled in range(7)):
            new = shard_evenly(none, np.array([tokens]), degree)
            plan = step_plan(nobody_holds(degree), new, "pass-kv", mask, in_steps=True)
            seconds = simulate_step([plan] * costs.model.layers, costs, kernels).seconds
            found.append(Prefill(degree, tokens, seconds))
    return PrefillModel.fit(found, A100.name, f"{model}, tensor parallel {tensor_parallel}")


def clusters() -> dict[str, ServingCluster]:
    """Prefill ranks of both models, by model. Planning asks for nothing else of a cluster."""
    small = describe_cluster(published_model(), A100, MODELS["llama-8b"], 16, 2, 8)
    large = replace(
        small,
        times=simulated_times("llama-70b", _TENSOR, (1, 2, 4, 8)),
        prefill_ranks=_RANKS,
        ranks_per_node=A100.gpus_per_node // _TENSOR,
    )
    return {"llama-8b": small, "llama-70b": large}


def growths_with_bounds(cluster: ServingCluster) -> list[Growth]:
    """Improvement rates, alone and with the most ranks of a group."""
    sizes = [size for size in cluster.times.degrees if 1 < size < cluster.times.degrees[-1]]
    return [*IMPROVEMENT_RATES, *((rate, size) for size in sizes for rate in IMPROVEMENT_RATES)]


def ablate(model: str, trace: str, served: Served) -> Ablated:
    """Serves requests with CDSP and without its parts."""
    cluster = served.cluster
    possible = [
        name
        for name in BASELINES
        if not name.startswith("fixed-")
        or int(name.removeprefix("fixed-")) <= cluster.times.degrees[-1]
    ]
    none = ImprovementRates({0.0: 0.0})
    capacities = {name: served.capacity(name, none) for name in possible}
    load = max(capacities.values())
    bounded, alone = growths_with_bounds(cluster), IMPROVEMENT_RATES
    without: dict[float, list[float]] = {}
    with_bounds: dict[float, list[float]] = {}
    constant: dict[float, dict[float, list[float]]] = {rate: {} for rate in CONSTANT}
    by_load: dict[str, dict[float, Growth]] = {"single-chunk": {}, "cdsp": {}}
    for times in LOADS:
        now = times * load
        # As in the paper: rates alone, by the median that it shows, the same for both.
        rate = served.profiled("cdsp", now, alone, 0)
        cdsp = served.percentiles("cdsp", rate, now)
        without[times] = (served.percentiles("single-chunk", rate, now) / cdsp).tolist()
        for each in CONSTANT:
            constant[each][times] = (served.percentiles("cdsp", each, now) / cdsp).tolist()
        of_both = []
        for name, known in by_load.items():
            known[now] = served.profiled(name, now, bounded, 1)
            of_both.append(served.percentiles(name, known[now], now))
        with_bounds[times] = (of_both[0] / of_both[1]).tolist()
    for name, known in by_load.items():
        capacities[name] = served.capacity(name, ImprovementRates(known))
    best = served.percentiles("cdsp", by_load["cdsp"][load], load)
    over = {
        name: (served.percentiles(name, by_load.get(name, {}).get(load, 0.0), load) / best).tolist()
        for name in capacities
        if name != "cdsp"
    }
    return Ablated(model, trace, capacities, load, over, without, with_bounds, constant)


def page(found: Sequence[Ablated], requests: int, seeds: int) -> Iterator[str]:
    """Lines of the page."""
    lengths = (
        f"{name} has prompts of {of.shortest / K:g}K to {of.longest / K:g}K tokens, on average "
        f"{of.mean / K:g}K"
        for name, of in PRESETS.items()
    )
    yield from (
        "# CDSP without its parts, simulated",
        "",
        f"`{pages.typed('benchmarks/serving/cdsp_ablations.py')}`",
        "",
        f"{requests:,} requests of each mix of Tetris, means of {seeds} seeds. llama-8b: 16 "
        "prefill ranks of one A100 each on two nodes, by the paper's Table 1. llama-70b: 8 prefill "
        "ranks of 4 A100s each on four nodes, by simulated prefills, since the paper lists none; "
        "these are charged the overheads of `distca simulate` ([published.md](published.md)). "
        "Prompts are planned as they arrive, and groups that share no ranks do not wait for each "
        "other, as in the paper. Nothing was measured.",
        "",
        f"*Mixes*: {'; '.join(lengths)}. Lengths are drawn from a log-normal with these ends and "
        "this mean, answers have "
        f"{' and '.join(sorted({str(of.answer) for of in PRESETS.values()}))} tokens, and arrivals "
        "are a Poisson process.",
        "",
        "*Strategies*: fixed-N gives each prompt N ranks, so that fixed-8 is all ranks of "
        "llama-70b. greedy gives it the free ranks with which it ends first. single-chunk is CDSP "
        "where a prompt is one chunk.",
        "",
        "## Load, and first tokens at the load of the best baseline (Figures 8 to 10)",
        "",
        "*Load*: requests a second at which 99% have their first token within 25 times the mean of "
        "requests that are alone. *P50* and *P99 over CDSP's*: ratios of seconds to the first "
        "token, at the load that the best baseline sustains (bold). Baselines that sustain less "
        "are overloaded there: their line and the ratio grow as long as requests arrive. "
        "Improvement rates and the most ranks "
        "of a group are profiled by load on other requests, by least P99.",
        "",
    )
    rows = []
    for each in found:
        for name, capacity in each.capacities.items():
            ratio = each.capacities["cdsp"] / capacity
            times = each.over_cdsp.get(name, [1.0, 1.0])
            shown = f"**{name}**" if name == each.best else name
            rows.append(
                [each.model, each.trace, shown, f"{capacity:.2f}", f"{ratio:.2f}"]
                + [f"{time:.2f}" for time in times]
            )
    head = ["model", "mix", "strategy", "load", "CDSP's load over it"]
    head += ["P50 over CDSP's", "P99 over CDSP's"]
    yield from (pages.table(head, rows), "")
    same = [
        f"{each.model}, {each.trace}"
        for each in found
        if each.capacities["greedy"] == each.capacities[f"fixed-{_RANKS}"]
    ]
    if same:
        yield from (
            f"greedy and fixed-{_RANKS} sustain the same in {'; '.join(same)}: greedy gives each "
            f"prompt {_RANKS} ranks there, with which it is fastest.",
            "",
        )
    yield from (
        "## Single chunks (Figure 13)",
        "",
        "Ratios: seconds to the first token without chunks over those with them, P50 / P99, by "
        "load over "
        "the best baseline's. *Rates alone*: both have the improvement rate with which CDSP's "
        "median is least at this load, as in the paper. *With bounds*: improvement rates and the "
        "most ranks of a group are profiled for both, by least P99.",
        "",
    )
    titles = ["model", "mix", "profiled", *(f"{times:g}" for times in LOADS)]
    titles += ["most, P50", "most, P99"]
    rows = []
    for each in found:
        for name, ratios in (("rates alone", each.without_chunks), ("with bounds", each.bounded)):
            pairs = [" / ".join(f"{x:.2f}" for x in ratios[times]) for times in LOADS]
            most = [f"{max(of_load[at] for of_load in ratios.values()):.2f}" for at in (0, 1)]
            rows.append([each.model, each.trace, name, *pairs, *most])
    yield from (pages.table(titles, rows), "")
    yield from (
        "## Improvement rates that stay what they are (Figures 11 and 12)",
        "",
        "Median seconds to the first token of CDSP with a rate over those with the rate that was "
        "profiled for the load, on groups of any size.",
        "",
    )
    rows = [
        [each.model, each.trace, f"{rate:g}", *(f"{of_rate[times][0]:.2f}" for times in LOADS)]
        for each in found
        for rate, of_rate in each.constant.items()
    ]
    yield pages.table(["model", "mix", "rate", *(f"{times:g}" for times in LOADS)], rows)
    gains = [each.capacities["cdsp"] / each.load for each in found]
    chunks = [each.capacities["cdsp"] / each.capacities["single-chunk"] for each in found]
    yield from (
        "",
        f"In short: CDSP sustains {span(gains)} times the load of the best baseline, and "
        f"{span(chunks)} times that of single chunks. Near the highest load a small gain of load "
        "is a large one of the first token, since the line grows without end beyond it.",
    )


def main() -> None:
    parser = Parser(__doc__, {"seeds": 0})
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    parser.add_argument("--requests", type=int, default=1000, metavar="N")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2), metavar="N")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    cases = [(name, of, trace) for name, of in clusters().items() for trace in PRESETS]
    found = []
    for name, cluster, trace in track(cases, "cdsp_ablations", "mixes"):
        traces, others = (
            [draw_trace(PRESETS[trace], args.requests, seed) for seed in seeds]
            for seeds in (args.seeds, PROFILED)
        )
        limit = 25 * float(np.mean([light_load(each, cluster) for each in traces]))
        found.append(ablate(name, trace, Served(cluster, traces, others, limit)))
    text = "\n".join(page(found, args.requests, len(args.seeds)))
    figures = [asdict(each) | {"best": each.best} for each in found]
    pages.save(args.output, "cdsp_ablations", text, __file__, figures)


if __name__ == "__main__":
    main()
