"""A rank's input of each tick of a global batch: its micro-batch, and its part of the plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from distca.cost.memory import CoreAttentionMemory
from distca.plan import LayerMasks, Plan
from distca.runtime import CoreAttention, Exchange, build_exchange
from distca.schedule import (
    CountedGlobalBatch,
    Pass,
    PlannedGlobalBatch,
    PlannerWithStats,
    Tick,
    TickSchedule,
    Work,
)
from distca.schedule.program import LayerGroup, Program, calls_of, tick_program
from megatron_patches.batches.layouts import PipelineLayout
from megatron_patches.batches.micro_batch import MicroBatch
from megatron_patches.batches.planned import PlannedReader
from megatron_patches.model.chained_keys import ChainedKeys

_tick_program = lru_cache(maxsize=64)(tick_program)


@dataclass(frozen=True)
class TickInput:
    """A rank's input of a tick.

    Attributes:
        schedule: ticks of the whole global batch.
        tick: work of all stages in this tick.
        plans: plan of each nano-batch with each mask in turn, for the tokens of all stages.
        exchanges: this rank's part of each plan, not yet placed in core attention's buffers.
        program: order of events of every rank's core attention.
        micro_batch: micro-batch that this rank runs forward in the tick; None: it runs none.
        bytes_sent: bytes that this rank sends for the tick, by phase; keys that are sent ahead
            leave before the tick begins.
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
class TickMaker:
    """Makes the inputs of a split's ticks for one rank.

    Attributes:
        reader: reader of the split's micro-batches, with their planner.
        layout: stages and servers.
        layer_groups: groups of a model chunk's layers whose backward passes run together.
        core_attention: runtime of the plans.
    """

    reader: PlannedReader
    layout: PipelineLayout
    layer_groups: tuple[LayerGroup, ...]
    core_attention: CoreAttention

    @property
    def masks(self) -> LayerMasks:
        """Masks of a model chunk's layers."""
        return self.reader.planner.masks

    def planner(self) -> PlannerWithStats:
        """Makes the planner of global batches, which also counts what their plans need."""
        directions: tuple[Pass, ...] = ("forward", "backward")
        return PlannerWithStats(
            self.reader.planner,
            {
                each: calls_of(self.program(each, 1, at_home=False), self.masks)
                for each in directions
            },
            self.core_attention.backward,
        )

    def ticks(self, counted: CountedGlobalBatch, report: dict[str, float]) -> Iterator[TickInput]:
        """Makes the inputs of a planned global batch's ticks.

        Args:
            counted: planned global batch.
            report: figures for the log line.
        """
        batch = counted.batch
        uses = Counter(id(planned.plans) for planned in batch.ticks)
        exchanges: dict[int, tuple[Exchange, ...]] = {}
        unfinished: dict[int, MicroBatch] = {}
        keys: dict[int, ChainedKeys] = {}
        server, masks = self.layout.server, len(self.masks.masks)
        latents = self.reader.planner.config.shape.kv_rank is not None
        for planned, goes_back, of_servers in zip(
            batch.ticks, batch.schedule.goes_back, counted.bytes_sent, strict=True
        ):
            # Two ticks may share plans. Their exchanges are built once: with `keep` the backward
            # tick finds there the inputs that the forward tick kept.
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
                    planned.tick.direction, len(mine) // masks, self._at_home(mine), goes_back
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
        """Returns whether all queries stay at home: then keys may be sent ahead."""
        # Ranks that only serve, and backward ticks with plans of their own, send nothing ahead.
        same_ticks = self.layout.stages == 1 and not self.layout.dedicated
        return same_ticks and not any(exchange.q.move for exchange in exchanges)

    def placed(self, tick: TickInput) -> TickInput:
        """Places a tick's exchanges in the buffers, over those of the last tick.

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
        """Reads a micro-batch for its first chunk, and keeps it for those that follow.

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
            parts = self.reader.chain_parts(number, batch.micro_batches, of_chain)
            unfinished[number] = self.reader.micro_batch(batch.micro_batches[number], report, parts)
        return unfinished.pop(number) if chunk == self.layout.chunks - 1 else unfinished[number]
