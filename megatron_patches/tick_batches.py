"""What a rank needs for each tick of a global batch: its micro-batch, and its part of the plan.

Every rank works out every tick for itself, the same as all others, on a thread that is one tick
ahead of the model.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from distca.cost.memory import CoreAttentionMemory, plan_memory
from distca.cost.volume import BACKWARD_PHASES, FORWARD_PHASES, plan_bytes
from distca.plan import Plan
from distca.plan.span import Int64s
from distca.runtime import CoreAttention, Exchange, ExchangeSlot, Prefetcher, build_exchange
from distca.schedule import Phase, Scheduler, Tick, TickSchedule, Work, pool_nano_batches
from megatron_patches.attention import DocumentParams
from megatron_patches.batch import MicroBatch
from megatron_patches.planned_batches import NanoBatches, PlannedBatches
from megatron_patches.rounds import Round


@dataclass(frozen=True)
class PipelineLayout:
    """A pipeline's stages and its servers.

    Attributes:
        stage: of this rank; None: it is a dedicated server.
        chunks: model chunks (virtual stages) of each stage.
        servers: the number of each data-parallel rank of each stage among the ranks that exchange,
            int64 `[stages, data-parallel ranks]`.
        server: this rank's number.
        dedicated: servers that hold no model, whose numbers come after all others.
    """

    stage: int | None
    chunks: int
    servers: Int64s
    server: int
    dedicated: int = 0

    @property
    def stages(self) -> int:
        return len(self.servers)

    @property
    def world_size(self) -> int:
        """All servers."""
        return int(self.servers.size) + self.dedicated


@dataclass(frozen=True)
class TickInput:
    """What a rank needs for a tick.

    Attributes:
        schedule: of the global batch that the tick is of.
        tick: what all stages do.
        plans: who computes what, of each nano-batch.
        exchanges: this rank's part of each, to be placed in the buffers of core attention.
        micro_batch: in a forward tick what this rank runs, if it runs anything.
        bytes_sent: what the plans say that this rank sends for the tick, by phase; keys that are
            sent ahead leave before it begins.
        memory: what the largest plan of the global batch needs.
    """

    schedule: TickSchedule
    tick: Tick
    plans: tuple[Plan, ...]
    exchanges: tuple[Exchange, ...]
    micro_batch: MicroBatch | None
    bytes_sent: dict[str, int]
    memory: CoreAttentionMemory


@dataclass(frozen=True)
class PlannedTick:
    """A tick, its plans and the bytes that each server sends in it by phase, `[servers]`."""

    tick: Tick
    plans: tuple[Plan, ...]
    sent: dict[str, Int64s]


@dataclass(frozen=True)
class TickBatches:
    """Makes the ticks of a split's global batches.

    Attributes:
        batches: makes the micro-batches.
        layout: stages and servers.
        schedule: the tick schedule for a number of micro-batches.
        scheduler: shares a tick's tasks out over the servers of all stages; None: each stage's
            servers keep theirs.
        move: balances what schedulers don't know of; see `distca.schedule.pool`.
        rounds: the core-attention calls of a tick of each phase.
        core_attention: runs the plans.
        announce: tells dedicated servers that a global batch of this split comes next; None: there
            are no such servers.
    """

    batches: PlannedBatches
    layout: PipelineLayout
    schedule: Callable[[int], TickSchedule]
    scheduler: Scheduler | None
    move: Callable[[Plan], Plan] | None
    rounds: dict[Phase, tuple[Round, ...]]
    core_attention: CoreAttention
    announce: Callable[[], None] | None = None

    def micro_batches(self, first_sample: int, count: int) -> list[NanoBatches]:
        """The documents of a global batch's micro-batches, and their plans on their own."""
        return [
            self.batches.plan(documents)
            for documents in self.batches.global_batch(first_sample, count)
        ]

    def planned_ticks(
        self, micro_batches: list[NanoBatches], schedule: TickSchedule
    ) -> list[PlannedTick]:
        """All ticks of a global batch."""
        together: dict[tuple[int | None, ...], tuple[Plan, ...]] = {}
        ticks = []
        for tick in schedule.ticks:
            running = tuple(None if work is None else work.micro_batch for work in tick.work)
            if running not in together:
                together[running] = self._plans(
                    [None if number is None else micro_batches[number] for number in running]
                )
            plans = together[running]
            ticks.append(PlannedTick(tick, plans, self._sent(tick.phase, plans)))
        return ticks

    def _plans(self, stages: list[NanoBatches | None]) -> tuple[Plan, ...]:
        """A tick's plans, of stages that run micro-batches or none."""
        layout = self.layout
        plans = pool_nano_batches(
            [None if stage is None else stage.plans for stage in stages],
            layout.servers,
            self.scheduler,
            self.move,
            layout.world_size,
        )
        for plan in plans:
            if len(stages) > 1 or self.scheduler is not None or plan.first_query is not None:
                plan.validate()
        return plans

    def _sent(self, phase: Phase, plans: tuple[Plan, ...]) -> dict[str, Int64s]:
        """The bytes that each server sends in a tick by phase of the exchange, in all calls."""
        shape = self.batches.schedule_config.shape
        passes: tuple[tuple[Phase, tuple[str, ...]], ...]
        passes = (("forward", FORWARD_PHASES), ("backward", BACKWARD_PHASES))
        calls = Counter(call.what for call in self.rounds[phase])
        nothing = np.zeros(self.layout.world_size, dtype=np.int64)
        sent: dict[str, Int64s] = {}
        for plan in plans:
            each = plan_bytes(plan, shape, self.core_attention.backward).phases
            for what, names in passes:
                for name in names if calls[what] else ():
                    sent[name] = sent.get(name, nothing) + calls[what] * each[name].sum(axis=1)
        return sent

    def global_batch(self, first_sample: int, count: int) -> Iterator[TickInput]:
        """The ticks of the global batch that starts at a sample, as this rank sees them."""
        schedule = self.schedule(count)
        micro_batches = self.micro_batches(first_sample, count)
        ticks = self.planned_ticks(micro_batches, schedule)
        report = _report(ticks, count)
        memory = self._memory(ticks)
        uses = Counter(id(planned.plans) for planned in ticks)
        exchanges: dict[int, tuple[Exchange, ...]] = {}
        made: dict[int, MicroBatch] = {}
        server = self.layout.server
        for planned in ticks:
            # Plans that serve twice are worked out once: kept inputs are of the same exchange.
            key = id(planned.plans)
            mine = exchanges.pop(key, None) or tuple(
                build_exchange(plan, server) for plan in planned.plans
            )
            uses[key] -= 1
            if uses[key]:
                exchanges[key] = mine
            stage = self.layout.stage
            work = None if stage is None else planned.tick.work[stage]
            micro_batch = None
            if work is not None and planned.tick.phase == "forward":
                micro_batch = self._micro_batch(work, micro_batches, report, made)
            yield TickInput(
                schedule,
                planned.tick,
                planned.plans,
                mine,
                micro_batch,
                {phase: int(sent[server]) for phase, sent in planned.sent.items()},
                memory,
            )

    def placed(self, tick: TickInput) -> TickInput:
        """A tick with its exchanges in the buffers, where they take the place of the last one's.

        Only for when it is run: a loop may have asked for it before, and run it again.
        """
        return replace(tick, exchanges=self.core_attention.buffers.place(tick.exchanges))

    def _memory(self, ticks: list[PlannedTick]) -> CoreAttentionMemory:
        """What the largest plan of some ticks needs."""
        largest = CoreAttentionMemory()
        different = {id(planned.plans): planned.plans for planned in ticks}
        core_attention = self.core_attention
        shape = self.batches.schedule_config.shape.head_group(core_attention.buffers.head_groups)
        for plan in itertools.chain.from_iterable(different.values()):
            needed = plan_memory(plan, shape, core_attention.backward)
            largest = largest.union(needed)
        return largest

    def _micro_batch(
        self,
        work: Work,
        micro_batches: list[NanoBatches],
        report: dict[str, float],
        made: dict[int, MicroBatch],
    ) -> MicroBatch:
        """A micro-batch's tokens, which all chunks share; forgotten after the last chunk's."""
        number, chunk = work
        if number not in made:
            made[number] = self.batches.micro_batch(micro_batches[number], report)
        return made.pop(number) if chunk == self.layout.chunks - 1 else made[number]


