"""What iterations of inference cost beside their work: each event is charged once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest

from distca.cost.model_sizes import MODELS
from distca.plan import Mask, SteppedPlan
from distca.schedule.serving import (
    Strategy,
    nobody_holds,
    shard_evenly,
    shard_in_stripes,
    step_plan,
)
from distca.schedule.serving.cdsp import published_model
from distca.schedule.serving.scheduled import ScheduledTokens
from distca.simulate import CLUSTERS, Outcome
from distca.simulate.requests import describe_cluster
from distca.simulate.requests.costs import PlannedCosts
from distca.simulate.requests.vllm import Replicas
from distca.simulate.serving import (
    PARTS,
    InferenceCosts,
    Overheads,
    SimulatedSelector,
    chain_costs,
    described_split,
    simulate_shared,
    simulate_step,
)
from distca.simulate.serving.prefill_chain import ChainCosts

LAYERS = 3
MODEL = replace(MODELS["llama-8b"], layers=LAYERS)
H100 = CLUSTERS["dgx-h100"]
COSTS = InferenceCosts(MODEL, H100, 2)
CHAIN = ChainCosts(1e-4, 1e-9, LAYERS, 1e4, (10.0, 10.0))
PARTS_OF_CHAIN = np.array([[500, 400, 300]])
SECONDS = tuple(each.name for each in fields(Overheads) if each.name.endswith("_seconds"))
SHARES = tuple(each.name for each in fields(Overheads) if each.name.endswith("_efficiency"))


def planned(new: int, cached: int, ranks: int, strategy: Strategy) -> SteppedPlan:
    start = np.array([cached])
    held = shard_evenly(0 * start, start, ranks) if cached else nobody_holds(ranks)
    new_tokens = shard_evenly(start, start + new, ranks)
    return step_plan(held, new_tokens, strategy, Mask(), in_steps=True)


def prompt(costs: InferenceCosts, ranks: int = 4) -> Outcome:
    return simulate_step([planned(6000, 0, ranks, "pass-kv")] * LAYERS, costs)


def turn(costs: InferenceCosts) -> Outcome:
    return simulate_step([planned(600, 9000, 4, "pass-q")] * LAYERS, costs)


def decode(costs: InferenceCosts) -> Outcome:
    start = np.array([9000])
    held = shard_evenly(0 * start, start, 2)
    plan = step_plan(held, shard_in_stripes(start, start + 1, 0 * start, 16, 2), "pass-q", Mask())
    return simulate_step([plan] * LAYERS, costs)


def shared(costs: InferenceCosts) -> Outcome:
    split = described_split(costs, "sp-ntp")
    rows = split.share(6001)
    assert rows is not None
    return simulate_shared(split, rows, [planned(6001, 0, 1, "pass-kv")] * LAYERS, costs)


def chain(costs: InferenceCosts, whole: bool = False) -> float:
    of = replace(CHAIN, overheads=costs.overheads, whole_caches=whole)
    return float(of.chain_seconds(PARTS_OF_CHAIN)[0])


def decode_times(costs: InferenceCosts) -> float:
    cluster = describe_cluster(
        *(published_model(), CLUSTERS["dgx-a100"], MODELS["llama-8b"], 16, 2, 8),
        decode_overheads=costs.overheads,
    )
    return cluster.decode_times.seconds(10_000)


def searched(costs: InferenceCosts) -> float:
    of = chain_costs(costs, costs.attention_cost(), 4)
    return float(of.chain_seconds(np.array([[500, 400, 300, 200]]))[0])


RUNS: dict[str, Callable[[InferenceCosts], float]] = {
    "pass-kv": lambda costs: prompt(costs).seconds,
    "pass-q": lambda costs: turn(costs).seconds,
    "decode": lambda costs: decode(costs).seconds,
    "sp-ntp": lambda costs: shared(costs).seconds,
    "chain": chain,
    "vllm": lambda costs: Replicas(costs, 1, graph_tokens=0).seconds([(0, 500)], [900, 1000]),
    "vllm, decode": lambda costs: Replicas(costs, 1).seconds([], [900, 1000]),
    "decode times": decode_times,
    "searched chain": searched,
}
BEFORE = {
    "pass-kv": 0.003048162667197686,
    "pass-q": 0.0009434837656070732,
    "decode": 0.0005480247143301532,
    "sp-ntp": 0.011329657998510548,
    "chain": 0.04621666666666667,
    "vllm": 0.00098682013150402,
    "vllm, decode": 0.00045210748540341434,
    "decode times": 0.0016245506385483082 + 10_000 * 8.035311427170182e-09,
    "searched chain": 0.000623794299991923,
}
"""Seconds before there were overheads."""


@pytest.mark.parametrize("name", RUNS)
def test_without_overheads_iterations_cost_their_work(name: str) -> None:
    assert RUNS[name](COSTS) == pytest.approx(BEFORE[name], rel=1e-12)
    nothing = replace(COSTS, overheads=Overheads(), decode_overheads=Overheads())
    assert RUNS[name](nothing) == RUNS[name](COSTS)


@pytest.mark.parametrize("name", RUNS)
def test_no_term_makes_an_iteration_faster(name: str) -> None:
    for field in (*SECONDS, *SHARES):
        values = (0.0, 1e-4, 3e-3) if field in SECONDS else (1.0, 0.7, 0.3)
        found = [
            RUNS[name](replace(COSTS, overheads=Overheads(**{field: value}))) for value in values
        ]
        assert found == sorted(found), field


def longer(run: Callable[[InferenceCosts], float], **terms: float) -> float:
    """By how many seconds the terms lengthen a run."""
    return run(replace(COSTS, overheads=Overheads(**terms))) - run(COSTS)


def test_each_event_of_a_prefill_is_charged_once() -> None:
    one = 0.01
    for name in ("pass-kv", "pass-q", "decode", "sp-ntp", "chain", "vllm", "decode times"):
        assert longer(RUNS[name], iteration_seconds=one) == pytest.approx(one), name
        layers = 32 if name == "decode times" else LAYERS
        assert longer(RUNS[name], layer_seconds=one) == pytest.approx(layers * one), name
        # Hosts launch ahead: only what a layer takes less than its launches is waited for.
        seconds, launched = RUNS[name](COSTS), layers * 1.0
        waited = RUNS[name](replace(COSTS, overheads=Overheads(host_layer_seconds=1.0)))
        assert launched <= waited < launched + seconds, name
    # A ring of four has three steps with rows of others in a layer.
    for name in ("pass-kv", "pass-q"):
        assert longer(RUNS[name], step_seconds=one) == pytest.approx(3 * LAYERS * one)
    # Four collectives a layer, and one of the output layer.
    calls = 4 * LAYERS + 1
    for name in ("pass-kv", "pass-q", "vllm"):
        assert longer(RUNS[name], collective_seconds=one) == pytest.approx(calls * one)
    alone = replace(COSTS, tensor_parallel=1)
    assert prompt(replace(alone, overheads=Overheads(collective_seconds=one))).seconds == (
        prompt(alone).seconds
    )


def test_a_decode_step_on_two_ranks_waits_for_two_exchanges_a_layer() -> None:
    one = 0.01
    there_and_back = longer(RUNS["decode"], exchange_seconds=one)
    # Its own keys' kernel hides a little of the way there.
    assert there_and_back == pytest.approx(2 * LAYERS * one, rel=1e-2)
    # A prompt's kernels hide what they can.
    hidden = longer(RUNS["pass-kv"], exchange_seconds=1e-5)
    assert hidden < 0.5 * 3 * LAYERS * 1e-5


def test_chains_are_charged_for_what_comes_and_all_gathers_for_each_layer() -> None:
    one = 1.0
    gather = replace(CHAIN, overheads=Overheads(collective_seconds=one))
    assert gather.all_gather_seconds(1200) - CHAIN.all_gather_seconds(1200) == pytest.approx(
        LAYERS * one
    )
    # The last rank takes two parts, or one cache, in each layer.
    assert longer(chain, step_seconds=one) == pytest.approx(2 * LAYERS * one, rel=0.02)

    def whole(costs: InferenceCosts) -> float:
        return chain(costs, whole=True)

    first = longer(whole, step_seconds=one)
    # A rank's cache leaves once the one before has come: a step more for the last rank's first.
    assert first == pytest.approx((LAYERS + 1) * one, rel=0.02)
    # A rank with a whole cache waits for it before any product.
    assert whole(COSTS) > chain(COSTS)
    # The last rank joins and stacks all 1,200 rows in each layer, in the first after the others.
    copied = replace(CHAIN, whole_caches=True, copy_seconds=1.0).chain_seconds(PARTS_OF_CHAIN)[0]
    firsts = 500 + 2 * 900
    assert copied == pytest.approx(firsts + LAYERS * 2 * 1200, rel=1e-3)
    alone = replace(CHAIN, gb_per_s=(), overheads=Overheads(step_seconds=one, layer_seconds=one))
    assert alone.alone(100) == pytest.approx(CHAIN.alone(100) + LAYERS * one)


def test_collectives_over_nodes_take_a_hop_for_each_doubling() -> None:
    of = Overheads(collective_seconds=1.0, hop_seconds=0.5)
    assert [of.of_collective(nodes) for nodes in (1, 2, 3, 4)] == [1.0, 1.5, 2.0, 2.0]
    wide = replace(MODEL, heads=64, kv_heads=8)
    for gpus, seconds in ((8, 1.0), (16, 1.5), (32, 2.0)):
        costs = InferenceCosts(wide, H100, gpus)
        with_terms = replace(costs, overheads=of)
        tokens = np.array([5])
        more = with_terms.post_seconds(tokens) - costs.post_seconds(tokens)
        assert more == pytest.approx(3 * seconds)


def test_few_tokens_read_weights_and_keys_at_their_share_of_the_memory() -> None:
    one, half = np.array([1]), Overheads(weight_efficiency=0.5)
    costs = InferenceCosts(MODEL, H100)
    slow = replace(costs, overheads=half)
    assert slow.post_seconds(one) == pytest.approx(2 * costs.post_seconds(one))
    many = np.array([10**5])
    assert slow.post_seconds(many) == costs.post_seconds(many)
    keys = np.array([100_000])
    large = InferenceCosts(MODELS["llama-405b"], replace(H100, attention_tflops=900.0), 8)
    cached = replace(large, overheads=Overheads(cache_efficiency=0.5))
    found = [each.attention_cost().seconds(one, keys, keys) for each in (cached, large)]
    assert found[0] == pytest.approx(2 * found[1])


def test_only_decode_steps_take_the_overheads_of_graphs() -> None:
    costs = replace(COSTS, decode_overheads=Overheads(layer_seconds=1.0))
    for name, run in RUNS.items():
        graphs = {"decode": LAYERS, "vllm, decode": LAYERS}.get(name, 0)
        assert run(costs) - run(COSTS) == pytest.approx(graphs, abs=1e-9), name
    # The engine's iterations: decoded tokens alone, and with a chunk of a prompt.
    decoded = ScheduledTokens(0, 100, 1, np.array([0, 1] * 4))
    chunk = ScheduledTokens(1, 0, 60, np.array([0, 1] * 2))
    for feeds, graphs in (([decoded], LAYERS), ([decoded, chunk], 0)):
        with_graphs, before = (
            PlannedCosts(each, 2, 16).seconds(feeds, []) for each in (costs, COSTS)
        )
        assert with_graphs - before == pytest.approx(graphs, abs=1e-9)


def test_the_parts_of_the_last_rank_add_up() -> None:
    terms = dict.fromkeys(SECONDS, 1e-4) | {"host_layer_seconds": 2e-3}
    costs = replace(COSTS, overheads=Overheads(**terms))
    for run in (prompt, turn, decode, shared):
        for of in (costs, COSTS, replace(costs, cluster=replace(H100, network_gb_per_s=1.0))):
            found = run(of)
            assert [*found.spent] == [*PARTS]
            assert sum(found.spent.values()) == pytest.approx(found.seconds)
            assert min(found.spent.values()) >= 0
    work = prompt(COSTS).spent
    assert work["linear"] == pytest.approx(prompt(costs).spent["linear"])
    for field, part in (
        ("iteration_seconds", "host"),
        ("layer_seconds", "launches"),
        ("step_seconds", "launches"),
        ("collective_seconds", "collectives"),
    ):
        more = prompt(replace(COSTS, overheads=Overheads(**{field: 0.5}))).spent
        grown = [each for each in PARTS if more[each] > work[each] + 0.4]
        assert grown == [part], field
    assert prompt(replace(COSTS, overheads=Overheads(host_layer_seconds=1.0))).spent["host"] > 2.9


def test_selectors_charge_steps_and_exchanges() -> None:
    plan = planned(6000, 0, 4, "pass-kv")
    cost = COSTS.attention_cost()
    plain = SimulatedSelector(COSTS.shape, H100, COSTS.links, cost)
    charged = replace(plain, overheads=Overheads(step_seconds=0.01))
    assert charged.seconds(plan) - plain.seconds(plan) == pytest.approx(0.03)


@pytest.mark.parametrize("field", SECONDS)
def test_seconds_out_of_range_are_refused(field: str) -> None:
    for value in (-1e-9, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"{field} is {value}: give seconds, 0 or more"):
            Overheads(**{field: value})


@pytest.mark.parametrize("field", SHARES)
def test_shares_out_of_range_are_refused(field: str) -> None:
    for value in (0.0, 1.01, float("nan")):
        with pytest.raises(ValueError, match=f"{field} is {value}: give a share above 0, at most"):
            Overheads(**{field: value})


def test_collectives_wait_for_the_hosts_of_all_their_gpus() -> None:
    both = {"host_layer_seconds": 1.0, "collective_seconds": 0.5}
    gather = replace(CHAIN, overheads=Overheads(**both))
    assert gather.all_gather_seconds(1200) == pytest.approx(LAYERS * 1.5)
    for name in ("pass-kv", "vllm", "searched chain"):
        # Four collectives a layer; one more of the output layer, which a chain has not.
        seconds = LAYERS * (1.0 + 4 * 0.5) + 0.5 * (name != "searched chain")
        found = RUNS[name](replace(COSTS, overheads=Overheads(**both)))
        assert found == pytest.approx(seconds, rel=2e-3), name
    # Those that split the rows of one rank have more.
    collectives = longer(RUNS["sp-ntp"], collective_seconds=0.5)
    assert collectives > 4 * LAYERS * 0.5
    found = RUNS["sp-ntp"](replace(COSTS, overheads=Overheads(**both)))
    assert found == pytest.approx(LAYERS * 1.0 + collectives, rel=2e-3)
