"""The ticks of a split with `--distca`: this rank's input of each, planned and made ahead.

All ranks plan the same global batches, each in a process of its own that is at least one global
batch ahead of the model. A thread makes a rank's part of the plans, a few ticks ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from distca.cost.memory import CoreAttentionMemory
from distca.cost.volume import AttentionShape
from distca.plan import LayerMasks, Plan
from distca.run_figures import PLAN_WAIT
from distca.runtime import CoreAttention, EventCursor, Exchange, Prefetcher, build_exchange
from distca.runtime.shared_heads import SharedHeads
from distca.schedule import (
    CountedGlobalBatch,
    Pass,
    PlannedGlobalBatch,
    PlannerProcess,
    PlannerWithStats,
    Tick,
    TickSchedule,
    Work,
)
from distca.schedule.program import LayerGroup, Program, calls_of, tick_program
from megatron_patches.batches.layouts import PipelineLayout
from megatron_patches.batches.micro_batch import PAIRS, MicroBatch
from megatron_patches.batches.plan_log import MemoryWarning, ToleranceWarning, balance_figures
from megatron_patches.batches.planned import PlannedReader, PredictedTokens
from megatron_patches.model.chained_keys import ChainedKeys
from megatron_patches.model.core_attention import CoreAttentionRun

_tick_program = lru_cache(maxsize=64)(tick_program)


@dataclass(frozen=True)
class TickInput:
    """A rank's input of a tick.

    Attributes:
        schedule: ticks of the whole global batch.
        tick: work of all stages in this tick.
        plans: plan of each nano-batch with each mask, for the tokens of all stages: mask by mask,
            each ping then pong.
        exchanges: this rank's part of each plan; `RankRuntime.global_batch` places it in core
            attention's buffers.
        program: order of events of every rank's core attention.
        micro_batch: micro-batch that this rank runs forward in the tick; None: it runs none.
        bytes_sent: bytes that this rank sends for the tick, by phase; keys that are sent ahead
            leave before the tick begins.
        memory: memory that the largest plan of the global batch needs.
        asked: micro-batches that the loop asks for; the schedule may have more.
        figures: figures of the global batch, by their names on boards.
    """

    schedule: TickSchedule
    tick: Tick
    plans: tuple[Plan, ...]
    exchanges: tuple[Exchange, ...]
    program: Program
    micro_batch: MicroBatch | None
    bytes_sent: dict[str, int]
    memory: CoreAttentionMemory
    asked: int
    figures: Mapping[str, float]


@dataclass(frozen=True)
class RankRuntime:
    """What one rank runs the ticks of all splits with.

    Attributes:
        layout: stages and servers.
        core_attention: runtime of the plans.
        shape: attention heads of a tensor-parallel rank, and what travels for keys and values.
        masks: masks of a model chunk's layers.
        layer_groups: groups of a model chunk's layers whose backward passes run together; behind
            them those of layers that the last stage alone has.
        heads: ranks that share heads with this one, or None.
    """

    layout: PipelineLayout
    core_attention: CoreAttention
    shape: AttentionShape
    masks: LayerMasks
    layer_groups: tuple[LayerGroup, ...]
    heads: SharedHeads | None = None

    @property
    def layers(self) -> int:
        """Number of a model chunk's layers that all stages have."""
        behind = len(self.masks.pattern) - len(self.masks.of_all_stages.pattern)
        return sum(len(group.layers) for group in self.layer_groups) - behind

    def program(
        self,
        direction: Pass,
        nano_batches: int,
        at_home: bool,
        goes_back: bool = True,
        ends: bool = True,
    ) -> Program:
        """Returns the order of events of a tick.

        Args:
            direction, nano_batches, at_home, goes_back: as for `tick_program`.
            ends: whether the last stage runs the layers that it alone has.
        """
        groups = self.layer_groups
        if not ends:
            groups = tuple(group for group in groups if group.layers[0] < self.layers)
        return _tick_program(direction, groups, nano_batches, at_home, goes_back)

    def global_batch(self, ticks: Iterator[TickInput]) -> Iterator[TickInput]:
        """Yields the ticks of a global batch, each of which may run until the next is taken.

        Grows core attention's buffers before the first tick (collective), to what all need. Places
        the exchanges of each in them, over those of the last: a loop may ask for a tick of `ticks`
        earlier, or run it again.

        Args:
            ticks: iterator whose next tick is the first one of a global batch.
        """
        first = next(ticks)
        self.core_attention.reserve(first.memory)
        for number in range(len(first.schedule.ticks)):
            tick = next(ticks) if number else first
            yield replace(tick, exchanges=self.core_attention.buffers.place(tick.exchanges))


