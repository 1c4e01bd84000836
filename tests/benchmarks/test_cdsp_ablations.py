"""CDSP without its parts: the benchmark's figures on small clusters and few requests."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.claims import span, stored_json, stored_page
from benchmarks.pages import RESULTS
from benchmarks.serving import cdsp_ablations
from benchmarks.serving.cdsp_ablations import Served, ablate, clusters
from distca.schedule.serving.cdsp import published_model
from distca.simulate.requests import PRESETS, draw_trace, light_load, planned_seconds
from distca.simulate.requests.cluster import ServingCluster
from distca.simulate.requests.costs import DecodeTimes


@pytest.fixture(autouse=True)
def few_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cdsp_ablations, "LOADS", (0.5, 1.0))
    monkeypatch.setattr(cdsp_ablations, "IMPROVEMENT_RATES", (0.05, 0.35))


def served(degrees: tuple[int, ...], ranks: int = 16) -> Served:
    times = published_model().only(degrees)
    cluster = ServingCluster(times, DecodeTimes(0.01, 1e-6), prefill_ranks=ranks)
    traces, others = ([draw_trace(PRESETS["short"], 150, seed)] for seed in (0, 97))
    return Served(cluster, traces, others, 25 * light_load(traces[0], cluster))


def test_groups_of_one_size_have_no_chunks_to_lose() -> None:
    """All strategies do the same then, whatever the rates."""
    found = ablate("llama-8b", "short", served((8,)))
    assert set(found.capacities) == {"fixed-8", "greedy", "single-chunk", "cdsp"}
    assert len({*found.capacities.values()}) == 1
    ratios = [*found.without_chunks.values(), *found.bounded.values(), *found.over_cdsp.values()]
    ratios += [ratio for rates in found.constant.values() for ratio in rates.values()]
    assert all(ratio == [1.0, 1.0] for ratio in ratios)


def test_figures_are_those_of_planned_requests() -> None:
    """Chunks gain at a high load, and larger groups than prompts need lose."""
    of = served((1, 2, 4, 8))
    found = ablate("llama-8b", "short", of)
    assert found.load == found.capacities[found.best]
    assert found.load == max(found.capacities[name] for name in ("fixed-8", "greedy"))
    assert found.capacities["cdsp"] > 1.1 * found.load
    assert max(p50 for p50, _ in found.without_chunks.values()) > 1
    # The rate of least median is used for both; here it is found once more. At half of the load
    # that of the least P99 is another one.
    for times in (0.5, 1.0):
        now, rates = times * found.load, (0.05, 0.35)
        medians = [of.percentiles("cdsp", rate, now, others=True)[0] for rate in rates]
        best = rates[int(np.argmin(medians))]
        both = [of.percentiles(name, best, now) for name in ("single-chunk", "cdsp")]
        assert found.without_chunks[times] == pytest.approx((both[0] / both[1]).tolist())
    (trace,) = of.traces
    alone = cdsp_ablations.ImprovementRates({0.0: best})
    seconds = planned_seconds(trace.at_rate(now), of.cluster, "cdsp", alone)
    assert both[1].tolist() == pytest.approx(np.percentile(seconds, (50, 99)).tolist())


def test_prefills_of_70b_are_simulated_on_its_ranks() -> None:
    large = clusters()["llama-70b"]
    assert (large.prefill_ranks, large.ranks_per_node) == (8, 2)
    assert large.times.degrees == (1, 2, 4, 8)
    long = [large.times.seconds(degree, 0, 262_144) for degree in large.times.degrees]
    # Nearly in proportion to the ranks, and never more.
    ratios = [one / other for one, other in itertools.pairwise(long)]
    assert all(1.5 < ratio <= 2 for ratio in ratios)


def test_the_stored_page_says_what_its_figures_say() -> None:
    """Its last sentence, and the best baseline of each mix."""
    stored = stored_json("serving/cdsp_ablations")
    gains = [each["capacities"]["cdsp"] / each["load"] for each in stored]
    page = stored_page("serving/cdsp_ablations")
    assert f"CDSP sustains {span(gains)} times the load of the best baseline" in page
    assert [(each["model"], each["trace"]) for each in stored] == [
        (model, trace) for model in ("llama-8b", "llama-70b") for trace in PRESETS
    ]
    for each in stored:
        shown = f"| {each['model']} | {each['trace']} | **{each['best']}** | {each['load']:.2f} |"
        assert shown in page


def test_the_index_says_what_the_stored_figures_say() -> None:
    stored = stored_json("serving/cdsp_ablations")
    gains, without = {"llama-8b": list[float](), "llama-70b": list[float]()}, []
    for each in stored:
        loads = each["capacities"]
        gains[each["model"]].append(loads["cdsp"] / each["load"])
        without.append(loads["single-chunk"] / loads["cdsp"])
    ways = [each[way] for each in stored for way in ("without_chunks", "bounded")]
    late = max(p50 for of_loads in ways for p50, _ in of_loads.values())
    assert (
        f"CDSP sustains {span(gains['llama-8b'])} times the load of the best baseline for 8B, and "
        f"{span(gains['llama-70b'])} times for 70B. Without chunks it sustains {span(without)} "
        "times the load (published: first tokens up to 4.77 times as late; here "
        f"{late:.2f} times): [cdsp_ablations.md]"
    ) in (RESULTS.parent / "README.md").read_text()
