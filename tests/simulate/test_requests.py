"""Requests through a simulated serving cluster, and its capacity."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distca.cost.model_sizes import MODELS
from distca.schedule.serving.cdsp import ImprovementRates, published_model
from distca.simulate import CLUSTERS
from distca.simulate.requests import (
    PRESETS,
    Request,
    RequestTrace,
    describe_cluster,
    draw_trace,
    find_capacity,
    light_load,
    make_engine,
    planned_seconds,
    prefill_seconds,
    profile_rates,
    read_trace,
    serve,
)

A100 = CLUSTERS["dgx-a100"]
CLUSTER = describe_cluster(published_model(), A100, MODELS["llama-8b"], 16, 2, 8)
RATES = ImprovementRates({0.5: 0.05, 4.0: 0.45})


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_lengths(name: str) -> None:
    preset = PRESETS[name]
    trace = draw_trace(preset, 4000, 0)
    prompts = [request.prompt for request in trace.requests]
    assert preset.shortest - 1 <= min(prompts) < 1.2 * preset.shortest
    assert 0.85 * preset.longest < max(prompts) <= preset.longest
    assert np.mean(prompts) == pytest.approx(preset.mean, rel=0.05)
    assert trace.at_rate(7.0).per_second == pytest.approx(7.0)
    gaps = np.diff([request.arrival for request in trace.requests])
    assert np.mean(gaps) == pytest.approx(np.std(gaps), rel=0.1), "a Poisson process"


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    rows = [{"arrival": 2.0, "prompt": 9, "answer": 1}, {"arrival": 0, "prompt": 5, "answer": 2}]
    path.write_text(json.dumps(rows))
    assert read_trace(path) == RequestTrace((Request(0.0, 5, 2), Request(2.0, 9, 1)))
    for wrong in ("[3]", "{}", "nothing", '[{"arrival": -1, "prompt": 5, "answer": 2}]', "[]"):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="give a JSON list such as"):
            read_trace(path)


@pytest.mark.parametrize("strategy", ["fixed-8", "greedy", "single-chunk", "cdsp"])
def test_prefills_alone_are_those_of_the_whole_cluster(strategy: str) -> None:
    """Where neither memory nor decode ranks bind, prompts that are held take as long."""
    trace = draw_trace(PRESETS["short"], 120, 1).at_rate(5.0)
    served = serve(trace, CLUSTER, strategy, RATES)
    assert served.ttft == pytest.approx(prefill_seconds(trace, CLUSTER, strategy, RATES))
    assert strategy != "fixed-8" or max(served.ranks) == 8


def test_groups_that_the_scheduler_gives_are_those_of_the_plan() -> None:
    """A prompt alone: its chunks, each fed in shares of an iteration's tokens."""
    engine = make_engine(replace(CLUSTER, max_num_batched_tokens=16 * 4096), "fixed-8")
    engine.add(0, [0] * 90_000, 1)
    fed = []
    while (begun := engine.begin()) is not None:
        (entry,) = begun.batch.feeds
        assert {*entry.ranks.tolist()} == set(range(8))
        assert begun.seconds == pytest.approx(CLUSTER.times.seconds(8, entry.start, entry.count))
        fed.append(entry.count)
        engine.end()
    assert fed == [8 * 4096, 8 * 4096, 90_000 - 16 * 4096]


def test_a_request_alone_takes_its_prefill_its_hand_off_and_its_iterations() -> None:
    trace = RequestTrace((Request(3.0, 65_536, 11),))
    served = serve(trace, CLUSTER, "greedy")
    prefill = CLUSTER.times.seconds(16, 0, 65_536)
    assert served.ttft == pytest.approx([prefill])
    # One of 32 layers is sent after the last one is computed.
    handed = CLUSTER.send_seconds(65_536, 16) / 32
    rows = sum(range(65_537, 65_547))
    decoding = 10 * CLUSTER.decode_times.step + rows * CLUSTER.decode_times.row
    assert served.per_token == pytest.approx([(handed + decoding) / 10])


def test_what_is_granted_late_is_sent_late() -> None:
    """With one backend, the second of two requests is sent after the first is all there."""
    trace = RequestTrace((Request(0.0, 32_768, 2), Request(0.0, 32_768, 2)))
    slow = replace(CLUSTER, sent_per_second=100.0, backends=1, decode_ranks=1)
    first, second = sorted(serve(trace, slow, "fixed-8").per_token)
    whole = slow.send_seconds(32_768, 8)
    assert first > whole - slow.times.seconds(8, 0, 32_768)
    assert second == pytest.approx(first + whole, rel=0.01)
    both = serve(trace, replace(slow, backends=2), "fixed-8").per_token
    assert max(both) == pytest.approx(first, rel=0.01)


