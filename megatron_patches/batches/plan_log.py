"""What a run logs of its plans: the first one, balance figures, and warnings."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from distca.commands.plan_config import to_json
from distca.cost.volume import BackwardInputs
from distca.plan import Plan, save_plan
from distca.plan.span import Floats, Int64s
from distca.run_figures import AFTER, BEFORE, MOVED
from distca.schedule import (
    CountedGlobalBatch,
    GlobalBatchPlanner,
    MemoryBound,
    PlannedGlobalBatch,
    PlannedMicroBatch,
    ScheduleConfig,
    TickSchedule,
    describe,
    format_summary,
    most_in_flight_of_1f1b,
)
from distca.schedule.base import relative_loads, server_loads
from distca.schedule.baselines.context_parallel import group_size
from distca.wording import counted
from megatron_patches import cpu
from megatron_patches.batches.planned import PlannedReader

logger = logging.getLogger(__name__)

FIRST_PLAN = "first_plan.json"
"""File of the first plan, beside TensorBoard's."""

_WITHOUT_GROUPS = {
    "per-document-cp": "is the same as packed",
    "ring-zigzag": "has the placement of packed",
    "wlb-llm": "packs whole documents and shards none, like packed but in another order",
}
"""How baselines with context-parallel groups behave where groups have one rank, by name."""


def log_first_plan(
    reader: PlannedReader,
    backward: BackwardInputs,
    first_sample: int,
    micro_batches: int,
    folder: Path | None = None,
) -> None:
    """Plans one tick of the first global batch, logs its summary and schedule, and saves it.

    Args:
        reader: reader of the training split's micro-batches.
        backward: how the backward pass gets its inputs.
        first_sample: sample at which the global batch starts.
        micro_batches: number of its micro-batches.
        folder: folder for `FIRST_PLAN`, which `distca report` shows; None: it is not saved.
    """
    planner, documents = reader.planner, reader.documents(first_sample, micro_batches)
    if reader.bound is None:
        shared_out: Sequence[PlannedMicroBatch] = planner.micro_batches(documents)
        schedule = planner.options.tick_schedule(len(shared_out), planner.stages)
    else:
        bounded, _ = reader.bound.plan(planner, documents)
        shared_out, schedule = bounded.micro_batches, bounded.schedule
    # The first tick of those in which most stages work.
    tick = max(schedule.ticks, key=lambda each: sum(work is not None for work in each.work))
    (planned,) = planner.ticks(shared_out, [tick])
    # The first plan is that of the mask that sees most.
    mask = planner.masks.masks[0]
    plain = reader.plain_loads(first_sample, micro_batches, {mask: 1}, planner.config.cost_model)
    before = np.zeros(planner.world_size)
    for servers, work in zip(planner.servers, tick.work, strict=True):
        if work is not None:
            # Of ranks that share heads the busiest.
            number = work.micro_batch * micro_batches // len(shared_out)
            before[servers] = plain[number].reshape(len(servers), -1).max(axis=1)
    summary = describe(planned.plans[0], planner.config, backward, before)
    # Flags give the speeds of GPUs' links alone.
    shown = format_summary(summary, known_links=not cpu.without_cuda())
    size = planner.options.pool_size
    in_pools = "" if size is None else f", in pools of {counted(size, 'server')} a stage"
    logger.info("the first plan of the run%s:\n%s", in_pools, shown)
    if folder is not None:
        command = shlex.join(["python", *sys.argv])
        save_plan(
            planned.plans[0], folder / FIRST_PLAN, {"command": command, **to_json(planner.config)}
        )
    warning = warning_of_groups_of_one(planner, shared_out)
    # Logged once, since warnings of all ranks are shown.
    if warning is not None and dist.get_rank() == 0:
        logger.warning("%s", warning)
    if schedule.stages > 1:
        _log_schedule(schedule)


def _log_schedule(schedule: TickSchedule) -> None:
    """Logs the number of ticks and of micro-batches in flight, beside those of 1F1B."""
    usual = most_in_flight_of_1f1b(schedule.micro_batches, schedule.stages, schedule.chunks)
    logger.info(
        "%d ticks (1F1B: %d), in flight on each stage at most %s (1F1B: %s)%s",
        len(schedule.ticks),
        2 * (schedule.micro_batches * schedule.chunks + schedule.stages - 1),
        ", ".join(map(str, schedule.most_in_flight)),
        ", ".join(map(str, usual)),
        f" chunks, {schedule.chunks} on each stage" if schedule.chunks > 1 else "",
    )