def _report(ticks: list[PlannedTick], micro_batches: int) -> dict[str, float]:
    """Figures for the log line, alike for all micro-batches of a global batch.

    A server waits in each nano-batch of a tick for the busiest: the loads of the busiest add up
    over the forward ticks, and so do the means.
    """
    forward = [
        plan for planned in ticks if planned.tick.phase == "forward" for plan in planned.plans
    ]

    def busiest_over_mean(loads: list[Int64s]) -> float:
        means = sum(float(each.mean()) for each in loads)
        return sum(int(each.max()) for each in loads) / means if means else 1.0

    moved = sum(int(sent.sum()) for planned in ticks for sent in planned.sent.values())
    return {
        "load max/mean before": busiest_over_mean([plan.loads_at_home() for plan in forward]),
        "load max/mean": busiest_over_mean([plan.loads() for plan in forward]),
        "MB moved": moved / micro_batches / 1e6,
    }


class TickStream:
    """An endless iterator over the ticks of a split's global batches, made ahead on a thread.

    Args:
        batches: makes the ticks.
        first_sample: samples consumed so far.
        micro_batches: how many the global batch has that starts at a sample.
        device: where the model is.

    Attributes:
        batches: as given.
        device: as given.
    """

    def __init__(
        self,
        batches: TickBatches,
        first_sample: int,
        micro_batches: Callable[[int], int],
        device: torch.device,
    ) -> None:
        self.batches = batches
        self.device = device
        self._ticks = Prefetcher(_all_ticks(batches, first_sample, micro_batches))

    def __iter__(self) -> TickStream:
        return self

    def __next__(self) -> TickInput:
        made = next(self._ticks)
        core_attention = self.batches.core_attention
        # It is the same in all ticks of a global batch, so buffers grow before the first alone.
        core_attention.reserve(made.memory)
        micro_batch = made.micro_batch
        if micro_batch is not None:
            micro_batch = micro_batch.to(self.device)
            assert micro_batch.packed_seq_params is not None
            micro_batch = replace(
                micro_batch,
                packed_seq_params=self._with_slots(micro_batch.packed_seq_params, made.exchanges),
                report=micro_batch.report | {"plan wait ms": 1e3 * self._ticks.seconds_waited},
            )
        return replace(made, micro_batch=micro_batch)

    def _with_slots(
        self, params: DocumentParams, exchanges: tuple[Exchange, ...]
    ) -> DocumentParams:
        """What one pass needs of its own: slots for its exchanges."""

        def own(params: DocumentParams, number: int) -> DocumentParams:
            return replace(
                params,
                slot=ExchangeSlot(exchanges[number], number),
                core_attention=self.batches.core_attention,
            )

        if params.halves is None:
            return own(params, 0)
        ping, pong = (own(half, number) for number, half in enumerate(params.halves))
        pong = replace(pong, before=None if pong.before is None else ping)
        return replace(params, halves=(ping, pong))

    def close(self) -> None:
        """Ends the thread."""
        self._ticks.close()


def _all_ticks(
    batches: TickBatches, sample: int, micro_batches: Callable[[int], int]
) -> Iterator[TickInput]:
    while True:
        number = micro_batches(sample)
        yield from batches.global_batch(sample, number)
        sample += number * batches.batches.layout.samples_per_micro_batch
