"""What a rank needs for each tick of a global batch: its micro-batch, and its part of the plan.

Every rank works out every tick for itself, the same as all others, on a thread that is one tick
ahead of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from distca.cost.volume import PHASES, plan_bytes
from distca.plan import Plan
from distca.plan.span import Int64s
from distca.runtime import CoreAttention, Exchange, ExchangeSlot, Prefetcher, build_exchange
from distca.schedule import Phase, Scheduler, Tick, TickSchedule, Work, pool
from megatron_patches.batch import Documents, MicroBatch, PlannedBatches
from megatron_patches.rounds import Round


@dataclass(frozen=True)
class PipelineLayout:
    """A pipeline's stages and its servers.

    Attributes:
        stage: of this rank.
        chunks: model chunks (virtual stages) of each stage.
        servers: the number of each data-parallel rank of each stage among the ranks that exchange,
            int64 `[stages, data-parallel ranks]`.
        data_parallel_rank: this rank's column of `servers`.
    """

    stage: int
    chunks: int
    servers: Int64s
    data_parallel_rank: int

    @property
    def stages(self) -> int:
        return len(self.servers)

    @property
    def server(self) -> int:
        """This rank's number."""
        return int(self.servers[self.stage, self.data_parallel_rank])


@dataclass(frozen=True)
class TickInput:
    """What a rank needs for a tick.

    Attributes:
        schedule: of the global batch that the tick is of.
        tick: what all stages do.
        plan: who computes what.
        exchange: this rank's part of it.
        micro_batch: in a forward tick what this rank runs, if it runs anything.
        bytes_sent: what the plan says that this rank sends in the tick, by phase.
    """

    schedule: TickSchedule
    tick: Tick
    plan: Plan
    exchange: Exchange
    micro_batch: MicroBatch | None
    bytes_sent: dict[str, int]


@dataclass(frozen=True)
class PlannedTick:
    """A tick, its plan and the bytes of all its rounds by phase, `[source, destination]`."""

    tick: Tick
    plan: Plan
    moved: dict[str, Int64s]


@dataclass(frozen=True)
class TickBatches:
    """Makes the ticks of a split's global batches.

    Attributes:
        batches: makes the micro-batches.
        layout: stages and servers.
        schedule: the tick schedule for a number of micro-batches.
        scheduler: shares a tick's tasks out over the servers of all stages; None: each stage's
            servers keep theirs.
        rounds: the core-attention calls of a tick of each phase.
        core_attention: runs the plans.
    """

    batches: PlannedBatches
    layout: PipelineLayout
    schedule: Callable[[int], TickSchedule]
    scheduler: Scheduler | None
    rounds: dict[Phase, tuple[Round, ...]]
    core_attention: CoreAttention

    def micro_batch_plans(
        self, first_sample: int, micro_batches: int
    ) -> tuple[list[Documents], list[Plan]]:
        """The documents of a global batch's micro-batches, and their plans on their own."""
        documents = self.batches.global_batch(first_sample, micro_batches)
        return documents, [self.batches.plan(each) for each in documents]

    def planned_ticks(self, plans: list[Plan], schedule: TickSchedule) -> list[PlannedTick]:
        """All ticks of a global batch."""
        shape = self.batches.schedule_config.shape
        together: dict[tuple[int | None, ...], Plan] = {}
        ticks = []
        for tick in schedule.ticks:
            running = tuple(None if work is None else work.micro_batch for work in tick.work)
            if running not in together:
                together[running] = pool(
                    [None if number is None else plans[number] for number in running],
                    self.layout.servers,
                    self.scheduler,
                )
                if len(running) > 1:
                    together[running].validate()
            plan = together[running]
            each = plan_bytes(plan, shape, self.core_attention.backward).phases
            times = {
                phase: sum(
                    call.what == ("backward" if phase.endswith("backward") else "forward")
                    for call in self.rounds[tick.phase]
                )
                for phase in PHASES
            }
            moved = {phase: times[phase] * each[phase] for phase in PHASES if times[phase]}
            ticks.append(PlannedTick(tick, plan, moved))
        return ticks

    def global_batch(self, first_sample: int, micro_batches: int) -> Iterator[TickInput]:
        """The ticks of the global batch that starts at a sample, as this rank sees them."""
        schedule = self.schedule(micro_batches)
        documents, plans = self.micro_batch_plans(first_sample, micro_batches)
        ticks = self.planned_ticks(plans, schedule)
        report = _report(ticks, micro_batches)
        uses = Counter(id(planned.plan) for planned in ticks)
        exchanges: dict[int, Exchange] = {}
        made: dict[int, MicroBatch] = {}
        server = self.layout.server
        for planned in ticks:
            # A plan that serves twice is worked out once: kept inputs are of the same exchange.
            key = id(planned.plan)
            exchange = exchanges.pop(key, None) or build_exchange(planned.plan, server)
            uses[key] -= 1
            if uses[key]:
                exchanges[key] = exchange
            work = planned.tick.work[self.layout.stage]
            micro_batch = None
            if work is not None and planned.tick.phase == "forward":
                micro_batch = self._micro_batch(work, documents, plans, report, made)
            yield TickInput(
                schedule,
                planned.tick,
                planned.plan,
                exchange,
                micro_batch,
                {phase: int(moved[server].sum()) for phase, moved in planned.moved.items()},
            )

    def _micro_batch(
        self,
        work: Work,
        documents: list[Documents],
        plans: list[Plan],
        report: dict[str, float],
        made: dict[int, MicroBatch],
    ) -> MicroBatch:
        """A micro-batch's tokens, which all chunks share; forgotten after the last chunk's."""
        number, chunk = work
        if number not in made:
            made[number] = self.batches.micro_batch(documents[number], plans[number], report)
        return made.pop(number) if chunk == self.layout.chunks - 1 else made[number]