@dataclass(frozen=True)
class TickMaker:
    """Makes the inputs of a split's ticks for one rank.

    Attributes:
        reader: reader of the split's micro-batches, with their planner.
        runtime: what the ticks run with.
    """

    reader: PlannedReader
    runtime: RankRuntime

    def planner(self) -> PlannerWithStats:
        """Makes the planner of global batches, which also counts what their plans need."""
        runtime = self.runtime
        directions: tuple[Pass, ...] = ("forward", "backward")
        return PlannerWithStats(
            self.reader.planner,
            {
                each: calls_of(runtime.program(each, 1, at_home=False), runtime.masks)
                for each in directions
            },
            runtime.core_attention.backward,
            1 if runtime.heads is None else runtime.heads.size,
            self.reader.bound,
        )

    def ticks(
        self,
        counted: CountedGlobalBatch,
        figures: Mapping[str, float],
        predicted: PredictedTokens | None = None,
    ) -> Iterator[TickInput]:
        """Makes the inputs of a planned global batch's ticks.

        Args:
            counted: planned global batch.
            figures: figures of it, by their names on boards.
            predicted: what layers of multi-token prediction predict in it, or None.
        """
        batch, runtime, layout = counted.batch, self.runtime, self.runtime.layout
        micro_batches = _MicroBatches(self.reader, batch, layout.chunks, predicted)
        latents = runtime.shape.kv_rank is not None
        # Ticks may share plans. Their exchanges are built once: with `keep` the backward tick finds
        # there the inputs that the forward tick kept.
        uses = Counter(each.number for each in batch.ticks)
        exchanges: dict[int, tuple[Exchange, ...]] = {}
        for planned_tick, goes_back, of_servers in zip(
            batch.ticks, batch.schedule.goes_back, counted.bytes_sent, strict=True
        ):
            mine = exchanges.pop(planned_tick.number, None) or tuple(
                build_exchange(plan, layout.server, latents) for plan in planned_tick.plans
            )
            uses[planned_tick.number] -= 1
            if uses[planned_tick.number]:
                exchanges[planned_tick.number] = mine
            work = None if layout.stage is None else planned_tick.tick.work[layout.stage]
            micro_batch = None
            if work is not None and planned_tick.tick.direction == "forward":
                micro_batch = self._with_run(micro_batches.read(work))
            yield TickInput(
                batch.schedule,
                planned_tick.tick,
                planned_tick.plans,
                mine,
                runtime.program(
                    planned_tick.tick.direction,
                    len(mine) // len(runtime.masks.masks),
                    self._at_home(mine),
                    goes_back,
                    planned_tick.tick.ends_model(layout.chunks),
                ),
                micro_batch,
                {phase: int(each[layout.server]) for phase, each in of_servers.items()},
                counted.memory,
                counted.asked,
                figures,
            )

    def _at_home(self, exchanges: tuple[Exchange, ...]) -> bool:
        """Returns whether all queries stay at home: then keys may be sent ahead."""
        # Ranks that only serve, and backward ticks with plans of their own, send nothing ahead.
        same_ticks = self.runtime.layout.stages == 1 and not self.runtime.layout.dedicated
        return same_ticks and not any(exchange.q.move for exchange in exchanges)

    def _with_run(self, micro_batch: MicroBatch) -> MicroBatch:
        """Returns a micro-batch with the state of its core attention, which its nano-batches share.

        Each pass begins with the exchanges and the program of its own tick.
        """
        params, runtime = micro_batch.packed_seq_params, self.runtime
        assert params is not None
        cursor = EventCursor((), masks=runtime.masks)
        run = CoreAttentionRun(runtime.core_attention, cursor, runtime.heads)
        if params.nano_batches is not None:
            ping, pong = (replace(each, run=run) for each in params.nano_batches)
            params = replace(params, nano_batches=(ping, pong))
        return replace(micro_batch, packed_seq_params=replace(params, run=run))


