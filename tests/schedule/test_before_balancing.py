"""What logs and `distca plan` call "before": the loads of plain data parallelism."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from distca.cost.kernel_time import AnalyticCost
from distca.cost.memory import CoreAttentionMemory
from distca.plan import Mask, Placement
from distca.schedule import (
    CountedGlobalBatch,
    ExecutionOptions,
    GlobalBatchPlanner,
    PlannedGlobalBatch,
    ScheduleConfig,
    describe,
    make_scheduler,
    plain_loads,
    tick_schedule,
)
from megatron_patches.batches.layouts import WindowLayout
from megatron_patches.batches.plan_log import balance_figures
from megatron_patches.batches.planned import PlannedReader
from megatron_patches.flags.config import DistcaConfig
from support.models import memory_stream, parse
from support.ranks import forget_megatron

CONFIG = ScheduleConfig()
LENGTHS = np.array([3, 5, 4, 4, 4, 2, 2])


def test_documents_lie_one_after_the_other_and_are_cut_where_a_rank_ends() -> None:
    capacities = np.array([4, 4, 0, 4])
    # 3 + 1 of 5, the other 4, nothing, 4.
    assert plain_loads(LENGTHS[:3], capacities, Mask()).tolist() == [6 + 1, 10, 0, 10]
    assert plain_loads(LENGTHS[:3], capacities, Mask(1)).tolist() == [5 + 1, 7, 0, 7]
    model = AnalyticCost(flops_per_pair=1.0, flops_per_second=2.0)
    assert plain_loads(LENGTHS[:3], capacities, Mask(), model).tolist() == [3.5, 5, 0, 5]


@pytest.mark.parametrize("scheduler", ["tiles", "greedy", "wlb-llm", "ring-zigzag"])
def test_before_is_the_same_whatever_the_scheduler(scheduler: str) -> None:
    lengths = np.array([1000, 24, 700, 300, 24])
    plan = make_scheduler(scheduler, CONFIG).plan(lengths, np.full(2, 1024), Mask())
    # 1,000 and 24 on the one, 700, 300 and 24 on the other.
    loads = [sum(n * (n + 1) // 2 for n in of_rank) for of_rank in ([1000, 24], [700, 300, 24])]
    before = describe(plan, CONFIG).load_max_over_mean_before
    assert before == pytest.approx(loads[0] / (sum(loads) / 2))


def test_servers_without_tokens_have_no_load_before() -> None:
    lengths = np.array([4, 4])
    at = Placement(np.arange(2), np.zeros(2, dtype=np.int64), lengths, np.array([0, 2]), 3)
    plan = make_scheduler("packed", CONFIG).schedule(lengths, at, Mask())
    assert describe(plan, CONFIG).load_max_over_mean_before == 1.5


def test_the_log_adds_up_what_a_rank_computes_of_all_micro_batches() -> None:
    """Plain data-parallel ranks wait for each other at the end of a step alone."""
    layout = WindowLayout(0, 2, 4, 1)
    planner = GlobalBatchPlanner(np.array([[0, 1]]), CONFIG, ExecutionOptions())
    stream = memory_stream([8, *LENGTHS.tolist()])
    batches = PlannedReader(stream, layout, planner, 1)
    # The first window is of another global batch; then 3 + 1 | 4, 4 | 4 and 4 | 2 + 2.
    plain = batches.plain_loads(2, 3)
    assert plain.tolist() == [[6 + 1, 10], [10, 10], [10, 3 + 3]]
    nothing = PlannedGlobalBatch(tick_schedule(3, 1), planner.servers, (), ())
    counted = CountedGlobalBatch(nothing, (), CoreAttentionMemory(), (), np.ones(2), 3)
    assert balance_figures(counted, plain)["load max/mean before"] == 27 / 26.5
    # The second rank is twice as fast: 27 and 26 of 53 take 27 and 13, of 53/3 at least.
    faster = replace(counted, speeds=np.array([1.0, 2.0]), forward_loads=(np.array([20, 33]),))
    assert balance_figures(faster, plain)["load max/mean before"] == pytest.approx(27 / (53 / 3))
    assert balance_figures(faster, plain)["load max/mean"] == pytest.approx(20 / (53 / 3))
    two_windows = PlannedReader(stream, WindowLayout(0, 2, 4, 2), planner, 1)
    assert two_windows.plain_loads(2, 1).tolist() == [[17, 20]]


def first_plan_of(flags: Sequence[str], lengths: Sequence[int]) -> list[str]:
    """What is logged of a run's first plan on this rank; collective."""

    from megatron_patches.batches import plan_log
    from megatron_patches.loop.data import window_layout
    from megatron_patches.pipeline.planned_data import PlannedData
    from support import training

    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    args = parse(flags)
    training.initialize(args)
    planned = PlannedData.start(
        DistcaConfig.from_args(args), args, window_layout(args), torch.device("cpu")
    )
    reader, first = planned.reader(memory_stream(lengths), False), args.global_batch_size
    plan_log.logger.addHandler(handler)
    plan_log.logger.setLevel(logging.INFO)
    try:
        plan_log.log_first_plan(reader, "resend", first, planned.micro_batches_at(first))
    finally:
        plan_log.logger.removeHandler(handler)
    planned.close()
    forget_megatron()
    return said


def test_the_first_plan_of_a_run_is_beside_its_micro_batches_as_they_came(ranks) -> None:
    """Two stages of two ranks; in the tick that is shown both stages work."""
    flags = """--seq-length 256 --global-batch-size 4 --pipeline-model-parallel-size 2
        --distca --num-layers 2""".split()
    # The first global batch is another one's; then 256 | 2 x 128, and 4 x 64 | 4 x 64.
    lengths = [512, 512, 256, *[128] * 2, *[64] * 8]
    said = ranks.run(first_plan_of, flags, lengths, world_size=4)[0]
    (ticks,) = (line for line in said if "ticks (1F1B" in line)
    assert ticks.endswith(")"), "without virtual stages there is nothing to say of chunks"
    (before,) = re.findall(r"load max/mean +([\d.]+) ->", "\n".join(said))
    loads = [sum(n * (n + 1) / 2 for n in of_rank) for of_rank in ([256], [128] * 2, [64] * 4)]
    assert float(before) == pytest.approx(
        loads[0] / ((loads[0] + loads[1] + 2 * loads[2]) / 4), 1e-3
    )
