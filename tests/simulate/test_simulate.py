"""The simulator: closed-form cases, conservation of work and bytes, traces, and what is refused."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distca.cost.model_sizes import MODELS
from distca.cost.volume import PHASES, plan_bytes
from distca.plan import LayerMasks, Mask, validate_plan
from distca.schedule import ExecutionOptions, PlannedGlobalBatch, ScheduleConfig
from distca.schedule.base import server_loads
from distca.simulate import (
    CLUSTERS,
    BaselineLayout,
    Candidate,
    Charges,
    ModelCosts,
    Outcome,
    Workload,
    plan_global_batch,
    save_trace,
    simulate,
    simulate_baseline,
    simulate_ticks,
)
from distca.simulate.space import estimate
from distca.timeline import LANES
from support.batches import long_tailed_lengths
from support.simulated import IDEAL, MODEL, PACKED, costs_on, mixed_batch, passes, planned


@pytest.mark.parametrize("options", [PACKED, ExecutionOptions("packed"), ExecutionOptions("tiles")])
def test_one_rank_takes_the_sum_of_its_parts(options: ExecutionOptions) -> None:
    costs = costs_on(replace(IDEAL, launch_seconds=1e-3))
    outcome = simulate_ticks(planned([[2048, 2048]], 1, 1, options), costs)
    # A launch for each kernel call of each layer, there and back.
    calls = costs.model.layers * 2 * (2 if options.ping_pong else 1)
    assert outcome.seconds == pytest.approx(2 * sum(passes(costs, 2048, 4, True)) + 1e-3 * calls)
    assert outcome.idle == pytest.approx(0, abs=1e-9)
    assert (outcome.tokens, outcome.gpus) == (4096, 1)
    assert not any(sent.any() for sent in outcome.bytes_sent.values())


@pytest.mark.parametrize("stages", [1, 2])
def test_each_layer_takes_the_time_of_its_mask(stages: int) -> None:
    costs, windows = costs_on(IDEAL), [np.array([3000, 1096])] * 3
    seconds = []
    for masks in ([Mask()], [Mask(100)], [Mask(100), Mask()]):
        planned = plan_global_batch(
            windows, stages, 1, ScheduleConfig(shape=costs.shape), PACKED, LayerMasks.of(masks)
        )
        seconds.append(simulate_ticks(planned, costs).seconds)
    assert seconds[2] == pytest.approx((seconds[0] + seconds[1]) / 2)
    assert seconds[0] > 1.01 * seconds[1]


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
    shared = simulate_ticks(planned(uneven, 1, 4, ExecutionOptions("tiles")), costs)
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


@pytest.mark.parametrize(("ranks", "short"), [(1, [1025, 1023]), (2, [1024, 1024])])
def test_an_estimate_is_exact_where_nothing_waits(ranks: int, short: list[int]) -> None:
    """Each rank has the same whole documents, so that core attention is shared out perfectly."""
    cluster = replace(IDEAL, charges=Charges(half_waves=True))
    workload = Workload(MODEL, cluster, gpus=ranks, context=4096, sequences=2 * ranks)
    batch = [np.array([2048, 2048]), np.array(2 * short)] * ranks
    candidate = Candidate("tiles", 1, 1, ranks, 1, micro_batches=2)
    seconds = simulate(candidate, workload, batch).seconds
    assert estimate(candidate, workload, batch) == pytest.approx(seconds)


def total_passes(plan: PlannedGlobalBatch) -> dict[str, int]:
    phases = [tick.direction for tick in plan.schedule.ticks]
    return {"forward": phases.count("forward"), "backward": phases.count("backward")}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("scheduler", ["packed", "per-document-cp", "greedy", "tiles"])
@pytest.mark.parametrize("ping_pong", [True, False])
def test_bytes_and_work_are_the_plans(stages: int, scheduler: str, ping_pong: bool) -> None:
    windows = [long_tailed_lengths(seed, 4 * 2048, 500, 8192).tolist() for seed in range(3)]
    plan = planned(windows, stages, 4, ExecutionOptions(scheduler, ping_pong=ping_pong))
    costs = costs_on(replace(CLUSTERS["dgx-h100"], gpus_per_node=2))
    outcome = simulate_ticks(plan, costs)
    layers = costs.model.layers // stages
    expected = {phase: np.zeros(4 * stages, dtype=np.int64) for phase in PHASES}
    pairs = 0
    kernels = np.zeros(4 * stages)
    cost_model = costs.cluster.attention_cost(costs.shape)
    for tick, plans, _ in plan.ticks:
        mine = PHASES[:2] if tick.direction == "forward" else PHASES[2:]
        factor = 1.0 if tick.direction == "forward" else costs.cluster.backward_over_forward
        for each in plans:
            validate_plan(each)
            for phase in mine:
                expected[phase] += layers * plan_bytes(each, costs.shape).phases[phase].sum(axis=1)
            loads = server_loads(each.tasks, Mask(), 4 * stages, cost_model)
            kernels += factor * layers * loads
            pairs += int(each.loads().sum()) if tick.direction == "forward" else 0
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


def test_a_tensor_parallel_output_layer_has_one_collective() -> None:
    """Two GPUs each compute half, and pass half of a token's row on."""
    alone = ModelCosts(MODEL, IDEAL)
    pair = replace(alone, cluster=replace(IDEAL, node_gb_per_s=100.0), tensor_parallel=2)
    row_seconds = MODEL.hidden_size * 2 / 100e9
    assert pair.head_seconds() == pytest.approx(
        tuple(seconds / 2 + row_seconds / 2 for seconds in alone.head_seconds())
    )