class _MicroBatches:
    """This rank's micro-batches of a global batch: each is read once for all model chunks.

    Args:
        reader: reader of planned micro-batches.
        batch: planned global batch.
        chunks: number of model chunks.
        predicted: what layers of multi-token prediction predict in it, or None.
    """

    def __init__(
        self,
        reader: PlannedReader,
        batch: PlannedGlobalBatch,
        chunks: int,
        predicted: PredictedTokens | None,
    ) -> None:
        self._reader, self._batch, self._chunks = reader, batch, chunks
        self._predicted = predicted
        # Micro-batches that later model chunks still need; and keys of chains that are not
        # complete, by the chain's first micro-batch.
        self._unfinished: dict[int, MicroBatch] = {}
        self._keys: dict[int, ChainedKeys] = {}

    def read(self, work: Work) -> MicroBatch:
        """Returns the micro-batch of a chunk's forward pass."""
        number, unfinished = work.micro_batch, self._unfinished
        if number not in unfinished:
            planned = self._batch.micro_batches
            chain = planned[number].chain
            of_chain = self._keys.setdefault(chain[0], ChainedKeys())
            if number == chain[-1]:
                del self._keys[chain[0]]
            parts = self._reader.chain_parts(number, planned, of_chain)
            unfinished[number] = self._reader.micro_batch(planned[number], parts, self._predicted)
        return unfinished.pop(number) if work.chunk == self._chunks - 1 else unfinished[number]


class PlannedIterator(Iterator[TickInput]):
    """Yields this rank's input of each tick of a split's global batches. Endless.

    One thread has global batches planned: while one runs, the next is planned, then the one after
    it. Another thread makes the next ticks of the present one.

    Args:
        maker: maker of the ticks.
        first_sample: number of samples consumed so far.
        micro_batches_at: function from a sample to the number of micro-batches of the global batch
            that starts there.
        device: device of the model.
        process: process that plans, and ends with this iterator; None: the thread plans, and slows
            down kernel launches.
        announce: function that announces the next global batch of this split to dedicated servers,
            or None.
        fused_rotary: as for `MicroBatch.to`.

    Attributes:
        runtime: what the ticks run with.
        device: device of the model.
        announce: as above.
    """

    def __init__(
        self,
        maker: TickMaker,
        first_sample: int,
        micro_batches_at: Callable[[int], int],
        device: torch.device,
        process: PlannerProcess[CountedGlobalBatch] | None = None,
        announce: Callable[[], None] | None = None,
        fused_rotary: bool = False,
    ) -> None:
        self.runtime, self.device, self.announce = maker.runtime, device, announce
        self._maker, self._process, self._fused_rotary = maker, process, fused_rotary
        self._figures: Mapping[str, float] = {}
        self._seconds_waited = 0.0
        self._plans = Prefetcher(self._plan_all(first_sample, micro_batches_at))
        # Ticks in which a stage fills or drains pass faster than one is made.
        self._ticks = Prefetcher(self._make_all(), depth=self.runtime.layout.stages)

    def _plan_all(
        self, sample: int, micro_batches_at: Callable[[int], int]
    ) -> Iterator[tuple[CountedGlobalBatch, dict[str, float], PredictedTokens | None]]:
        """Yields the plans of all global batches from a sample on, figures for the log, and what
        layers of multi-token prediction predict."""
        reader, plan = self._maker.reader, self._process or self._maker.planner()
        warning = ToleranceWarning(reader.planner.config, self.runtime.layout.stage is None)
        too_large = MemoryWarning(reader.bound)
        while True:
            number = micro_batches_at(sample)
            documents = reader.documents(sample, number)
            counted = plan(documents)
            warning.check(counted.batch, sample)
            too_large.check(counted, sample)
            figures = balance_figures(counted, reader.plain_loads(sample, number))
            figures |= {PAIRS: reader.million_pairs(documents, number)}
            yield counted, figures, reader.predicted(sample, number)
            sample += number * reader.layout.samples_per_micro_batch

    def _make_all(self) -> Iterator[TickInput]:
        for planned in self._plans:
            yield from self._maker.ticks(*planned)

    def __next__(self) -> TickInput:
        tick = next(self._ticks)
        self._seconds_waited += self._ticks.seconds_waited
        self._figures = tick.figures
        if tick.micro_batch is None:
            return tick
        return replace(tick, micro_batch=tick.micro_batch.to(self.device, self._fused_rotary))

    def skip_global_batch(self) -> None:
        """Takes the ticks of a global batch, and leaves them; the next one must be its first."""
        first = next(self)
        for _ in first.schedule.ticks[1:]:
            next(self)

    def take_figures(self) -> dict[str, float]:
        """Returns figures of the global batch of the last tick, by their names on boards.

        Among them the milliseconds for which ticks were waited for since the last call.
        """
        waited, self._seconds_waited = self._seconds_waited, 0.0
        return {**self._figures, PLAN_WAIT: 1e3 * waited}

    def close(self) -> None:
        """Ends the threads and the process."""
        if self._process is not None:
            self._process.close()
        self._ticks.close()
        self._plans.close()
