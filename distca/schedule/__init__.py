"""Schedulers, which decide who owns which tokens and who computes which task, and programs."""

from distca.schedule.base import (
    BufferBoundError,
    ScheduleConfig,
    Scheduler,
    document_loads,
    even_capacities,
)
from distca.schedule.baselines.context_parallel import PerDocumentContextParallel, RingZigzag
from distca.schedule.baselines.dynamic_cp import DynamicContextParallel
from distca.schedule.baselines.hybrid_cp import HybridContextParallel
from distca.schedule.baselines.packed import PackedScheduler, plain_loads
from distca.schedule.baselines.wlb_llm import WlbLlm
from distca.schedule.greedy import GreedyScheduler
from distca.schedule.program import Pass
from distca.schedule.report import PlanSummary, describe, format_summary, loads_over_mean
from distca.schedule.schedulers import BALANCING, COMPARED, IN_ROUNDS, SCHEDULERS, make_scheduler
from distca.schedule.tiles.scheduler import TilesScheduler, move_tiles
from distca.schedule.training.global_batch import (
    ExecutionOptions,
    GlobalBatchPlanner,
)
from distca.schedule.training.memory_bound import MemoryBound
from distca.schedule.training.micro_batches import share_out
from distca.schedule.training.nano_batches import NanoPlan, SplitDocument, split_in_two
from distca.schedule.training.peak_memory import StepMemory
from distca.schedule.training.planned_batch import (
    CountedGlobalBatch,
    Documents,
    PlannedGlobalBatch,
    PlannedMicroBatch,
    PlannedTick,
    documents_in_turn,
)
from distca.schedule.training.planner_process import PlannerProcess
from distca.schedule.training.planner_with_stats import PlannerWithStats
from distca.schedule.training.shared_ticks import join_nano_batches, join_stages
from distca.schedule.training.tick_schedule import (
    Tick,
    TickSchedule,
    Work,
    chain_sizes,
    most_in_flight_of_1f1b,
    tick_schedule,
)
from distca.schedule.training.tick_speeds import LinearWork
from distca.schedule.training.trees import DocumentTrees

__all__ = [
    "BALANCING",
    "COMPARED",
    "IN_ROUNDS",
    "SCHEDULERS",
    "BufferBoundError",
    "CountedGlobalBatch",
    "DocumentTrees",
    "Documents",
    "DynamicContextParallel",
    "ExecutionOptions",
    "GlobalBatchPlanner",
    "GreedyScheduler",
    "HybridContextParallel",
    "LinearWork",
    "MemoryBound",
    "NanoPlan",
    "PackedScheduler",
    "Pass",
    "PerDocumentContextParallel",
    "PlanSummary",
    "PlannedGlobalBatch",
    "PlannedMicroBatch",
    "PlannedTick",
    "PlannerProcess",
    "PlannerWithStats",
    "RingZigzag",
    "ScheduleConfig",
    "Scheduler",
    "SplitDocument",
    "StepMemory",
    "Tick",
    "TickSchedule",
    "TilesScheduler",
    "WlbLlm",
    "Work",
    "chain_sizes",
    "describe",
    "document_loads",
    "documents_in_turn",
    "even_capacities",
    "format_summary",
    "join_nano_batches",
    "join_stages",
    "loads_over_mean",
    "make_scheduler",
    "most_in_flight_of_1f1b",
    "move_tiles",
    "plain_loads",
    "share_out",
    "split_in_two",
    "tick_schedule",
]