def test_what_stages_pass_on() -> None:
    """Activations go to the next stage, and gradients back: none from the last one, or the first;
    from the last stage's first chunk they go on to the first stage."""
    row = MODEL.hidden_size * costs_on(IDEAL).dtype_bytes
    for chunks, messages in ((1, [1, 2, 1]), (2, [3, 4, 3])):
        options = replace(PACKED, chunks=chunks)
        costs = costs_on(IDEAL, layers=6)
        outcome = simulate_ticks(planned([[1024, 1024]] * 4, 3, 2, options), costs)
        sent = outcome.bytes_sent["pass on"].reshape(3, 2) / (4 * 1024 * row)
        assert sent.tolist() == [[count, count] for count in messages]


def test_the_same_input_gives_the_same_iteration() -> None:
    config = ScheduleConfig(shape=costs_on(IDEAL).shape)
    costs = costs_on(CLUSTERS["dgx-a100"])
    found = []
    for _ in range(2):
        plan = plan_global_batch(mixed_batch(4, 16384), 2, 4, config, ExecutionOptions("tiles"))
        found.append(simulate_ticks(plan, costs))
    first, second = found
    assert first.seconds == second.seconds
    assert (first.memory_bytes == second.memory_bytes).all()
    assert (first.exposed == second.exposed).all()


def test_what_is_refused() -> None:
    costs = costs_on(IDEAL)
    lengths = np.full(4, 1024)
    with pytest.raises(ValueError, match="no baseline 'ring'"):
        simulate_baseline("ring", lengths, BaselineLayout(1, 4, 1, 1), costs)
    with pytest.raises(ValueError, match="3 stages do not divide 4 layers"):
        simulate_baseline("plain", lengths, BaselineLayout(3, 1, 1, 1), costs)
    with pytest.raises(ValueError, match="use per-document-cp"):
        simulate_baseline("plain", lengths, BaselineLayout(1, 2, 2, 1), costs)
    with pytest.raises(ValueError, match="3 model chunks do not divide 4 layers"):
        simulate_ticks(planned([[1024]], 3, 1, ExecutionOptions(ping_pong=False)), costs)
    with pytest.raises(ValueError, match="multiple of 4"):
        planned([[1023, 1024]], 1, 2, ExecutionOptions())
    with pytest.raises(ValueError, match="does not divide the 8 GPUs"):
        IDEAL.links(3)
    with pytest.raises(ValueError, match="peak_tflops is 0"):
        replace(IDEAL, peak_tflops=0.0)
    with pytest.raises(ValueError, match="a part of the peak"):
        replace(IDEAL, linear_mfu=1.5)


