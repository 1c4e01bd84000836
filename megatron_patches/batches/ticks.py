"""A rank's input of each tick of a global batch: its micro-batch, and its part of the plans.

All ranks plan the same global batches, each in a process of its own that is at least one global
batch ahead of the model. A thread makes a rank's part of the plans, a few ticks ahead.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist

from distca.cost.memory import CoreAttentionMemory
from distca.plan import LayerMasks, Plan
from distca.plan.span import Floats, Int64s
from distca.runtime import CoreAttention, Exchange, Prefetcher, ProgramRun, build_exchange
from distca.schedule import (
    CountedGlobalBatch,
    CountingPlanner,
    Documents,
    Pass,
    PlannedGlobalBatch,
    PlannerProcess,
    Tick,
    TickSchedule,
    Work,
)
from distca.schedule.program import LayerGroup, Program, calls_of, tick_program
from megatron_patches.batches.above_tolerance import why_above_tolerance
from megatron_patches.batches.micro_batch import MicroBatch
from megatron_patches.batches.planned import PlannedBatches
from megatron_patches.model.chained_keys import ChainedKeys
from megatron_patches.model.core_attention import CoreAttentionRun, DocumentParams

logger = logging.getLogger(__name__)

_tick_program = lru_cache(maxsize=64)(tick_program)


@dataclass(frozen=True)
class PipelineLayout:
    """A pipeline's stages and its servers.

    Attributes:
        stage: stage of this rank; None: this rank is a dedicated server.
        chunks: number of model chunks (virtual stages) of each stage.
        servers: server number of each data-parallel rank of each stage, int64
            `[stages, data-parallel ranks]`.
        server: server number of this rank.
        dedicated: number of servers that hold no model, which are numbered after all others.
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
        """Number of all servers."""
        return int(self.servers.size) + self.dedicated


@dataclass(frozen=True)
class TickInput:
    """A rank's input of a tick.

    Attributes:
        schedule: ticks of the whole global batch.
        tick: work of all stages in this tick.
        plans: plan of each nano-batch with each mask in turn, for the tokens of all stages.
        exchanges: this rank's part of each plan, to be placed in the buffers of core attention.
        program: order of events of every rank's core attention.
        micro_batch: micro-batch that this rank runs, if the tick is a forward one in which it runs
            any.
        bytes_sent: bytes that this rank sends for the tick by the plans, by phase; keys that are
            sent ahead leave before the tick begins.
        memory: memory that the largest plan of the global batch needs.
    """

    schedule: TickSchedule
    tick: Tick
    plans: tuple[Plan, ...]
    exchanges: tuple[Exchange, ...]
    program: Program
    micro_batch: MicroBatch | None
    bytes_sent: dict[str, int]
    memory: CoreAttentionMemory


