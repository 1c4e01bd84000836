"""A global batch is planned once: training and simulator have the same plans, bytes and memory."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from distca.cost.memory import plan_memory
from distca.cost.volume import PHASES, AttentionShape, plan_bytes
from distca.plan import LayerMasks, Mask, Plan, place_sequentially, validate_plan
from distca.plan.plan import max_over_mean
from distca.schedule import (
    Documents,
    ExecutionOptions,
    GlobalBatchPlanner,
    PlannedGlobalBatch,
    ScheduleConfig,
    documents_in_turn,
)
from distca.schedule.program import Pass, calls_of
from distca.simulate import pack_sequences, plan_global_batch
from support.batches import long_tailed_lengths, placement_rows, task_rows
from support.ranks import forget_megatron

SHAPE = AttentionShape(8, 2, 64)
CONFIG = ScheduleConfig(shape=SHAPE)


def servers(stages: int, ranks: int) -> np.ndarray:
    return np.arange(stages * ranks, dtype=np.int64).reshape(stages, ranks)


def rows(plans: tuple[Plan, ...]) -> list[Any]:
    return [(plan.lengths.tolist(), placement_rows(plan), task_rows(plan)) for plan in plans]


def planned_by_training(runs: list[list[str]], lengths: list[int]) -> list[Any]:
    """Of each run what plans are judged by, the calls of a tick, and the first batch's ticks."""
    import torch

    from megatron_patches.batches.plan_log import log_first_plan
    from megatron_patches.flags.config import DistcaConfig
    from megatron_patches.flags.planning import linear_work, schedule_config
    from megatron_patches.loop.data import window_layout
    from megatron_patches.pipeline.planned_data import PlannedData
    from support import training
    from support.models import global_batch, memory_stream, parse

    found = []
    for flags in runs:
        args = parse(flags)
        training.initialize(args)
        planned = PlannedData.start(
            DistcaConfig.from_args(args), args, window_layout(args), torch.device("cpu")
        )
        made = planned.maker(memory_stream(lengths), forward_only=False)
        log_first_plan(made.reader, "resend", 0, planned.micro_batches_at(0))
        ticks = [
            (each.tick, rows(each.plans), each.bytes_sent, each.memory)
            for each in global_batch(made, 0, planned.micro_batches_at(0))
        ]
        config = schedule_config(DistcaConfig.from_args(args), args, made.runtime.layout.world_size)
        passes: tuple[Pass, ...] = ("forward", "backward")
        calls = {
            each: calls_of(made.runtime.program(each, 1, at_home=False), made.runtime.masks)
            for each in passes
        }
        found.append((config, linear_work(args), calls, ticks))
        forget_megatron()
    return found


def test_training_and_simulator_have_the_same_plans(ranks) -> None:
    """Of the same documents and flags, and so the same bytes and memory, on every rank."""
    stages, tokens, micro_batches = 2, 512, 4
    lengths = long_tailed_lengths(3, 2 * tokens * micro_batches, 100, 900)
    lengths[-1] += 2 * tokens
    common = ["--distca", "--seq-length", str(tokens), "--global-batch-size", "8"]
    common += ["--pipeline-model-parallel-size", str(stages)]
    sequential = ["--distca-placement", "sequential", "--no-distca-ping-pong"]
    speeds = ["--distca-server-speeds", "1", "1", "2", "1"]
    runs = {
        ExecutionOptions("tiles"): ["--distca-ping-pong", *speeds],
        ExecutionOptions("greedy", False, False, False): [*sequential, "--no-distca-pool-stages"],
    }
    flags = [
        [*common, "--distca-scheduler", options.scheduler, *own] for options, own in runs.items()
    ]
    by_rank = ranks.run(planned_by_training, flags, lengths.tolist(), world_size=4)
    sequences = pack_sequences(cut(lengths, 2 * tokens * micro_batches), micro_batches, 2 * tokens)
    crossing = 0
    for number, options in enumerate(runs):
        config, work, calls, _ = by_rank[0][number]
        batch = plan_global_batch(sequences, stages, 2, config, options, linear_work=work)
        crossing += any(
            plan.cached_prefix is not None for tick in batch.ticks for plan in tick.plans
        )
        memory = batch.largest_memory(config.shape)
        for rank, runs_of_rank in enumerate(by_rank):
            ticks = runs_of_rank[number][-1]
            assert len(ticks) == len(batch.ticks)
            for tick, theirs in zip(batch.ticks, ticks, strict=True):
                sent = tick.bytes_sent(calls[tick.tick.direction], config.shape)
                of_rank = {name: int(each[rank]) for name, each in sent.items()}
                assert theirs == (tick.tick, rows(tick.plans), of_rank, memory)
    assert crossing == 1, "a document crosses from ping to pong, and none where there is neither"