def warning_of_groups_of_one(
    planner: GlobalBatchPlanner, micro_batches: Sequence[PlannedMicroBatch]
) -> str | None:
    """Returns a warning for a baseline whose context-parallel groups have one rank, or for a size
    of groups with a scheduler that has none; None: neither.

    Args:
        planner: planner that made the plans.
        micro_batches: planned micro-batches of the run's first global batch.
    """
    name, ranks = planner.options.scheduler, planner.ranks
    size = planner.config.context_parallel_size
    if size is not None and name not in _WITHOUT_GROUPS:
        return (
            f"--distca-context-parallel-size {size} has no effect with --distca-scheduler {name}, "
            "which has no groups"
        )
    if name not in _WITHOUT_GROUPS or ranks == 1:
        return None
    if not planner.options.free_placement:
        return (
            f"--distca-scheduler {name} shards no document over a group with --distca-placement "
            "sequential, which cuts documents at the ends of ranks only: remove one of the two"
        )
    for micro_batch in micro_batches:
        for documents in micro_batch.documents:
            capacities = np.full(ranks, documents.lengths.sum() // ranks, dtype=np.int64)
            if group_size(planner.config, documents.lengths, capacities) > 1:
                return None
    return (
        f"--distca-scheduler {name} {_WITHOUT_GROUPS[name]}: its context-parallel groups have one "
        f"rank in the first global batch. To share documents among the {ranks} data-parallel ranks "
        "set --distca-context-parallel-size"
    )


def balance_figures(counted: CountedGlobalBatch, packed: Floats) -> dict[str, float]:
    """Returns figures of a global batch, by their names on boards.

    All servers of a pool wait for its busiest in each nano-batch of a tick: the loads of the
    busiest add up over the forward ticks, as do the means. Pools, and the ranks of plain data
    parallelism, wait for each other once, when all micro-batches are done. Loads are divided by the
    servers' speeds.

    Args:
        counted: planned global batch.
        packed: loads of plain data parallelism, `[micro_batches, ranks]`.
    """

    def busiest_over_mean(
        loads: Sequence[Int64s | Floats], speeds: Floats, pools: Int64s | slice = slice(None)
    ) -> float:
        means = sum(float(each.sum()) for each in loads) / float(speeds.sum())
        busiest = [(each / speeds)[pools].max(axis=-1) for each in loads]
        return float(np.max(sum(busiest))) / means if means else 1.0

    batch, of_servers = counted.batch, counted.speeds
    # A rank works on a micro-batch in all stages; ranks that share heads are one server.
    of_ranks = of_servers[batch.servers].mean(axis=0)
    of_ranks = np.repeat(of_ranks, packed.shape[1] // len(of_ranks))
    moved = sum(int(each.sum()) for of_tick in counted.bytes_sent for each in of_tick.values())
    return {
        BEFORE: busiest_over_mean([packed.sum(axis=0)], of_ranks),
        AFTER: busiest_over_mean(counted.forward_loads, of_servers, batch.pools),
        MOVED: moved / batch.schedule.micro_batches / 1e6,
    }


class ToleranceWarning:
    """Warns of the first plan above the tolerance, on the first rank only, since all make the same
    plan.

    Args:
        config: tolerance, cost model and speeds that the plans were made with.
        serves_only: whether this process is a dedicated server, which warns of nothing.
    """

    def __init__(self, config: ScheduleConfig, serves_only: bool = False) -> None:
        # The first dedicated server is the first rank of a process group, too.
        self._config, self._silent = config, serves_only or dist.get_rank() != 0

    def check(self, batch: PlannedGlobalBatch, first_sample: int) -> None:
        """Checks a global batch, which starts at a sample; costs nothing after a warning."""
        for tick in () if self._silent else batch.ticks:
            why = why_above_tolerance(tick.plans, self._config, batch.pools)
            if why is not None:
                logger.warning(
                    "in the global batch from sample %d on, %s. Later ones are not logged: "
                    '"load max/mean" on boards is of all',
                    *(first_sample, why),
                )
                self._silent = True
                return


class MemoryWarning:
    """Warns of the first global batch that needs more memory than may be, on the first rank alone.

    Args:
        bound: bound of a step's memory, or None.
    """

    def __init__(self, bound: MemoryBound | None) -> None:
        self._bound = None if dist.get_rank() else bound

    def check(self, counted: CountedGlobalBatch, first_sample: int) -> None:
        """Checks a planned global batch, which starts at a sample."""
        bound = self._bound
        if bound is None or counted.peak is None or counted.peak <= bound.nbytes:
            return
        logger.warning(
            "the global batch from sample %d on %s. Later ones are not logged",
            *(first_sample, bound.why_above(counted.batch, counted.peak)),
        )
        self._bound = None


def why_above_tolerance(
    plans: Iterable[Plan], config: ScheduleConfig, pools: Int64s | slice = slice(None)
) -> str | None:
    """Returns how far the first plan above the tolerance is above it, and why; or None.

    Baselines balance nothing, and note nothing. A tick's plan may have notes of its stages' plans
    although it is balanced itself, over the servers of all stages; notes of plans by time count
    linear layers as well. So the loads are measured here.

    Args:
        plans: final plans, over all servers.
        config: tolerance, cost model and speeds that the plans were made with.
        pools: servers of each pool, `[pools, servers of a pool]`, inside which loads are compared;
            a slice of all where they are one.
    """
    for plan in plans:
        if plan.notes:
            servers = plan.world_size
            loads = server_loads(plan.tasks, plan.mask, servers, config.cost_model)
            speeds = config.speeds_of(servers)
            compared = zip(np.atleast_2d(loads[pools]), np.atleast_2d(speeds[pools]), strict=True)
            busiest = max(float(relative_loads(*of_pool).max()) for of_pool in compared)
            if busiest > 1 + config.tolerance:
                return (
                    f"the busiest server has {busiest:.3f} times the mean load, above the "
                    f"tolerance of {config.tolerance}: {plan.notes[0].partition(': ')[2]}"
                )
    return None