@dataclass(frozen=True)
class TickBatches:
    """A maker of the ticks of a split's global batches.

    Attributes:
        planned: micro-batches of the split, and their planner.
        layout: stages and servers.
        layer_groups: groups of a model chunk's layers whose backward passes run together.
        core_attention: runtime of the plans.
        announce: function that tells dedicated servers that a global batch of this split comes
            next; None: there are no such servers.
    """

    planned: PlannedBatches
    layout: PipelineLayout
    layer_groups: tuple[LayerGroup, ...]
    core_attention: CoreAttention
    announce: Callable[[], None] | None = None

    @property
    def masks(self) -> LayerMasks:
        """Masks of a model chunk's layers."""
        return self.planned.planner.masks

    def planner(self) -> CountingPlanner:
        """Makes the planner of global batches, which also counts what their plans need."""
        directions: tuple[Pass, ...] = ("forward", "backward")
        return CountingPlanner(
            self.planned.planner,
            {
                each: calls_of(self.program(each, 1, at_home=False), self.masks)
                for each in directions
            },
            self.core_attention.backward,
        )

    def global_batch(self, first_sample: int, count: int) -> Iterator[TickInput]:
        """Makes this rank's inputs of the ticks of the global batch that starts at a sample."""
        documents = self.planned.documents(first_sample, count)
        return self.ticks(self.planner()(documents), self.planned.packed_loads(first_sample, count))

    def ticks(self, counted: CountedGlobalBatch, packed: Floats) -> Iterator[TickInput]:
        """Makes this rank's inputs of the ticks of a planned global batch.

        Args:
            counted: planned global batch.
            packed: loads of plain data parallelism, `[micro_batches, ranks]`.
        """
        batch = counted.batch
        report = _report(counted, packed)
        uses = Counter(id(planned.plans) for planned in batch.ticks)
        exchanges: dict[int, tuple[Exchange, ...]] = {}
        unfinished: dict[int, MicroBatch] = {}
        keys: dict[int, ChainedKeys] = {}
        server, masks = self.layout.server, len(self.masks.masks)
        latents = self.planned.planner.config.shape.kv_rank is not None
        for planned, turns, of_servers in zip(
            batch.ticks, batch.schedule.turns, counted.bytes_sent, strict=True
        ):
            # Exchanges of plans that two ticks share are built once: the inputs that a forward
            # tick keeps belong to the exchange that its backward tick continues.
            key = id(planned.plans)
            mine = exchanges.pop(key, None) or tuple(
                build_exchange(plan, server, latents) for plan in planned.plans
            )
            uses[key] -= 1
            if uses[key]:
                exchanges[key] = mine
            stage = self.layout.stage
            work = None if stage is None else planned.tick.work[stage]
            micro_batch = None
            if work is not None and planned.tick.direction == "forward":
                micro_batch = self._micro_batch(work, batch, report, unfinished, keys)
            yield TickInput(
                batch.schedule,
                planned.tick,
                planned.plans,
                mine,
                self.program(
                    planned.tick.direction, len(mine) // masks, self._at_home(mine), turns
                ),
                micro_batch,
                {phase: int(each[server]) for phase, each in of_servers.items()},
                counted.memory,
            )

    def program(
        self, direction: Pass, nano_batches: int, at_home: bool, goes_back: bool = True
    ) -> Program:
        """Returns the order of events of a tick: see `tick_program`."""
        return _tick_program(direction, self.layer_groups, nano_batches, at_home, goes_back)

    def _at_home(self, exchanges: tuple[Exchange, ...]) -> bool:
        """Whether all queries stay at home, so that keys may be sent ahead (see `tick_program`)."""
        # Ranks that only serve, and backward ticks with plans of their own, send nothing ahead.
        same_ticks = self.layout.stages == 1 and not self.layout.dedicated
        return same_ticks and not any(exchange.q.move for exchange in exchanges)

    def placed(self, tick: TickInput) -> TickInput:
        """Returns the tick with its exchanges placed in the buffers, over those of the last tick.

        To be called when the tick runs: a loop may ask for a tick earlier, or run it again.
        """
        return replace(tick, exchanges=self.core_attention.buffers.place(tick.exchanges))

    def _micro_batch(
        self,
        work: Work,
        batch: PlannedGlobalBatch,
        report: dict[str, float],
        unfinished: dict[int, MicroBatch],
        keys: dict[int, ChainedKeys],
    ) -> MicroBatch:
        """Makes a micro-batch for its first chunk, and keeps it for those that follow.

        Args:
            work: micro-batch and chunk.
            batch: planned global batch.
            report: figures for the log line.
            unfinished: micro-batches of which chunks follow.
            keys: keys of the chains of which micro-batches follow, by their first micro-batch.
        """
        number, chunk = work
        if number not in unfinished:
            chain = batch.micro_batches[number].chain
            of_chain = keys.setdefault(chain[0], ChainedKeys())
            if number == chain[-1]:
                del keys[chain[0]]
            parts = self.planned.chain_parts(number, batch.micro_batches, of_chain)
            unfinished[number] = self.planned.micro_batch(
                batch.micro_batches[number], report, parts
            )
        return unfinished.pop(number) if chunk == self.layout.chunks - 1 else unfinished[number]


def _report(counted: CountedGlobalBatch, packed: Floats) -> dict[str, float]:
    """Figures for the log line, the same for all micro-batches of a global batch.

    All servers wait for the busiest in each nano-batch of a tick: the loads of the busiest add up
    over the forward ticks, and so do the means. In plain data parallelism ranks wait for each other
    once, when all micro-batches are done.

    Args:
        counted: planned global batch.
        packed: loads of plain data parallelism, `[micro_batches, ranks]`.
    """

    def busiest_over_mean(loads: Sequence[Int64s | Floats]) -> float:
        means = sum(float(each.mean()) for each in loads)
        return sum(float(each.max()) for each in loads) / means if means else 1.0

    moved = sum(int(each.sum()) for of_tick in counted.bytes_sent for each in of_tick.values())
    return {
        "load max/mean before": busiest_over_mean([packed.sum(axis=0)]),
        "load max/mean": busiest_over_mean(counted.forward_loads),
        "MB moved": moved / counted.batch.schedule.micro_batches / 1e6,
    }