def cut(lengths: np.ndarray, tokens: int) -> np.ndarray:
    """The first documents, the last one cut where so many tokens are full."""
    ends = np.minimum(np.cumsum(lengths), tokens)
    kept = np.diff(ends, prepend=0)
    return kept[kept > 0]


def mixed(stages: int, options: ExecutionOptions, ranks: int = 2) -> PlannedGlobalBatch:
    windows = [long_tailed_lengths(seed, 4096, 200, 4096) for seed in range(4)]
    planner = GlobalBatchPlanner(servers(stages, ranks), CONFIG, options)
    return planner.plan(documents_in_turn(windows))


def test_ticks_that_run_the_same_micro_batches_share_their_plans() -> None:
    """By number, which still tells them apart when a process has sent them."""
    windows = [long_tailed_lengths(seed, 2048, 200, 2048) for seed in range(3)]
    planner = GlobalBatchPlanner(servers(1, 2), CONFIG, ExecutionOptions())
    ticks = pickle.loads(pickle.dumps(planner.plan(documents_in_turn(windows)))).ticks
    numbers = {tick.tick.work[0].micro_batch: tick.number for tick in ticks}
    assert sorted(numbers.values()) == [0, 1, 2]
    assert [tick.number for tick in ticks] == [numbers[t.tick.work[0].micro_batch] for t in ticks]
    assert len({id(tick.plans) for tick in ticks}) == 3


@pytest.mark.parametrize(
    ("stages", "local"), [(1, Mask(300)), (2, Mask(300)), (2, Mask(None, 1024))]
)
def test_each_mask_has_balanced_plans_of_one_placement(stages: int, local: Mask) -> None:
    masks = LayerMasks.of([local, local, Mask()])
    windows = [long_tailed_lengths(seed, 8192, 200, 8192) for seed in range(3)]
    options = ExecutionOptions()
    planner = GlobalBatchPlanner(servers(stages, 2), CONFIG, options, masks)
    batch = planner.plan(documents_in_turn(windows))
    assert masks == LayerMasks((Mask(), local), (1, 1, 0)) == batch.masks
    alone = replace(planner, masks=LayerMasks((local,))).plan(documents_in_turn(windows))
    assert len(alone.ticks[0].plans) == 2
    for _, plans, _ in batch.ticks:
        for layer, mask in enumerate((local, local, Mask(), local)):
            pair = masks.select(plans, layer)
            assert [plan.mask for plan in pair] == [mask] * 2
            for plan, widest in zip(pair, masks.select(plans, 2), strict=True):
                validate_plan(plan)
                assert placement_rows(plan) == placement_rows(widest)
                assert max_over_mean(plan.loads()) < 1.2
    calls = [{"forward": 1, "backward": 0}, {"forward": 2, "backward": 0}]
    sent = batch.ticks[0].bytes_sent(calls, SHAPE)["dispatch"]
    each = [plan_bytes(plan, SHAPE).phases["dispatch"].sum(axis=1) for plan in batch.ticks[0].plans]
    assert sent.tolist() == (each[0] + each[1] + 2 * (each[2] + each[3])).tolist()


