"""Micro-batches with `--distca`: which tokens a rank owns is for a scheduler to say.

A micro-batch is run as two nano-batches with a plan each, or whole. Its documents may have come in
another micro-batch of the same global batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from distca.plan import Mask, Plan, place_in_turn, place_sequentially
from distca.plan.span import Int64s, expand_ranges
from distca.schedule import (
    NanoPlan,
    ScheduleConfig,
    Scheduler,
    document_loads,
    plan_halves,
    share_out,
)
from megatron_patches.attention import DocumentParams
from megatron_patches.batch import MicroBatch, WindowLayout, document_params, read_positions
from megatron_patches.stream import TokenStream

NANO_BATCHES = ("ping", "pong")


@dataclass(frozen=True)
class Documents:
    """The documents of one micro-batch, in the order in which its plan numbers them.

    Attributes:
        lengths: tokens of each, int64 `[documents]`.
        starts: where each starts in the stream, int64 `[documents]`.
        window_sizes: how many of them each window has, where they are as they came in.
    """

    lengths: Int64s
    starts: Int64s
    window_sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class NanoBatches:
    """A micro-batch's documents and plans, by nano-batch: one, or ping and pong.

    Attributes:
        documents: of each nano-batch; a document that crosses is in pong from the cut on.
        plans: of each, over the data-parallel ranks.
    """

    documents: tuple[Documents, ...]
    plans: tuple[NanoPlan, ...]


@dataclass(frozen=True)
class PlannedBatches:
    """Micro-batches with `--distca`: documents span ranks, and a plan says who computes what.

    Attributes:
        stream: where the tokens come from.
        layout: windows and ranks.
        mask: what a query sees.
        scheduler: makes the plans.
        schedule_config: what plans are judged by.
        free_placement: the scheduler places documents as it likes best, and they are shared out
            over the micro-batches of a global batch; otherwise one after the other.
        ping_pong: micro-batches are run as two nano-batches.
        sequence_shards: tensor-parallel ranks that divide the tokens among them (sequence
            parallelism), or 1.
    """

    stream: TokenStream
    layout: WindowLayout
    mask: Mask
    scheduler: Scheduler
    schedule_config: ScheduleConfig
    free_placement: bool
    ping_pong: bool
    sequence_shards: int

    def global_batch(self, first_sample: int, micro_batches: int) -> list[Documents]:
        """The documents of each micro-batch of the global batch that starts at a sample."""
        step = self.layout.samples_per_micro_batch
        came = [self._as_they_came(first_sample + n * step) for n in range(micro_batches)]
        return self._share_out(came) if self.free_placement and micro_batches > 1 else came

    def _as_they_came(self, sample: int) -> Documents:
        windows = [
            self.stream.document_lengths(start, stop) for start, stop in self.layout.windows(sample)
        ]
        lengths = np.concatenate(windows)
        starts = sample * self.layout.seq_length + np.cumsum(lengths) - lengths
        return Documents(lengths, starts, tuple(len(window) for window in windows))

    def _share_out(self, came: list[Documents]) -> list[Documents]:
        """The documents of a global batch's micro-batches, so that these have equal loads."""
        lengths = np.concatenate([documents.lengths for documents in came])
        starts = np.concatenate([documents.starts for documents in came])
        windows = np.repeat(np.arange(len(came)), [len(documents.lengths) for documents in came])
        loads = document_loads(lengths, self.mask, self.schedule_config.cost_model)
        shared = share_out(lengths, loads, windows)
        return [Documents(lengths[shared == n], starts[shared == n]) for n in range(len(came))]

    def plan(self, documents: Documents) -> NanoBatches:
        """The plans of a micro-batch over its data-parallel ranks; the same on every rank.

        Raises:
            ValueError: the scheduler leaves a rank without tokens.
        """
        if not self.ping_pong:
            plan = self._nano_plan(documents.lengths, documents.window_sizes)
            return NanoBatches((documents,), (NanoPlan(plan),))
        loads = document_loads(documents.lengths, self.mask, self.schedule_config.cost_model)
        halves, plans = plan_halves(documents.lengths, loads, self._nano_plan)
        nano = tuple(
            Documents(half.end - half.start, documents.starts[half.document] + half.start)
            for half in halves
        )
        return NanoBatches(nano, plans)

    def _nano_plan(self, lengths: Int64s, window_sizes: tuple[int, ...] = ()) -> Plan:
        at = self.layout
        nano_batches = 2 if self.ping_pong else 1
        tokens = at.micro_batch_size * at.seq_length // nano_batches
        rooms = np.full(at.data_parallel_size, tokens, dtype=np.int64)
        if self.free_placement:
            plan = self.scheduler.plan(lengths, rooms, self.mask)
        elif self.ping_pong:
            plan = self.scheduler.schedule(lengths, place_in_turn(lengths, rooms), self.mask)
        else:
            windows = np.split(lengths, np.cumsum(window_sizes)[:-1])
            placement = place_sequentially(windows, at.data_parallel_size, at.seq_length)
            plan = self.scheduler.schedule(lengths, placement, self.mask)
        plan.validate()
        if not plan.placement.tokens_per_rank().all():
            raise ValueError(
                f"{plan.scheduler} leaves a rank without tokens, which a model cannot train on: "
                "use another --distca-scheduler"
            )
        return plan

    def micro_batch(self, nano: NanoBatches, report: dict[str, float]) -> MicroBatch:
        """This rank's tokens of a micro-batch; who computes its core attention is added later."""
        starts, positions, lengths = [], [], []
        for documents, planned in zip(nano.documents, nano.plans, strict=True):
            mine = planned.plan.placement.of_rank(self.layout.data_parallel_rank)
            # The positions of a crossing document count from its start in ping.
            before = np.zeros_like(documents.lengths)
            if planned.crossing is not None:
                before[planned.crossing.document] = planned.crossing.cut
            lengths.append(mine.end - mine.start)
            starts.append(expand_ranges(documents.starts[mine.document] + mine.start, lengths[-1]))
            positions.append(expand_ranges(before[mine.document] + mine.start, lengths[-1]))
        order = nano_order([len(rows) for rows in starts], self.sequence_shards)
        tokens, labels, loss_mask = read_positions(self.stream, np.concatenate(starts))
        params = document_params(np.concatenate(lengths), token_positions=True)
        if self.ping_pong:
            params = replace(params, halves=self._halves(nano, lengths))
        return MicroBatch(
            tokens[:, order],
            labels[:, order],
            loss_mask[:, order],
            torch.from_numpy(np.concatenate(positions))[None, order],
            packed_seq_params=params,
            report=report,
        )

    def _halves(
        self, nano: NanoBatches, lengths: list[Int64s]
    ) -> tuple[DocumentParams, DocumentParams]:
        """Ping and pong to Megatron's layers; `lengths` are of this rank's pieces of each."""
        ping, pong = (
            replace(document_params(of_half, token_positions=True), nano_batch=name)
            for name, of_half in zip(NANO_BATCHES, lengths, strict=True)
        )
        crossing = nano.plans[1].crossing
        if crossing is None:
            return ping, pong
        at = nano.plans[0].plan.placement
        # In ping the crossing document is the last.
        lent = (at.document == len(nano.documents[0].lengths) - 1) & (
            at.rank == self.layout.data_parallel_rank
        )
        rows = expand_ranges(at.first_rows()[lent], (at.end - at.start)[lent])
        ping = replace(ping, lends_keys=True)
        return ping, replace(pong, before=ping, earlier_rows=torch.from_numpy(rows))


def nano_order(sizes: list[int], shards: int) -> Int64s:
    """The order in which the rows of nano-batches are given to the model.

    Sequence parallelism gives each tensor-parallel rank a contiguous shard of the rows: its shard
    of ping, then its shard of pong, so that each nano-batch gathers from all.

    Args:
        sizes: rows of each nano-batch, which lie one after the other.
        shards: of the rows; they divide all sizes.

    Returns:
        int64 `[rows]`, the rows in that order.
    """
    starts = np.cumsum(sizes) - sizes
    return np.concatenate(
        [
            np.arange(start + shard * size // shards, start + (shard + 1) * size // shards)
            for shard in range(shards)
            for start, size in zip(starts, sizes, strict=True)
        ]
    )
