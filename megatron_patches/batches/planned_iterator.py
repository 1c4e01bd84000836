"""The iterator of a split with `--distca`: ticks, whose global batches are planned ahead.

All ranks plan the same global batches, each in a process of its own that is at least one global
batch ahead of the model. A thread makes a rank's part of the plans, a few ticks ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from distca.runtime import EventCursor, Exchange, Prefetcher
from distca.schedule import CountedGlobalBatch, PlannerProcess
from megatron_patches.batches.plan_log import ToleranceWarning, balance_figures
from megatron_patches.batches.ticks import TickInput, TickMaker
from megatron_patches.model.core_attention import CoreAttentionRun, DocumentParams


class PlannedIterator(Iterator[TickInput]):
    """Yields this rank's input of each tick of a split's global batches. Endless.

    One thread has global batches planned: while one runs, the next is planned, then the one after
    it. Another thread makes the next ticks of the present one.

    Args:
        maker: maker of the ticks.
        first_sample: number of samples consumed so far.
        micro_batches: function from a sample to the number of micro-batches of the global batch
            that starts there.
        device: device of the model.
        process: process that plans, and ends with this iterator; None: the thread plans, and slows
            down kernel launches.
        announce: function that announces the next global batch of this split to dedicated servers;
            None: there are none.
        fused_rotary: as for `MicroBatch.to`.

    Attributes:
        maker: maker of the ticks.
        device: device of the model.
        announce: as above.
    """

    def __init__(
        self,
        maker: TickMaker,
        first_sample: int,
        micro_batches: Callable[[int], int],
        device: torch.device,
        process: PlannerProcess[CountedGlobalBatch] | None = None,
        announce: Callable[[], None] | None = None,
        fused_rotary: bool = False,
    ) -> None:
        self.maker, self.device, self.announce = maker, device, announce
        self._fused_rotary = fused_rotary
        self._process = process
        self._seconds_waited = 0.0
        self._plans = Prefetcher(self._plan_all(first_sample, micro_batches))
        # Ticks in which a stage fills or drains pass faster than one is made.
        self._ticks = Prefetcher(self._make_all(), depth=maker.layout.stages)

    def _plan_all(
        self, sample: int, micro_batches: Callable[[int], int]
    ) -> Iterator[tuple[CountedGlobalBatch, dict[str, float]]]:
        """Yields the plans of all global batches from a sample on, and figures for the log."""
        reader, plan = self.maker.reader, self._process or self.maker.planner()
        warning = ToleranceWarning(reader.planner.config)
        while True:
            number = micro_batches(sample)
            counted = plan(reader.documents(sample, number))
            warning.check(counted.batch, sample)
            yield counted, balance_figures(counted, reader.packed_loads(sample, number))
            sample += number * reader.layout.samples_per_micro_batch

    def _make_all(self) -> Iterator[TickInput]:
        for counted, figures in self._plans:
            yield from self.maker.ticks(counted, figures)

    def __next__(self) -> TickInput:
        tick_input = next(self._ticks)
        self._seconds_waited += self._ticks.seconds_waited
        # The same memory in all ticks of a global batch, so buffers grow before the first alone.
        self.maker.core_attention.reserve(tick_input.memory)
        micro_batch = tick_input.micro_batch
        if micro_batch is None:
            return tick_input
        micro_batch = micro_batch.to(self.device, self._fused_rotary)
        assert micro_batch.packed_seq_params is not None
        micro_batch = replace(
            micro_batch,
            packed_seq_params=self._with_run(micro_batch.packed_seq_params, tick_input.exchanges),
            report=micro_batch.report | {"plan wait ms": self._milliseconds_waited(tick_input)},
        )
        return replace(tick_input, micro_batch=micro_batch)

    def _milliseconds_waited(self, tick: TickInput) -> float:
        """Returns the milliseconds waited since the last report, times the micro-batches.

        The log takes the mean over micro-batches, and so shows a step's sum.
        """
        layout = self.maker.layout
        assert layout.stage is not None
        work = tick.tick.work[layout.stage]
        assert work is not None
        waited = 1e3 * self._seconds_waited * tick.schedule.micro_batches
        # The log drops the reports of all chunks but the last.
        if work.chunk == layout.chunks - 1:
            self._seconds_waited = 0.0
        return waited

    def _with_run(self, params: DocumentParams, exchanges: tuple[Exchange, ...]) -> DocumentParams:
        """Returns parameters with the state of a run, which the nano-batches share."""
        run = CoreAttentionRun(
            self.maker.core_attention, EventCursor(exchanges, masks=self.maker.masks)
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