class TickStream:
    """An endless iterator over the ticks of a split's global batches, made ahead on two threads.

    One thread has global batches planned: while one runs, the next is there or being planned, and
    so is then the one after it. The other makes the next tick of the present one.

    Args:
        batches: maker of the ticks.
        first_sample: number of samples consumed so far.
        micro_batches: function from a sample to the number of micro-batches of the global batch
            that starts there.
        device: device of the model.
        process: process that plans, which ends with this iterator; None: the thread plans itself,
            and slows down the launches of kernels.
        fused_rotary: as for `MicroBatch.to`.

    Attributes:
        batches: maker of the ticks.
        device: device of the model.
    """

    def __init__(
        self,
        batches: TickBatches,
        first_sample: int,
        micro_batches: Callable[[int], int],
        device: torch.device,
        process: PlannerProcess[CountedGlobalBatch] | None = None,
        fused_rotary: bool = False,
    ) -> None:
        self.batches = batches
        self._fused_rotary = fused_rotary
        self.device = device
        self._process = process
        self._seconds_waited = 0.0
        plan = process or batches.planner()
        self._plans = Prefetcher(_all_plans(batches.planned, plan, first_sample, micro_batches))
        # Ticks in which a stage fills or drains pass faster than one is made.
        self._ticks = Prefetcher(_all_ticks(batches, self._plans), depth=batches.layout.stages)

    def __iter__(self) -> TickStream:
        return self

    def __next__(self) -> TickInput:
        tick_input = next(self._ticks)
        self._seconds_waited += self._ticks.seconds_waited
        core_attention = self.batches.core_attention
        # The same memory in all ticks of a global batch, so buffers grow before the first alone.
        core_attention.reserve(tick_input.memory)
        micro_batch = tick_input.micro_batch
        if micro_batch is not None:
            micro_batch = micro_batch.to(self.device, self._fused_rotary)
            assert micro_batch.packed_seq_params is not None
            micro_batch = replace(
                micro_batch,
                packed_seq_params=self._with_run(
                    micro_batch.packed_seq_params, tick_input.exchanges
                ),
                report=micro_batch.report | {"plan wait ms": self._milliseconds_waited(tick_input)},
            )
        return replace(tick_input, micro_batch=micro_batch)

    def _milliseconds_waited(self, tick: TickInput) -> float:
        """Milliseconds waited since the last report, times the micro-batches over which the log
        takes the mean: so it shows a step's sum."""
        assert self.batches.layout.stage is not None
        work = tick.tick.work[self.batches.layout.stage]
        assert work is not None
        waited = 1e3 * self._seconds_waited * tick.schedule.micro_batches
        # What chunks before the last report is not logged.
        if work.chunk == self.batches.layout.chunks - 1:
            self._seconds_waited = 0.0
        return waited

    def _with_run(self, params: DocumentParams, exchanges: tuple[Exchange, ...]) -> DocumentParams:
        """Returns parameters with the state of a run, which the nano-batches share."""
        run = CoreAttentionRun(
            self.batches.core_attention, ProgramRun(exchanges, masks=self.batches.masks)
        )
        if params.nano_batches is not None:
            ping, pong = (replace(each, run=run) for each in params.nano_batches)
            params = replace(params, nano_batches=(ping, pong))
        return replace(params, run=run)

    def close(self) -> None:
        """Ends the threads and the process."""
        if self._process is not None:
            self._process.close()
        self._ticks.close()
        self._plans.close()


def _all_plans(
    planned: PlannedBatches,
    plan: Callable[[Sequence[Documents]], CountedGlobalBatch],
    sample: int,
    micro_batches: Callable[[int], int],
) -> Iterator[tuple[CountedGlobalBatch, Floats]]:
    """Global batches from a sample on, with the loads of plain data parallelism.

    The first plan above the tolerance is told, by the first rank alone, since all plan alike.
    """
    told = dist.get_rank() != 0
    while True:
        number = micro_batches(sample)
        counted = plan(planned.documents(sample, number))
        for tick in () if told else counted.batch.ticks:
            why = why_above_tolerance(tick.plans, planned.planner.config)
            if why is not None:
                logger.warning(
                    "in the global batch from sample %d on, %s. Later ones are not told: "
                    '"load max/mean" is of every iteration',
                    *(sample, why),
                )
                told = True
                break
        yield counted, planned.packed_loads(sample, number)
        sample += number * planned.layout.samples_per_micro_batch


def _all_ticks(
    batches: TickBatches, plans: Iterator[tuple[CountedGlobalBatch, Floats]]
) -> Iterator[TickInput]:
    for counted, packed in plans:
        yield from batches.ticks(counted, packed)
