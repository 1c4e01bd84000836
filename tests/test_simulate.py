"""The simulator: closed-form cases, conservation of work and bytes, and the runtime's own plans."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import long_tailed_lengths, task_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.link import Links
from distca.cost.memory import plan_memory
from distca.cost.models import MODELS, ModelSize
from distca.cost.tiled import TiledCost
from distca.cost.volume import PHASES, AttentionShape, plan_bytes
from distca.plan import Mask
from distca.plan.span import Floats, Int64s
from distca.runtime.buffers import Buffers
from distca.runtime.exchange import Exchange, build_exchange
from distca.runtime.trace import LANES
from distca.schedule import Phase, ScheduleConfig
from distca.schedule.base import server_loads
from distca.simulate import (
    CLUSTERS,
    Ablation,
    BaselineLayout,
    Candidate,
    Cluster,
    Job,
    ModelCosts,
    Outcome,
    PlannedBatch,
    Resources,
    Transfer,
    Way,
    plan_batch,
    save_trace,
    simulate,
    simulate_baseline,
    simulate_ticks,
)
from distca.simulate.copies import copy_traffic
from distca.simulate.one_f_one_b import order_of_1f1b
from distca.simulate.search import with_head_groups

MODEL = ModelSize(4, 512, 8, 2, 64, 1024, 1000)
IDEAL = replace(
    CLUSTERS["dgx-h200"],
    name="without overheads",
    node_gb_per_s=1e12,
    network_gb_per_s=1e12,
    copy_gb_per_s=1e12,
    node_latency=0.0,
    network_latency=0.0,
    launch_seconds=0.0,
)
"""Compute takes time there, and nothing else does."""


class SilentTransport:
    """Has no buffers of its own, and moves nothing."""

    rank = 1

    def reserve(self, sizes: object) -> None: ...


PACKED = Way("packed", ping_pong=False)
DIRECTIONS: tuple[Phase, ...] = ("forward", "backward")


def costs_on(cluster: Cluster, **changes: int) -> ModelCosts:
    return ModelCosts(replace(MODEL, **changes), cluster)


def planned(windows: list[list[int]], stages: int, ranks: int, way: Way) -> PlannedBatch:
    config = ScheduleConfig(shape=costs_on(IDEAL).shape)
    return plan_batch([np.array(w) for w in windows], stages, ranks, config, way)


def attention_seconds(costs: ModelCosts, length: int) -> float:
    lengths = np.array([length])
    pairs = lengths * (lengths + 1) // 2
    return float(costs.cluster.attention_cost(costs.shape).seconds(lengths, lengths, pairs)[0])


def passes(costs: ModelCosts, length: int, layers: int, head: bool) -> tuple[float, float]:
    """Seconds of a forward and a backward pass over one document on one rank."""
    attention = attention_seconds(costs, length)
    found = []
    for direction, factor in ((0, 1.0), (1, costs.cluster.backward_over_forward)):
        linear = costs.pre_seconds()[direction] + costs.post_seconds()[direction]
        seconds = layers * (length * linear + factor * attention)
        found.append(seconds + head * length * costs.head_seconds()[direction])
    return found[0], found[1]


@pytest.mark.parametrize("way", [PACKED, Way("packed"), Way("tiles")])
def test_one_rank_takes_the_sum_of_its_parts(way: Way) -> None:
    costs = costs_on(replace(IDEAL, launch_seconds=1e-3))
    outcome = simulate_ticks(planned([[2048, 2048]], 1, 1, way), costs)
    # A launch for each kernel call of each layer, there and back.
    calls = costs.model.layers * 2 * (2 if way.ping_pong else 1)
    assert outcome.seconds == pytest.approx(2 * sum(passes(costs, 2048, 4, True)) + 1e-3 * calls)
    assert outcome.idle == pytest.approx(0, abs=1e-9)
    assert (outcome.tokens, outcome.gpus) == (4096, 1)
    assert not any(sent.any() for sent in outcome.bytes_sent.values())


@dataclass(frozen=True)
class Timed:
    """A plan's transfer time, beside its compute."""

    plan: PlannedBatch
    costs: ModelCosts
    link_seconds: float

    def seconds(self, ablation: str = "none", head_groups: int = 1) -> float:
        return simulate_ticks(
            self.plan,
            self.costs,
            ablation=ablation,  # type: ignore[arg-type]
            head_groups=head_groups,
        ).seconds


def over_a_link(gb_per_s: float, ping_pong: bool, kv_heads: int = MODEL.kv_heads) -> Timed:
    """One document on two ranks: the second needs the first one's keys."""
    cluster = replace(IDEAL, network_gb_per_s=gb_per_s, node_gb_per_s=gb_per_s)
    # Without the reduction of gradients, which the link slows, too.
    costs = ModelCosts(replace(MODEL, vocab_size=1, kv_heads=kv_heads), cluster)
    plan = planned([[8192, 8192]], 1, 2, Way("packed", ping_pong=ping_pong, free_placement=False))
    moved = sum(
        int(plan_bytes(each, costs.shape).phases[phase].sum())
        for each in plan.plans[0]
        for phase in PHASES
    )
    return Timed(plan, costs, costs.model.layers * moved / gb_per_s / 1e9)