def test_little_memory_delays_and_nothing_is_lost() -> None:
    """Blocks of both halves are all given back: the simulation asserts it where it ends."""
    trace = draw_trace(PRESETS["short"], 60, 2).at_rate(6.0)
    small = replace(CLUSTER, prefill_tokens=20_000, sent_per_second=2_000.0)
    assert sum(serve(trace, small, "cdsp", RATES).ttft) > sum(
        serve(trace, CLUSTER, "cdsp", RATES).ttft
    )
    few = replace(CLUSTER, decode_tokens=100_000)
    waiting = serve(trace, few, "cdsp", RATES)
    assert max(waiting.ttft) > max(serve(trace, CLUSTER, "cdsp", RATES).ttft)
    with pytest.raises(ValueError, match="larger than the largest pool of a decode rank"):
        serve(trace, replace(CLUSTER, decode_tokens=10_000), "cdsp", RATES)
    with pytest.raises(ValueError, match="need more than the 6,144"):
        serve(trace, replace(CLUSTER, prefill_tokens=500), "cdsp", RATES)


@pytest.mark.parametrize("seconds_of", [prefill_seconds, planned_seconds])
def test_capacity_is_the_highest_rate_within_the_limit(seconds_of) -> None:
    trace, cluster = draw_trace(PRESETS["short"], 120, 0), replace(CLUSTER, block_size=1024)
    found = find_capacity(trace, cluster, "fixed-8", precision=0.02, seconds_of=seconds_of)
    assert found.limit == pytest.approx(25 * light_load(trace, CLUSTER))
    for factor, within in ((1.0, True), (1.1, False)):
        loaded = trace.at_rate(found.per_second * factor)
        seconds = seconds_of(loaded, cluster, "fixed-8", RATES)
        assert (np.percentile(seconds, 99) <= found.limit) == within


def test_what_has_no_capacity_is_told() -> None:
    trace = draw_trace(PRESETS["short"], 200, 0)
    assert (
        find_capacity(trace, CLUSTER, "fixed-8", limit=0.01, seconds_of=planned_seconds).per_second
        < 1
    )
    few = RequestTrace(trace.requests[:9])
    with pytest.raises(ValueError, match="9 requests are too few to tell a capacity"):
        find_capacity(few, CLUSTER, "fixed-8")


def test_profiled_groups_shrink_with_the_load() -> None:
    trace = draw_trace(PRESETS["short"], 200, 3)
    rates = profile_rates(
        [trace], CLUSTER, "single-chunk", 3.0, improvement_rates=(0.05, 0.25, 0.55)
    )
    # At 9 none keeps within the limit; between 6 and 9 loads are closer together.
    assert list(rates.by_arrivals) == [3.0, 6.0, 7.5]
    assert rates.at(0.0)[1] > rates.at(99.0)[1], "smaller groups, under load"


def test_smaller_groups_bear_more_where_they_wait_for_nobody() -> None:
    trace = draw_trace(PRESETS["long"], 1000, 10)

    def bears(strategy: str, growth: float | tuple[float, int] = 0.0) -> float:
        rates = ImprovementRates({0.0: growth})
        found = find_capacity(trace, CLUSTER, strategy, rates, seconds_of=planned_seconds)
        return found.per_second

    fixed = bears("fixed-8")
    assert 1.0 < bears("cdsp", 0.25) / fixed < 1.08
    assert bears("cdsp", (0.25, 4)) / fixed > 1.1


def test_iterations_in_common_cost_time() -> None:
    """Ranks of one group wait for those of others, which Tetris' plans know nothing of."""
    trace = draw_trace(PRESETS["short"], 150, 4).at_rate(4.0)
    cluster, rates = replace(CLUSTER, block_size=1024), ImprovementRates({0.0: (0.25, 4)})
    planned, iterated = (
        float(np.mean(each(trace, cluster, "cdsp", rates)))
        for each in (planned_seconds, prefill_seconds)
    )
    assert planned < iterated
    alone = RequestTrace((Request(0.0, 30_000, 1),))
    assert planned_seconds(alone, cluster, "fixed-8") == [cluster.times.seconds(8, 0, 30_000)]
    assert prefill_seconds(alone, cluster, "fixed-8") == [cluster.times.seconds(8, 0, 30_000)]


def test_clusters_that_cannot_be_are_refused() -> None:
    times = published_model()
    with pytest.raises(ValueError, match="size 3 does not divide 32 heads"):
        describe_cluster(times, A100, MODELS["llama-8b"], 16, 2, 3)
    with pytest.raises(ValueError, match=r"141 GB of weights leave no room .* one GPU of dgx-a100"):
        describe_cluster(times, A100, MODELS["llama-70b"], 16, 2, 8)
    with pytest.raises(ValueError, match="prefill_ranks is 0"):
        replace(CLUSTER, prefill_ranks=0)
    with pytest.raises(ValueError, match="no strategy 'best': choose from fixed-N"):
        prefill_seconds(RequestTrace((Request(0.0, 5, 1),)), CLUSTER, "best")