def test_a_trace_in_the_runtimes_format(tmp_path: Path) -> None:
    plan = planned([[4096, 2048, 2048]] * 3, 2, 2, ExecutionOptions("tiles"))
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


def test_an_iteration_of_512_gpus_in_four_dimensions() -> None:
    """Within the simulator's stated bound of 10 s on one core: a promise, not a benchmark."""
    began = time.process_time()
    costs = ModelCosts(MODELS["llama-34b"], CLUSTERS["dgx-h200"], tensor_parallel=8)
    config = ScheduleConfig(shape=costs.shape, links=costs.cluster.links(8))
    windows = mixed_batch(16, 8 * 131_072)
    outcome: Outcome = simulate_ticks(
        plan_global_batch(windows, 4, 16, config, ExecutionOptions("tiles")), costs
    )
    assert outcome.gpus == 512
    assert outcome.tokens == 128 * 131_072
    # The bubbles of context-independent layers cannot be filled; all else is balanced.
    assert 0 < outcome.idle < 0.3
    assert outcome.computed.max() < 1.2 * outcome.computed.mean()
    assert time.process_time() - began < 10


def test_smaller_micro_batches_leave_less_idle_and_keep_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the same documents, with the same work; they borrow keys, which are copied and kept."""
    windows = [[4096], [3000, 1096]] * 4
    whole, parts = (
        planned(windows, 4, 1, ExecutionOptions("tiles", ping_pong=False, chain=chain))
        for chain in (1, 4)
    )
    assert whole.schedule.most_in_flight[0] == 7
    assert parts.schedule.most_in_flight[0] == 10
    costs = costs_on(IDEAL)
    before, after = simulate_ticks(whole, costs), simulate_ticks(parts, costs)
    assert after.computed.sum() == pytest.approx(before.computed.sum(), rel=0.01)
    # 8 + 3 ticks each way become 32 + 3 of a quarter; attention is shared out in any case.
    assert 35 / 44 * before.seconds < after.seconds < 0.95 * before.seconds
    activations = (7 * 4096 - 10 * 1024) * costs.activation_bytes()
    assert after.memory_bytes[0] < before.memory_bytes[0] - 0.8 * activations
    slow = costs_on(replace(IDEAL, copy_gb_per_s=1.0))
    each = slow, replace(slow, recompute="full")
    copying = [simulate_ticks(parts, costs) for costs in each]
    nothing = np.zeros(4, dtype=np.int64)
    monkeypatch.setattr("distca.cost.plan_memory.PlanMemory.borrowed_bytes", nothing)
    free = [simulate_ticks(parts, costs) for costs in each]
    rows = {"forward": 0, "backward": 0}
    for tick, plans, _ in parts.ticks:
        for plan in plans:
            own, kept = plan.own_tokens_per_rank(), plan.placement.tokens_per_rank()
            # Own keys are copied beside them; gradients are added up in 32 bits.
            of_rank = 2 * kept if tick.direction == "forward" else 5 * (kept - own)
            rows[tick.direction] += int((of_rank * (kept > own)).sum())
    # In the one layer of each stage, at 1 GB/s; recomputation borrows once more.
    second = 1e-9 * costs.shape.kv_row_bytes
    for with_them, without, times in zip(copying, free, (1, 2), strict=True):
        seconds = second * (times * rows["forward"] + rows["backward"])
        assert with_them.computed.sum() - without.computed.sum() == pytest.approx(seconds)
        assert (with_them.memory_bytes >= without.memory_bytes).all()
        assert with_them.memory_bytes[0] > without.memory_bytes[0]