def test_ping_pong_hides_an_exchange_shorter_than_the_compute_beside_it() -> None:
    free = over_a_link(1e9, ping_pong=True)
    timed = over_a_link(200.0, ping_pong=True)
    assert timed.link_seconds > 0.02 * free.seconds()
    # Three exchanges carry something for each layer and half; behind the last one nothing is left.
    one = timed.link_seconds / (3 * 2 * timed.costs.model.layers)
    assert timed.seconds() <= free.seconds() + one
    assert timed.seconds("signal") == pytest.approx(free.seconds(), rel=1e-6)
    # Each exchange is waited for where it starts; the first rank has time to spare.
    exposed = timed.seconds("single-stream") - free.seconds()
    assert 0.6 * timed.link_seconds < exposed <= timed.link_seconds * (1 + 1e-6)


def test_head_groups_hide_what_a_dispatch_takes_longer_than_linear_layers() -> None:
    free = over_a_link(1e9, ping_pong=True, kv_heads=8).seconds()
    timed = over_a_link(45.0, ping_pong=True, kv_heads=8)
    # Busy for less than the compute, yet exposed: kernels wait for a whole nano-batch's rows.
    assert 0.6 * free < timed.link_seconds < 0.8 * free
    exposed = [timed.seconds(head_groups=groups) - free for groups in (1, 2, 4)]
    assert exposed[0] > 0.05 * free
    assert exposed[0] > 2 * exposed[1] > 4 * exposed[2] > 0
    # They move the same bytes, and a free link gains nothing by them.
    whole, grouped = (
        simulate_ticks(timed.plan, timed.costs, head_groups=groups) for groups in (1, 4)
    )
    assert {phase: sent.tolist() for phase, sent in whole.bytes_sent.items()} == {
        phase: sent.tolist() for phase, sent in grouped.bytes_sent.items()
    }
    assert timed.seconds("signal", head_groups=4) == pytest.approx(free, rel=1e-6)


@pytest.mark.parametrize("returns", [False, True])
def test_the_order_of_events(returns: bool) -> None:
    """As in the runtime: `tests/test_pipeline.py` has tests of the same of its trace."""
    costs = costs_on(replace(IDEAL, copy_gb_per_s=1000.0), layers=2)
    # The second document's queries help the first one's rank, or each rank has a half of one.
    lengths = [12288, 4096] * 2 if returns else [16384] * 2
    plan = planned([lengths], 1, 2, Way("greedy" if returns else "packed", free_placement=False))
    moved = [plan_bytes(each, costs.shape).phases["return"].any() for each in plan.plans[0]]
    assert moved == 2 * [returns]
    spans = simulate_ticks(plan, costs, recording=True).spans
    of_rank = sorted((s for s in spans if s.rank == 0), key=lambda s: s.start)
    found = [
        f"{s.name} {s.args['layer']} {s.args['nano_batch']}"
        for s in of_rank
        if s.name.removesuffix(" backward") in ("dispatch", "core attention")
    ]
    ahead, late = "dispatch 1 ping", "core attention 0 pong"
    there = [
        *("dispatch 0 ping", "dispatch 0 pong", "core attention 0 ping"),
        *((late, ahead) if returns else (ahead, late)),
        *("dispatch 1 pong", "core attention 1 ping", "core attention 1 pong"),
    ]
    # Before the loss is known, or after it.
    sent = ["dispatch backward 1 pong", "dispatch backward 1 ping"]
    computed = ["core attention backward 1 pong", "core attention backward 1 ping"]
    sent_ahead = ["dispatch backward 0 pong", "dispatch backward 0 ping"]
    by_nano_batch = zip(computed, sent_ahead, strict=True)
    back = [
        *(sent + (computed + sent_ahead if returns else list(itertools.chain(*by_nano_batch)))),
        *("core attention backward 0 pong", "core attention backward 0 ping"),
    ]
    assert found == there + back


def test_head_groups_divide_the_key_value_heads() -> None:
    job = Job(replace(MODEL, heads=24, kv_heads=24), IDEAL, 8, 8192, 8)
    whole = Candidate("tiles", tensor=2, stages=1, data=4, context=1, micro_batches=1)
    assert [c.head_groups for c in with_head_groups(whole, job)] == [2, 3, 4, 6]
    assert [c.head_groups for c in with_head_groups(replace(whole, tensor=1), job)][-1] == 8
    with pytest.raises(ValueError, match="12 key-value heads cannot be split into 5 head groups"):
        simulate(replace(whole, head_groups=5), job, [np.array([8192])] * 8)


def test_whole_micro_batches_hide_what_is_sent_ahead_alone() -> None:
    gradient = 1e-4
    for speed in (50.0, 5.0, 0.5):
        timed = over_a_link(speed, ping_pong=False)
        # One document in each half: no rank needs anything of the other.
        assert timed.link_seconds == 0
        ranks = planned([[16384]], 1, 2, Way("packed", ping_pong=False))
        moved = plan_bytes(ranks.plans[0][0], timed.costs.shape)
        link = timed.costs.model.layers * moved.total / speed / 1e9
        slow = simulate_ticks(ranks, timed.costs).seconds
        free = simulate_ticks(ranks, costs_on(IDEAL, vocab_size=1)).seconds
        # The second rank has most to do: it waits for the first one's keys, and gives back theirs.
        # In between they are sent again, but for one of four layers while others compute.
        exposed = slow - free
        assert link * (1 / 3 + 1 / 4 / 3) * 0.99 < exposed < link * 1.01 + gradient / speed * 50