def test_ticks_that_run_the_same_share_their_plans() -> None:
    """Without a pipeline: there and back."""
    batch = mixed(1, ExecutionOptions())
    shared: dict[Any, set[int]] = {}
    for tick, plans, _ in batch.ticks:
        shared.setdefault(tick.work, set()).add(id(plans))
    assert len(batch.ticks) == 2 * len(shared) == 8
    assert [len(found) for found in shared.values()] == [1, 1, 1, 1]


@pytest.mark.parametrize("backward", ["resend", "keep"])
def test_bytes_and_memory_are_those_of_the_plans(backward) -> None:
    batch = mixed(1, ExecutionOptions())
    tick = batch.ticks[0]
    each = [plan_bytes(plan, SHAPE, backward).phases for plan in tick.plans]
    calls: dict[Pass, int] = {"forward": 3, "backward": 2}
    sent = tick.bytes_sent([calls], SHAPE, backward)
    assert set(sent) == set(PHASES)
    for phase, of_servers in sent.items():
        factor = 2 if phase.endswith("backward") else 3
        assert (of_servers == factor * sum(p[phase].sum(axis=1) for p in each)).all()
    forward = tick.bytes_sent([{**calls, "backward": 0}], SHAPE)
    assert not any("backward" in name for name in forward)
    largest = batch.largest_memory(SHAPE, backward)
    needed = [plan_memory(plan, SHAPE, backward) for tick in batch.ticks for plan in tick.plans]
    assert all(one.fits(largest) for one in needed)
    assert largest.slot == max(one.slot for one in needed)


def test_micro_batches_hold_each_token_of_the_stream_once() -> None:
    """Shared out and halved, documents still say where in the stream they start."""
    batch = mixed(1, ExecutionOptions())
    pieces = sorted(
        (start, start + length)
        for micro_batch in batch.micro_batches
        for documents in micro_batch.documents
        for start, length in zip(documents.starts.tolist(), documents.lengths.tolist(), strict=True)
    )
    ends = [0, *(end for _, end in pieces)]
    assert [start for start, _ in pieces] == ends[:-1]
    assert ends[-1] == 4 * 4096


def test_windows_of_a_whole_micro_batch_are_each_placed_on_all_ranks() -> None:
    windows = [np.array([700, 324]), np.array([1024])]
    lengths = np.concatenate(windows)
    options = ExecutionOptions("packed", free_placement=False, ping_pong=False)
    planner = GlobalBatchPlanner(servers(1, 2), CONFIG, options)
    batch = planner.plan([Documents(lengths, np.cumsum(lengths) - lengths, (2, 1))])
    at = batch.ticks[0].plans[0].placement
    expected = place_sequentially(windows, 2, 512)
    assert (at.rank == expected.rank).all()
    assert (at.start == expected.start).all()


def test_a_rank_without_tokens_is_refused_where_plans_are_checked() -> None:
    windows, ranks = documents_in_turn([np.array([1024])]), 4
    config = replace(CONFIG, context_parallel_size=1)
    options = ExecutionOptions("wlb-llm", ping_pong=False)
    planner = GlobalBatchPlanner(servers(1, ranks), config, options)
    with pytest.raises(ValueError, match="wlb-llm leaves a rank without tokens"):
        planner.plan(windows)
    (plan,) = replace(planner, checks=False).plan(windows).ticks[0].plans
    assert not plan.placement.tokens_per_rank().all()


def test_a_micro_batch_is_judged_by_the_mean_speed_of_its_ranks() -> None:
    """Its first rank is three times as fast in the second stage, the other one in no stage."""
    config = replace(CONFIG, server_speeds=(1.0, 1.0, 3.0, 1.0))
    options = ExecutionOptions(ping_pong=False, pool_stages=False)
    planner = GlobalBatchPlanner(servers(2, 2), config, options)
    batch = planner.plan(documents_in_turn([np.array([8192])]))
    loads = batch.micro_batches[0].plans[0].plan.loads()
    assert loads[0] / loads[1] == pytest.approx(2.0, rel=0.15)