def _report(ticks: list[PlannedTick], micro_batches: int) -> dict[str, float]:
    """Figures for the log line, alike for all micro-batches of a global batch.

    A server waits in each tick for the busiest: the loads of the busiest add up over the forward
    ticks, and so do the means.
    """
    forward = [planned.plan for planned in ticks if planned.tick.phase == "forward"]

    def busiest_over_mean(loads: list[Int64s]) -> float:
        means = sum(float(each.mean()) for each in loads)
        return sum(int(each.max()) for each in loads) / means if means else 1.0

    moved = sum(int(matrix.sum()) for planned in ticks for matrix in planned.moved.values())
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
    """

    def __init__(
        self,
        batches: TickBatches,
        first_sample: int,
        micro_batches: Callable[[int], int],
        device: torch.device,
    ) -> None:
        self.batches = batches
        self._device = device
        self._ticks = Prefetcher(_all_ticks(batches, first_sample, micro_batches))
        # Without a pipeline a micro-batch's way back has the exchange of its way out.
        self._exchange: tuple[Exchange, Exchange] | None = None

    def __iter__(self) -> TickStream:
        return self

    def __next__(self) -> TickInput:
        made = next(self._ticks)
        if self._exchange is None or self._exchange[0] is not made.exchange:
            self._exchange = made.exchange, made.exchange.to(self._device)
        exchange = self._exchange[1]
        micro_batch = made.micro_batch
        if micro_batch is not None:
            micro_batch = micro_batch.to(self._device)
            assert micro_batch.packed_seq_params is not None
            micro_batch = replace(
                micro_batch,
                packed_seq_params=replace(
                    micro_batch.packed_seq_params,
                    slot=ExchangeSlot(exchange),
                    core_attention=self.batches.core_attention,
                ),
                report=micro_batch.report | {"plan wait ms": 1e3 * self._ticks.seconds_waited},
            )
        return replace(made, exchange=exchange, micro_batch=micro_batch)

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


def server_table(places: list[tuple[int, int, int]], tensor_parallel_rank: int) -> Int64s:
    """The servers of a tensor-parallel index: see `PipelineLayout.servers`.

    Args:
        places: of each process its tensor-parallel rank, stage and data-parallel rank.
        tensor_parallel_rank: whose servers are wanted.

    Returns:
        int64 `[stages, data-parallel ranks]`, numbered in the order of the processes.
    """
    mine = [place[1:] for place in places if place[0] == tensor_parallel_rank]
    stages, ranks = (1 + max(column) for column in zip(*mine, strict=True))
    table = np.empty((stages, ranks), dtype=np.int64)
    for server, (stage, rank) in enumerate(mine):
        table[stage, rank] = server
    return table
