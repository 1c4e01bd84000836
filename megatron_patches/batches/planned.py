"""Micro-batches with `--distca`: the documents of a global batch, and a rank's tokens of each plan.

The planner (`distca.schedule.GlobalBatchPlanner`) shares the documents out over micro-batches, and
says which tokens a rank owns. A micro-batch runs as two nano-batches with a plan each, or whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from distca.cost.kernel_time import CostModel
from distca.plan.span import Floats, Int64s, expand_ranges
from distca.schedule import Documents, GlobalBatchPlanner, PlannedMicroBatch, packed_loads
from distca.schedule.program import NANO_BATCHES
from megatron_patches.batches.micro_batch import (
    MicroBatch,
    WindowLayout,
    document_params,
    read_positions,
)
from megatron_patches.batches.stream import TokenStream
from megatron_patches.model.core_attention import DocumentParams, NanoBatch


@dataclass(frozen=True)
class PlannedBatches:
    """Micro-batches with `--distca`: documents span ranks, and a plan says who computes what.

    Attributes:
        stream: token stream of the split.
        layout: windows and ranks.
        planner: planner of global batches.
        sequence_shards: number of tensor-parallel ranks that divide the tokens among them (sequence
            parallelism), or 1.
    """

    stream: TokenStream
    layout: WindowLayout
    planner: GlobalBatchPlanner
    sequence_shards: int

    def documents(self, first_sample: int, micro_batches: int) -> list[Documents]:
        """Reads the documents of each micro-batch from a sample on, in the order of the stream."""
        samples = self.layout.samples_per_micro_batch
        return [self._read_windows(first_sample + n * samples) for n in range(micro_batches)]

    def packed_loads(
        self, first_sample: int, micro_batches: int, cost_model: CostModel | None = None
    ) -> Floats:
        """Loads of the ranks under plain data parallelism, `[micro_batches, ranks]`.

        Args:
            first_sample: sample at which the first micro-batch starts.
            micro_batches: number of micro-batches.
            cost_model: cost model of the loads; None: they are counts of pairs.
        """
        layout = self.layout
        capacities = np.full(layout.data_parallel_size, layout.seq_length, dtype=np.int64)
        loads = np.zeros((micro_batches, layout.data_parallel_size))
        for n in range(micro_batches):
            for start, stop in layout.windows(first_sample + n * layout.samples_per_micro_batch):
                lengths = self.stream.document_lengths(start, stop)
                loads[n] += packed_loads(lengths, capacities, self.planner.mask, cost_model)
        return loads

    def _read_windows(self, sample: int) -> Documents:
        windows = [
            self.stream.document_lengths(start, stop) for start, stop in self.layout.windows(sample)
        ]
        lengths = np.concatenate(windows)
        starts = sample * self.layout.seq_length + np.cumsum(lengths) - lengths
        return Documents(lengths, starts, tuple(len(window) for window in windows))

    def micro_batch(self, planned: PlannedMicroBatch, report: dict[str, float]) -> MicroBatch:
        """Makes this rank's part of a micro-batch, without the state of its core attention."""
        starts, positions, lengths = [], [], []
        for documents, nano in zip(planned.documents, planned.plans, strict=True):
            mine = nano.plan.placement.of_rank(self.layout.data_parallel_rank)
            # The positions of a crossing document count from its start in ping.
            first_positions = np.zeros_like(documents.lengths)
            if nano.crossing is not None:
                first_positions[nano.crossing.document] = nano.crossing.cut
            lengths.append(mine.end - mine.start)
            starts.append(expand_ranges(documents.starts[mine.document] + mine.start, lengths[-1]))
            firsts = first_positions[mine.document] + mine.start
            positions.append(expand_ranges(firsts, lengths[-1]))
        order = nano_order([len(rows) for rows in starts], self.sequence_shards)
        tokens, labels, loss_mask = read_positions(self.stream, np.concatenate(starts))
        params = document_params(np.concatenate(lengths), token_positions=True)
        if len(planned.plans) == 2:
            params = replace(params, nano_batches=self._nano_batches(planned, lengths))
        return MicroBatch(
            tokens[:, order],
            labels[:, order],
            loss_mask[:, order],
            torch.from_numpy(np.concatenate(positions))[None, order],
            packed_seq_params=params,
            report=report,
        )

    def _nano_batches(
        self, planned: PlannedMicroBatch, lengths: list[Int64s]
    ) -> tuple[DocumentParams, DocumentParams]:
        """Describes ping and pong to Megatron's layers.

        Args:
            planned: planned micro-batch.
            lengths: lengths of this rank's pieces of ping, and of pong.
        """
        borrowed = None
        if planned.plans[1].crossing is not None:
            spans = planned.plans[0].plan.placement
            # The crossing document is the last one of ping.
            lent = (spans.document == len(planned.documents[0].lengths) - 1) & (
                spans.rank == self.layout.data_parallel_rank
            )
            rows = expand_ranges(spans.first_rows()[lent], (spans.end - spans.start)[lent])
            borrowed = torch.from_numpy(rows)
        ping, pong = (document_params(pieces, token_positions=True) for pieces in lengths)
        return (
            replace(ping, nano_batch=NanoBatch(0, NANO_BATCHES[0], borrowed is not None)),
            replace(pong, nano_batch=NanoBatch(1, NANO_BATCHES[1], False, borrowed)),
        )


def nano_order(sizes: list[int], shards: int) -> Int64s:
    """Returns the order in which the model is given the rows of nano-batches.

    Sequence parallelism gives each tensor-parallel rank a contiguous shard of the rows: its shard
    of ping, then its shard of pong, so that each nano-batch gathers from all.

    Args:
        sizes: numbers of rows of the nano-batches, which lie one after the other.
        shards: number of shards, which divides all sizes.

    Returns:
        Row numbers in that order, int64 `[rows]`.
    """
    starts = np.cumsum(sizes) - sizes
    return np.concatenate(
        [
            np.arange(start + shard * size // shards, start + (shard + 1) * size // shards)
            for shard in range(shards)
            for start, size in zip(starts, sizes, strict=True)
        ]
    )
