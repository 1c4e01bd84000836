"""The plans of a global batch, as the runtime makes them: micro-batches, nano-batches, ticks.

The same functions of `distca.schedule` in the same order: documents are shared out over the
micro-batches, each micro-batch is planned as two halves over the data-parallel ranks of a stage,
and the plans of all stages that work in a tick are pooled over the servers of all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from distca.plan import Mask, Plan, place_in_turn
from distca.plan.span import Int64s
from distca.schedule import (
    BALANCING,
    NanoPlan,
    ScheduleConfig,
    Scheduler,
    Tick,
    TickSchedule,
    document_loads,
    make_scheduler,
    move_tiles,
    plan_halves,
    pool_nano_batches,
    share_out,
    tick_schedule,
)

_tick_schedule = lru_cache(maxsize=256)(tick_schedule)


@dataclass(frozen=True)
class Way:
    """How a job runs with `--distca`: what its flags of the same names say.

    Attributes:
        scheduler: a name of `distca.schedule.SCHEDULERS`.
        free_placement: `--distca-placement free`.
        ping_pong: micro-batches are run as two nano-batches.
        pool_stages: stages share their attention servers.
        chunks: model chunks (virtual stages) of each stage.
        max_in_flight: micro-batches that a stage keeps for their backward pass at most.
    """

    scheduler: str = "tiles"
    free_placement: bool = True
    ping_pong: bool = True
    pool_stages: bool = True
    chunks: int = 1
    max_in_flight: int | None = None

    def ticks(self, micro_batches: int, stages: int) -> TickSchedule:
        """The ticks of a global batch."""
        return _tick_schedule(micro_batches, stages, self.chunks, self.max_in_flight)


@dataclass(frozen=True)
class PlannedBatch:
    """A global batch's ticks and their plans.

    Attributes:
        schedule: the ticks.
        servers: of each stage's data-parallel ranks, int64 `[stages, data-parallel ranks]`.
        plans: of each tick, one for each nano-batch. Ticks that run the same share one object.
    """

    schedule: TickSchedule
    servers: Int64s
    plans: tuple[tuple[Plan, ...], ...]

    @property
    def ticks(self) -> list[tuple[Tick, tuple[Plan, ...]]]:
        """Each tick with its plans."""
        return list(zip(self.schedule.ticks, self.plans, strict=True))


def server_table(stages: int, data_parallel: int) -> Int64s:
    """Servers numbered as Megatron numbers ranks: those of the first stage, of the second, ..."""
    return np.arange(stages * data_parallel, dtype=np.int64).reshape(stages, data_parallel)


def plan_batch(
    windows: Sequence[Int64s],
    stages: int,
    data_parallel: int,
    config: ScheduleConfig,
    way: Way,
    mask: Mask | None = None,
) -> PlannedBatch:
    """All plans of a global batch.

    Args:
        windows: of each micro-batch the lengths of its documents, int64; all hold the same number
            of tokens, which the data-parallel ranks (and two nano-batches) divide.
        stages: of the pipeline.
        data_parallel: ranks of a stage.
        config: what plans are judged by; it has no server speeds.
        way: how the job runs.
        mask: what a query sees; None: all earlier tokens of its document.

    Raises:
        ValueError: micro-batches differ in size or don't divide, or a scheduler refuses.
    """
    mask = mask or Mask()
    tokens = {int(window.sum()) for window in windows}
    parts = data_parallel * (2 if way.ping_pong else 1)
    if len(tokens) != 1 or next(iter(tokens)) % parts:
        raise ValueError(
            f"micro-batches of {sorted(tokens)} tokens: they must all hold the same number, a "
            f"multiple of {parts}"
        )
    scheduler = make_scheduler(way.scheduler, config)
    make = partial(_plan, scheduler, next(iter(tokens)) // parts, data_parallel, mask, way)
    micro_batches = [
        _nano_plans(lengths, config, mask, way, make)
        for lengths in (_shared_out(windows, config, mask) if way.free_placement else windows)
    ]
    schedule = way.ticks(len(windows), stages)
    servers = server_table(stages, data_parallel)
    pooled = scheduler if stages > 1 and way.pool_stages else None
    move = partial(move_tiles, config=config) if way.scheduler in BALANCING else None
    found: dict[tuple[int | None, ...], tuple[Plan, ...]] = {}
    plans = []
    for tick in schedule.ticks:
        running = tuple(None if work is None else work.micro_batch for work in tick.work)
        if running not in found:
            found[running] = pool_nano_batches(
                [None if number is None else micro_batches[number] for number in running],
                servers,
                pooled,
                move,
            )
        plans.append(found[running])
    return PlannedBatch(schedule, servers, tuple(plans))


def _shared_out(windows: Sequence[Int64s], config: ScheduleConfig, mask: Mask) -> list[Int64s]:
    """The documents of each micro-batch, so that these have equal loads."""
    lengths = np.concatenate(windows)
    came = np.repeat(np.arange(len(windows)), [len(window) for window in windows])
    shared = share_out(lengths, document_loads(lengths, mask, config.cost_model), came)
    return [lengths[shared == number] for number in range(len(windows))]


def _nano_plans(
    lengths: Int64s,
    config: ScheduleConfig,
    mask: Mask,
    way: Way,
    make: Callable[[Int64s], Plan],
) -> tuple[NanoPlan, ...]:
    if not way.ping_pong:
        return (NanoPlan(make(lengths)),)
    return plan_halves(lengths, document_loads(lengths, mask, config.cost_model), make)[1]


def _plan(
    scheduler: Scheduler, tokens: int, ranks: int, mask: Mask, way: Way, lengths: Int64s
) -> Plan:
    rooms = np.full(ranks, tokens, dtype=np.int64)
    if way.free_placement:
        return scheduler.plan(lengths, rooms, mask)
    return scheduler.schedule(lengths, place_in_turn(lengths, rooms), mask)