def test_a_slow_link_carries_messages_one_after_the_other() -> None:
    cluster = replace(IDEAL, network_gb_per_s=1.0, network_latency=0.25)
    links = Links(1, 1.0, 1.0)
    at = Resources(4, cluster, np.ones(4))
    matrix = np.zeros((4, 4), dtype=np.int64)
    matrix[0, 1:] = 10**9
    moved = Transfer.of_bytes(matrix, links)
    first = at.exchange(moved, "dispatch")
    # Three messages share the port out of rank 0; they leave together.
    assert first.tolist() == [3.0, 3.25, 3.25, 3.25]
    # The port is still busy with the first exchange.
    second = at.exchange(moved, "dispatch")
    assert second.tolist() == [6.0, 6.25, 6.25, 6.25]
    at.wait(second)
    assert at.exposed.tolist() == second.tolist()
    assert at.sent["dispatch"].tolist() == [6 * 10**9, 0, 0, 0]
    # What comes from all shares the port in.
    at = Resources(4, cluster, np.ones(4))
    at.compute(np.array([0.0, 1.0, 0.0, 0.0]))
    arrived = at.exchange(Transfer.of_bytes(matrix.T.copy(), links), "return")
    assert arrived.tolist() == [3.25, 2.0, 1.0, 1.0]


def test_a_port_in_carries_one_thing_at_a_time() -> None:
    cluster = replace(IDEAL, node_gb_per_s=4.0, network_gb_per_s=1.0, network_latency=0.25)
    matrix = np.zeros((5, 5), dtype=np.int64)
    matrix[1:4, 0] = 10**9
    moved = Transfer.of_bytes(matrix, Links(1, 4.0, 1.0))
    at = Resources(5, cluster, np.ones(5))
    at.compute(np.array([0.0, 0.0, 5.0, 5.0, 0.0]))
    # Two messages come from 5 s on, whatever has come before.
    assert at.exchange(moved, "dispatch")[0] == 7.25
    # What comes next waits for the port, or for its senders.
    at.compute(np.array([0.0, 0.0, 0.5, 1.5, 0.0]))
    assert at.exchange(moved, "dispatch")[0] == 10.25
    # Those of a node are no part of it, and don't make the port in start.
    matrix[4, 0] = 4 * 10**9
    moved = Transfer.of_bytes(matrix, Links(3, 4.0, 1.0))
    at = Resources(5, cluster, np.ones(5))
    at.compute(np.array([0.0, 3.0, 1.0, 4.0, 2.0]))
    # Network: 5 GB from 2 s on, of which 1 GB may not begin before 4 s.
    assert at.exchange(moved, "dispatch").tolist() == [7.25, 3.25, 1.25, 5.0, 6.0]
    # A message does not come before its sender's port is free for it.
    out = np.zeros((5, 5), dtype=np.int64)
    out[1, 2] = 10 * 10**9
    at = Resources(5, cluster, np.ones(5))
    at.exchange(Transfer.of_bytes(out, Links(1, 4.0, 1.0)), "dispatch")
    matrix = np.zeros((5, 5), dtype=np.int64)
    matrix[1, 0], matrix[3, 0] = 1, 2 * 10**9
    late = at.exchange(Transfer.of_bytes(matrix, Links(1, 4.0, 1.0)), "dispatch")
    assert late[0] == pytest.approx(10.25)


def test_links_inside_a_node_and_outside_work_at_the_same_time() -> None:
    cluster = replace(IDEAL, node_gb_per_s=4.0, network_gb_per_s=1.0)
    matrix = np.zeros((4, 4), dtype=np.int64)
    matrix[0, 1] = matrix[0, 2] = 2 * 10**9
    moved = Transfer.of_bytes(matrix, Links(2, 4.0, 1.0))
    assert Resources(4, cluster, np.ones(4)).exchange(moved, "dispatch").tolist() == [2, 0.5, 2, 0]


def test_a_straggler_is_waited_for_at_the_gradients() -> None:
    plan = planned([[1024] * 4], 1, 4, PACKED)
    costs = costs_on(IDEAL)
    alone = sum(passes(costs, 1024, 4, True))
    assert simulate_ticks(plan, costs).seconds == pytest.approx(alone)
    slow = simulate_ticks(plan, costs, speeds=np.array([1.0, 1.0, 0.5, 1.0]))
    assert slow.seconds == pytest.approx(2 * alone)
    assert slow.computed.tolist() == pytest.approx([alone, alone, 2 * alone, alone])
    # A long document is a straggler, too; balanced servers are none.
    uneven = [[4096, *[128] * 96]]
    apart = simulate_ticks(planned(uneven, 1, 4, PACKED), costs)
    shared = simulate_ticks(planned(uneven, 1, 4, Way("tiles")), costs)
    assert apart.idle > 0.05 > shared.idle
    assert shared.seconds < apart.seconds


def test_gradients_are_reduced_behind_the_last_backward_pass() -> None:
    plan = planned([[1024] * 4], 1, 4, PACKED)
    free = simulate_ticks(plan, costs_on(IDEAL))
    costs = costs_on(replace(IDEAL, network_gb_per_s=0.01, node_gb_per_s=0.01))
    slow = simulate_ticks(plan, costs)
    forward = passes(costs, 1024, 4, True)[0]
    reduction = costs.gradient_seconds(0, 1, 4)
    assert reduction > free.seconds
    assert slow.seconds == pytest.approx(forward + reduction)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 3), (4, 6), (4, 2)])
def test_equal_passes_have_the_bubbles_of_1f1b(stages: int, micro_batches: int) -> None:
    # Without an output layer all stages are alike.
    costs = costs_on(IDEAL, vocab_size=1)
    head = sum(costs.head_seconds())
    seconds = sum(passes(costs, 1024, 4 // stages, False))
    expected = (micro_batches + stages - 1) * seconds
    windows = [[1024, 1024]] * micro_batches
    apart = Way("packed", ping_pong=False, pool_stages=False)
    ticks = simulate_ticks(planned(windows, stages, 2, apart), costs)
    lengths = np.full(2 * micro_batches, 1024)
    layout = BaselineLayout(stages, 2, 1, micro_batches)
    usual = simulate_baseline("packed", lengths, layout, costs)
    slack = 2 * micro_batches * 1024 * head
    assert expected <= ticks.seconds <= expected + slack
    assert expected <= usual.seconds <= expected + slack
    assert ticks.computed == pytest.approx(usual.computed)
    # Idle stages serve: less than that.
    pooled = Way("tiles", ping_pong=False)
    assert simulate_ticks(planned(windows, stages, 2, pooled), costs).seconds < ticks.seconds


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_1f1b_runs_every_pass_once_in_order(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        order = order_of_1f1b(stage, stages, micro_batches)
        for forward in (True, False):
            assert [n for f, n in order if f == forward] == list(range(micro_batches))
        in_flight = np.cumsum([1 if forward else -1 for forward, _ in order])
        assert in_flight.min() >= 0
        assert in_flight.max() == min(micro_batches, stages - stage)


def total_passes(plan: PlannedBatch) -> dict[str, int]:
    phases = [tick.phase for tick in plan.schedule.ticks]
    return {"forward": phases.count("forward"), "backward": phases.count("backward")}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("scheduler", ["packed", "per-document-cp", "greedy", "tiles"])
@pytest.mark.parametrize("ping_pong", [True, False])
def test_bytes_and_work_are_the_plans(stages: int, scheduler: str, ping_pong: bool) -> None:
    windows = [long_tailed_lengths(seed, 4 * 2048, 500, 8192).tolist() for seed in range(3)]
    plan = planned(windows, stages, 4, Way(scheduler, ping_pong=ping_pong))
    costs = costs_on(replace(CLUSTERS["dgx-h100"], gpus_per_node=2))
    outcome = simulate_ticks(plan, costs)
    layers = costs.model.layers // stages
    expected = {phase: np.zeros(4 * stages, dtype=np.int64) for phase in PHASES}
    pairs = 0
    kernels = np.zeros(4 * stages)
    cost_model = costs.cluster.attention_cost(costs.shape)
    for tick, plans in plan.ticks:
        mine = PHASES[:2] if tick.phase == "forward" else PHASES[2:]
        factor = 1.0 if tick.phase == "forward" else costs.cluster.backward_over_forward
        for each in plans:
            each.validate()
            for phase in mine:
                expected[phase] += layers * plan_bytes(each, costs.shape).phases[phase].sum(axis=1)
            loads = server_loads(each.tasks, Mask(), 4 * stages, cost_model)
            kernels += factor * layers * loads
            pairs += int(each.loads().sum()) if tick.phase == "forward" else 0
    for phase in PHASES:
        assert outcome.bytes_sent[phase].tolist() == expected[phase].tolist()
    lengths = np.concatenate([np.array(w) for w in windows])
    # Each stage computes every visible pair of all documents once in each layer.
    assert pairs == stages * int((lengths * (lengths + 1) // 2).sum())
    assert outcome.tokens == lengths.sum()
    linear = sum(costs.pre_seconds()) + sum(costs.post_seconds())
    work = kernels.sum() + linear * costs.model.layers * lengths.sum()
    work += sum(costs.head_seconds()) * lengths.sum()
    # The rest is copying and launching.
    assert work < outcome.computed.sum()
    ideal = simulate_ticks(plan, costs_on(IDEAL))
    assert ideal.computed.sum() == pytest.approx(
        float(kernels.sum())
        + (sum(sum(x) for x in (costs_on(IDEAL).pre_seconds(), costs_on(IDEAL).post_seconds())))
        * costs.model.layers
        * lengths.sum()
        + sum(costs_on(IDEAL).head_seconds()) * lengths.sum()
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 3), st.integers(0, 10**6))
def test_no_port_is_used_twice_at_a_time(ranks: int, per_node: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    cluster = replace(IDEAL, node_gb_per_s=2.0, network_gb_per_s=1.0)
    links = Links(per_node, 2.0, 1.0)
    at = Resources(ranks, cluster, np.ones(ranks))
    busy_out, busy_in = np.zeros((2, ranks)), np.zeros((2, ranks))
    over, came = np.zeros(ranks), np.zeros(ranks)
    for _ in range(4):
        matrix = generator.integers(0, 10**9, (ranks, ranks)) * generator.integers(
            0, 2, (ranks, ranks)
        )
        np.fill_diagonal(matrix, 0)
        moved = Transfer.of_bytes(matrix, links)
        assert moved.bytes_sent.sum() == moved.bytes_received.sum() == matrix.sum()
        busy_out, busy_in = busy_out + moved.out_seconds, busy_in + moved.in_seconds
        came += matrix.sum(axis=0)
        at.compute(generator.random(ranks))
        over = np.maximum(over, at.exchange(moved, "dispatch"))
        assert (over >= busy_out.max(axis=0) - 1e-9).all()
        assert (over >= busy_in.max(axis=0) - 1e-9).all()
        assert at.received["dispatch"].tolist() == came.tolist()
    # A rank's ports are never idle for longer than all that was computed before.
    slowest = at.clock.max() + (busy_out + busy_in).sum()
    assert over.max() <= slowest


class Ports:
    """The ports of ranks, one message after the other."""

    def __init__(self, ranks: int, per_node: int, speed: tuple[float, float]) -> None:
        self.per_node, self.speed, self.latency = per_node, speed, (0.125, 0.25)
        self.out, self.into = np.zeros((2, ranks)), np.zeros((2, ranks))

    def exchange(self, matrix: Int64s, clock: Floats) -> Floats:
        """When an exchange of `[source, destination]` bytes is over for each rank."""
        over, begins = clock.copy(), np.maximum(self.out, clock)
        left = begins.copy()
        messages = []
        for source, destination in np.argwhere(matrix).tolist():
            kind = int(source // self.per_node != destination // self.per_node)
            seconds = matrix[source, destination] / self.speed[kind] / 1e9
            left[kind, source] += seconds
            self.out[kind, source] = left[kind, source]
            messages.append((begins[kind, source], kind, source, destination, seconds))
        for begin, kind, source, destination, seconds in sorted(messages):
            port = kind, destination
            self.into[port] = max(self.into[port], begin) + seconds
            came = max(self.into[port], left[kind, source]) + self.latency[kind]
            over[destination] = max(over[destination], came)
            over[source] = max(over[source], left[kind, source])
        return over


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 3), st.integers(0, 10**6))
def test_exchanges_are_those_of_messages_in_turn(ranks: int, per_node: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    cluster = replace(IDEAL, node_latency=0.125, network_latency=0.25)
    at, ports = Resources(ranks, cluster, np.ones(ranks)), Ports(ranks, per_node, (2.0, 1.0))
    for _ in range(4):
        matrix = generator.integers(0, 10**9, (ranks, ranks))
        matrix *= generator.integers(0, 2, (ranks, ranks))
        np.fill_diagonal(matrix, 0)
        # Several ranks may start together.
        at.compute(generator.integers(0, 4, ranks) / 2)
        expected = ports.exchange(matrix, at.clock)
        moved = Transfer.of_bytes(matrix, Links(per_node, 2.0, 1.0))
        assert at.exchange(moved, "dispatch") == pytest.approx(expected)


def mixed_batch(windows: int, tokens: int) -> list[Int64s]:
    return [long_tailed_lengths(seed, tokens, tokens // 40, tokens) for seed in range(windows)]


def test_the_same_input_gives_the_same_iteration() -> None:
    config = ScheduleConfig(shape=costs_on(IDEAL).shape)
    costs = costs_on(CLUSTERS["dgx-a100"])
    found = []
    for _ in range(2):
        plan = plan_batch(mixed_batch(4, 16384), 2, 4, config, Way("tiles"))
        found.append(simulate_ticks(plan, costs))
    first, second = found
    assert first.seconds == second.seconds
    assert (first.memory_bytes == second.memory_bytes).all()
    assert (first.exposed == second.exposed).all()


def test_the_plans_are_the_runtimes() -> None:
    pytest.importorskip("megatron.core")
    from functools import partial

    from distca.schedule import make_scheduler, move_tiles, tick_schedule
    from megatron_patches.batch import WindowLayout
    from megatron_patches.planned_batches import Documents, PlannedBatches
    from megatron_patches.tick_batches import PipelineLayout, TickBatches

    windows = mixed_batch(4, 16384)
    config = ScheduleConfig(shape=AttentionShape(8, 2, 64))
    for name, ping_pong in (("tiles", True), ("greedy", False)):
        scheduler = make_scheduler(name, config)
        batches = PlannedBatches(
            None,  # type: ignore[arg-type]
            WindowLayout(0, 4, 4096, 1),
            Mask(),
            scheduler,
            config,
            True,
            ping_pong,
            1,
        )
        came = [Documents(w, np.cumsum(w) - w, (len(w),)) for w in windows]
        ticks = TickBatches.__new__(TickBatches)
        layout = PipelineLayout(0, 1, np.arange(8).reshape(2, 4), 0)
        object.__setattr__(ticks, "batches", batches)
        object.__setattr__(ticks, "layout", layout)
        object.__setattr__(ticks, "scheduler", scheduler)
        object.__setattr__(ticks, "move", partial(move_tiles, config=config))
        micro_batches = [batches.plan(each) for each in batches._share_out(came)]
        mine = plan_batch(windows, 2, 4, config, Way(name, ping_pong=ping_pong))
        assert mine.schedule == tick_schedule(4, 2)
        for tick, plans in mine.ticks:
            stages = [None if w is None else micro_batches[w.micro_batch] for w in tick.work]
            theirs = ticks._plans(stages)
            assert [task_rows(plan) for plan in plans] == [task_rows(plan) for plan in theirs]


def test_memory_and_running_out_of_it() -> None:
    costs = ModelCosts(MODELS["llama-8b"], CLUSTERS["dgx-h200"], tensor_parallel=8)
    lengths = np.full(8, 131_072)
    alone = simulate_baseline("packed", lengths, BaselineLayout(1, 8, 1, 1), costs)
    # 32 layers of 139 kilobytes a token on 8 GPUs, as the paper's authors could run.
    assert 70e9 < 131_072 * 32 * costs.activation_bytes() < 80e9
    assert alone.fits
    # Two sequences at once on each don't fit; as two micro-batches they do.
    twice = np.full(16, 131_072)
    assert not simulate_baseline("packed", twice, BaselineLayout(1, 8, 1, 1), costs).fits
    accumulated = simulate_baseline("packed", twice, BaselineLayout(1, 8, 1, 2), costs)
    assert accumulated.fits
    assert accumulated.memory_bytes.max() == pytest.approx(alone.memory_bytes.max())
    # Gathered keys and values of the other ranks are kept (paper, Figure 3b).
    gathered = simulate_baseline("per-document-cp", lengths, BaselineLayout(1, 1, 8, 1), costs)
    more = 7 * 131_072 * 32 * costs.shape.kv_row_bytes
    assert gathered.memory_bytes.max() - alone.memory_bytes.max() == pytest.approx(more)
    # Ticks keep 2 P - 1 micro-batches in flight; a bound keeps fewer.
    config = ScheduleConfig(shape=costs.shape)
    windows = [np.full(2, 131_072)] * 8
    free, bound = (
        simulate_ticks(plan_batch(windows, 2, 4, config, Way(max_in_flight=most)), costs)
        for most in (None, 1)
    )
    each = 65_536 * 16 * costs.activation_bytes()
    fewer = free.memory_bytes[:4] - bound.memory_bytes[:4]
    assert fewer.tolist() == pytest.approx([2 * each] * 4, rel=0.02)
    assert bound.seconds > free.seconds


def test_logits_are_kept_until_their_backward_pass() -> None:
    windows = [[1024]] * 32
    # With a bound on what is in flight the last stage runs two micro-batches before the first's
    # backward pass (of 8 stages that keep at most 8); otherwise one.
    for bound, in_flight in ((8, 2), (None, 1)):
        plan = planned(windows, 8, 1, Way("packed", ping_pong=False, max_in_flight=bound))
        assert plan.schedule.most_in_flight[-1] == in_flight
        found = []
        for vocabulary in (1000, 2000):
            costs = costs_on(IDEAL, layers=8, vocab_size=vocabulary)
            memory = simulate_ticks(plan, costs).memory_bytes
            found.append(memory - [costs.state_bytes(stage, 8, 1) for stage in range(8)])
        # A float32 number for each that waits, and 16 bits more for the one that runs.
        more = 1024 * 1000 * (4 * in_flight + 2)
        assert found[1] - found[0] == pytest.approx([0.0] * 7 + [more])


def test_context_parallel_ranks_wait_for_the_gathered_keys() -> None:
    cluster = replace(IDEAL, network_gb_per_s=10.0)
    costs = costs_on(cluster, vocab_size=1)
    # Long enough for the backward pass to hide the reduction of gradients.
    lengths = np.full(4, 65_536)
    free = simulate_baseline("per-document-cp", lengths, BaselineLayout(1, 1, 16, 1), costs)
    nothing = simulate_baseline(
        "per-document-cp", lengths, BaselineLayout(1, 1, 16, 1), costs_on(IDEAL, vocab_size=1)
    )
    # There and back in each layer, 15 of 16 parts of all keys and values come over the links: a
    # node has one for each of its 8 ranks.
    gathered = 4 * 65_536 * costs.shape.kv_row_bytes * 15 // 16
    expected = 2 * costs.model.layers * gathered / 80e9
    assert free.seconds - nothing.seconds == pytest.approx(expected, rel=1e-3)
    assert free.gathering == pytest.approx(expected, rel=1e-3)
    # Documents of a length are shared out equally: nobody waits for others.
    assert free.exposed == pytest.approx(free.gathering, rel=1e-3)
    assert free.bytes_sent["all-gather"].tolist() == [costs.model.layers * gathered] * 16


@pytest.mark.parametrize(
    ("members", "servers", "tensor_parallel", "expected"),
    [
        # Inside a node, also where the job is smaller than one.
        (4, 16, 1, 450.0),
        (3, 3, 1, 450.0),
        (6, 6, 1, 450.0),
        # As many links as members on a node, but no faster than the node.
        (16, 32, 1, 400.0),
        (16, 16, 2, 200.0),
        (16, 16, 8, 50.0),
        # Some group has only 4 members on one of its nodes, or a single one.
        (12, 24, 1, 200.0),
        (3, 24, 1, 50.0),
    ],
)
def test_collectives_use_the_links_of_all_members(
    members: int, servers: int, tensor_parallel: int, expected: float
) -> None:
    cluster = CLUSTERS["dgx-h200"]
    assert cluster.ring(members, servers, tensor_parallel)[0] == expected
    fast = replace(cluster, network_gb_per_s=100.0)
    assert fast.ring(16, 16, 1)[0] == 450.0
    costs = ModelCosts(MODELS["llama-8b"], cluster, tensor_parallel)
    nbytes = costs.stage_parameters(0, servers // members) * 6
    assert costs.gradient_seconds(0, servers // members, members) == pytest.approx(
        nbytes * (members - 1) / members / (expected * 1e9)
    )


def test_ranks_of_a_group_wait_for_its_slowest() -> None:
    costs = costs_on(IDEAL, vocab_size=1)
    # One document in each bin of two ranks, all of which is on the first rank's half, or shared.
    lengths = np.array([4096, *[128] * 32, 4096, *[128] * 32])
    outcome = simulate_baseline("wlb-llm", lengths, BaselineLayout(1, 2, 2, 1), costs)
    assert not outcome.gathering.max() > 1e-9
    # What is neither computed nor waited for is the wait of replicas for each other, at the end.
    of_replicas = (outcome.computed + outcome.exposed).reshape(2, 2)
    assert of_replicas[:, 0] == pytest.approx(of_replicas[:, 1])
    assert of_replicas.max() == pytest.approx(outcome.seconds, rel=1e-6)
    launched = simulate_baseline(
        "wlb-llm",
        lengths,
        BaselineLayout(1, 2, 2, 1),
        costs_on(replace(IDEAL, launch_seconds=1e-3), vocab_size=1),
    )
    # A kernel of each layer, there and back.
    assert launched.computed - outcome.computed == pytest.approx(2 * 4 * 1e-3)


def copied_by_the_runtime(
    exchange: Exchange, shape: AttentionShape, grouped: bool
) -> tuple[int, int]:
    """Bytes that its steps read and write beside kernels, forward and backward, tensor by tensor.

    One copy of what is sent, and one of what arrives, are counted elsewhere.
    """
    q_row, kv_row, lse = shape.q_row_bytes, shape.kv_row_bytes, shape.lse_row_bytes
    wide_q, wide_kv = 2 * q_row, 2 * kv_row
    q, kv, calls = exchange.q, exchange.kv, exchange.calls
    forward = 2 * (len(q.send) * q_row + len(kv.send) * kv_row)
    # A head group's part of a tensor is not contiguous, but its own LSE is.
    forward += 2 * q.local * q_row if q.received or grouped else 0
    forward += 2 * kv.local * kv_row if kv.received or grouped else 0
    alone = len(calls) == 1 and calls[0].q_rows is None and calls[0].first_q is None
    merge = 9 * q_row + 10 * wide_q + 21 * lse
    for call in calls:
        rows, keys = int(call.cu_seqlens_q[-1]), int(call.cu_seqlens_kv[-1])
        forward += 2 * rows * q_row if call.q_rows is not None else 0
        forward += 2 * keys * kv_row if call.kv_rows is not None else 0
        if alone:
            continue
        first = rows if call.first_q is None else len(call.first_q)
        forward += 2 * first * (q_row + lse) * (1 if call.first_q is None else 2)
        forward += sum(len(part) for part in call.repeated_q) * merge
    if q.received or not alone:
        forward += 2 * q.local * (q_row + lse)
    for arrival in exchange.arrivals:
        forward += 4 * len(arrival.first) * (q_row + lse) + len(arrival.repeated) * merge
    # Outputs and gradients of all groups are concatenated.
    forward += 2 * q.local * q_row if grouped else 0
    inputs = 3 * q_row + lse
    backward = 2 * (len(q.send) * inputs + len(kv.send) * kv_row)
    backward += 2 * q.local * 3 * q_row if q.received or grouped else 0
    backward += 2 * q.local * lse if q.received else 0
    backward += 2 * kv.local * kv_row if kv.received or grouped else 0
    backward += 2 * (q.local * q_row + kv.local * kv_row) if grouped else 0
    backward += q.served * wide_q + kv.served * wide_kv
    for call in calls:
        rows, keys = int(call.cu_seqlens_q[-1]), int(call.cu_seqlens_kv[-1])
        for index, number, row, inputs_row in (
            (call.q_rows, rows, q_row, inputs),
            (call.kv_rows, keys, kv_row, kv_row),
        ):
            backward += number * (row + 2 * 2 * row)
            if index is not None:
                backward += number * (2 * inputs_row + 2 * 2 * row)
    for rows_of, row in ((q, q_row), (kv, kv_row)):
        backward += rows_of.received * (2 * row + row)
        backward += len(rows_of.send) * (row + 4 * 2 * row)
        backward += rows_of.local * (2 * row + row)
    return forward, backward


@pytest.mark.parametrize("scheduler", ["packed", "per-document-cp", "greedy", "tiles"])
@pytest.mark.parametrize(("free_placement", "head_groups"), [(True, 1), (False, 1), (True, 2)])
def test_copies_are_those_of_the_runtime(
    scheduler: str, free_placement: bool, head_groups: int
) -> None:
    shape, grouped = AttentionShape(8, 2, 64, 2).head_group(head_groups), head_groups > 1
    way = Way(scheduler, ping_pong=False, free_placement=free_placement)
    merged = 0
    for seed in range(3):
        lengths = long_tailed_lengths(seed, 4 * 2048, 500, 8192)
        config = ScheduleConfig(shape=shape)
        ((plan,), *_) = plan_batch([lengths], 1, 4, config, way).plans
        forward, backward = (
            copy_traffic(plan, shape, direction, grouped) for direction in DIRECTIONS
        )
        exchanges = [build_exchange(plan, rank) for rank in range(4)]
        merged += sum(len(each.repeated) for one in exchanges for each in one.arrivals)
        expected = [copied_by_the_runtime(exchange, shape, grouped) for exchange in exchanges]
        assert forward.tolist() == [each[0] for each in expected]
        assert backward.tolist() == [each[1] for each in expected]
    # Of some rows several servers compute a part.
    assert merged or scheduler != "tiles" or free_placement


@pytest.mark.parametrize(
    ("ablation", "head_groups"), [("none", 1), ("none", 2), ("single-stream", 1), ("signal", 1)]
)
def test_copies_take_the_time_of_memory(ablation: Ablation, head_groups: int) -> None:
    plan = planned([[8192, 8192, 100, 28]], 1, 2, Way("tiles"))
    slow = replace(IDEAL, copy_gb_per_s=1.0)
    took = [
        simulate_ticks(plan, costs_on(at), ablation=ablation, head_groups=head_groups).computed
        for at in (slow, IDEAL)
    ]
    costs = costs_on(slow)
    group, grouped = costs.shape.head_group(head_groups), head_groups > 1
    expected = np.zeros(2)
    for tick, plans in plan.ticks:
        phases = PHASES[:2] if tick.phase == "forward" else PHASES[2:]
        for each in plans:
            moved = plan_bytes(each, costs.shape).phases
            once = sum(moved[p].sum(axis=0) + moved[p].sum(axis=1) for p in phases)
            # Signals are packed and unpacked as their messages are.
            expected += 2 * once + head_groups * copy_traffic(each, group, tick.phase, grouped)
    assert took[0] - took[1] == pytest.approx(4 * expected / 1e9)


def test_buffers_are_counted_as_the_runtime_reserves_them() -> None:
    costs = costs_on(IDEAL)
    plan = planned([[16384, 8192, 8192]], 1, 2, Way("tiles", ping_pong=False))
    ((made,), *_) = plan.plans
    buffers = Buffers(torch.device("cpu"))
    buffers.reserve(plan_memory(made, costs.shape), SilentTransport())  # type: ignore[arg-type]
    reserved = buffers.room.total(1)
    own = made.own_tokens_per_rank()
    kept = own * (4 * costs.activation_bytes() + costs.logit_bytes())
    outcome = simulate_ticks(plan, costs)
    expected = kept + costs.state_bytes(0, 1, 2) + reserved
    assert outcome.memory_bytes == pytest.approx(expected)
    assert reserved > 1.2 * plan_memory(made, costs.shape).total(1) > 0


def test_wlb_llm_balances_all_work_of_bins() -> None:
    costs = costs_on(IDEAL)
    lengths = long_tailed_lengths(0, 64 * 4096, 1000, 16384)
    layout = BaselineLayout(1, 4, 2, 2)
    wlb = simulate_baseline("wlb-llm", lengths, layout, costs)
    lengths = lengths[np.argsort(lengths)]
    with pytest.raises(ValueError, match="crosses the end"):
        simulate_baseline("packed", lengths, BaselineLayout(1, 8, 1, 2), costs)
    ideal = wlb.computed.mean()
    assert wlb.seconds < 1.1 * ideal
    assert wlb.tokens == 64 * 4096


def test_what_is_refused() -> None:
    costs = costs_on(IDEAL)
    lengths = np.full(4, 1024)
    with pytest.raises(ValueError, match="no baseline 'ring'"):
        simulate_baseline("ring", lengths, BaselineLayout(1, 4, 1, 1), costs)
    with pytest.raises(ValueError, match="3 stages do not divide 4 layers"):
        simulate_baseline("packed", lengths, BaselineLayout(3, 1, 1, 1), costs)
    with pytest.raises(ValueError, match="use per-document-cp"):
        simulate_baseline("packed", lengths, BaselineLayout(1, 2, 2, 1), costs)
    with pytest.raises(ValueError, match="3 model chunks do not divide 4 layers"):
        simulate_ticks(planned([[1024]], 3, 1, Way(ping_pong=False)), costs)
    with pytest.raises(ValueError, match="multiple of 4"):
        planned([[1023, 1024]], 1, 2, Way())
    with pytest.raises(ValueError, match="does not divide the 8 GPUs"):
        IDEAL.links(3)
    with pytest.raises(ValueError, match="peak_tflops is 0"):
        replace(IDEAL, peak_tflops=0.0)
    with pytest.raises(ValueError, match="a part of the peak"):
        replace(IDEAL, linear_mfu=1.5)


def test_a_trace_in_the_runtimes_format(tmp_path: Path) -> None:
    plan = planned([[4096, 2048, 2048]] * 3, 2, 2, Way("tiles"))
    costs = costs_on(CLUSTERS["dgx-h200"])
    outcome = simulate_ticks(plan, costs, recording=True)
    quiet = simulate_ticks(plan, costs)
    assert outcome.seconds == quiet.seconds
    path = tmp_path / "trace.json"
    save_trace(path, outcome)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names == set(LANES)
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == {0, 1, 2, 3}
    titles = {e["name"] for e in spans if e["cat"] == "ticks"}
    assert {"forward: serve", "backward: micro-batch 2", "forward: micro-batch 0"} <= titles
    for rank in range(4):
        kernels = [e for e in spans if e["pid"] == rank and e["cat"] == "kernels"]
        kernels.sort(key=lambda e: e["ts"])
        for one, after in itertools.pairwise(kernels):
            assert one["ts"] + one["dur"] <= after["ts"] + 1e-6
    assert max(e["ts"] + e["dur"] for e in spans) <= 1e6 * outcome.seconds + 1e-6
    with pytest.raises(ValueError, match="nothing was recorded"):
        save_trace(path, quiet)


def test_tiles_of_a_kernel() -> None:
    cost = TiledCost(2.0, 1.0)
    lengths = np.array([128, 256, 1, 300])
    squares = cost.seconds(lengths, lengths, lengths * lengths) / 2
    assert squares.tolist() == [128**2, 256**2, 128**2, 384**2]
    diagonal = cost.seconds(lengths, lengths, lengths * (lengths + 1) // 2) / 2
    # Of a triangle of tiles those on the diagonal are whole.
    assert diagonal.tolist() == [128**2, 3 * 128**2, 128**2, 6 * 128**2]
    q, kv = np.array([128]), np.array([512])
    assert cost.seconds(q, kv, q * kv - q * (q - 1) // 2)[0] / 2 == 128 * 512
    assert cost.seconds(q, kv, q * 0)[0] == 0


def test_an_iteration_of_512_gpus_in_four_dimensions() -> None:
    """Within the simulator's stated bound of 10 s on one core: a promise, not a benchmark."""
    began = time.process_time()
    costs = ModelCosts(MODELS["llama-34b"], CLUSTERS["dgx-h200"], tensor_parallel=8)
    config = ScheduleConfig(shape=costs.shape, links=costs.cluster.links(8))
    windows = mixed_batch(16, 8 * 131_072)
    outcome: Outcome = simulate_ticks(plan_batch(windows, 4, 16, config, Way("tiles")), costs)
    assert outcome.gpus == 512
    assert outcome.tokens == 128 * 131_072
    # The bubbles of context-independent layers cannot be filled; all else is balanced.
    assert 0 < outcome.idle < 0.3
    assert outcome.computed.max() < 1.2 * outcome.computed.mean()
    assert time.process_time() - began < 10
