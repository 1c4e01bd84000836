"""Plain micro-batches of packed documents: data without `--distca`.

The token stream of a split (`stream.py`) is cut into *windows* of data-parallel size times
`--seq-length` tokens. A micro-batch is `--micro-batch-size` windows. Every data-parallel rank owns
`--seq-length` tokens of each window. Sample `i` of Megatron's counting is the tokens
`[i * seq_length, (i + 1) * seq_length)` of the stream, so consumed samples say where a run resumes,
on any number of ranks.

Here a rank's documents end where its tokens end. With `--distca` (`planned.py`) the documents of a
window span its ranks, and the planner chooses which tokens of a global batch each rank owns. The
loss is a sum over all targets of the global batch, so it is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from distca.attention.reference import document_visibility
from distca.plan import LayerMasks, Mask
from distca.plan.span import Int64s, expand_ranges
from distca.runtime import Prefetcher
from megatron_patches.batches.layouts import WindowLayout
from megatron_patches.batches.micro_batch import (
    PAIRS,
    MicroBatch,
    document_params,
    million_pairs,
    read_positions,
)
from megatron_patches.batches.stream import TokenStream


@dataclass(frozen=True)
class PackedReader:
    """Reads plain micro-batches, in which each rank attends within its own tokens.

    Attributes:
        stream: token stream of the split.
        layout: windows and ranks.
        masks: masks of the layers.
        dense: whether micro-batches have a dense attention mask rather than `packed_seq_params`.
        as_one_sequence: whether rotary angles are looked up token by token (`model/rotary.py`);
            off where Megatron numbers the packed documents itself.
    """

    stream: TokenStream
    layout: WindowLayout
    masks: LayerMasks
    dense: bool
    as_one_sequence: bool

    def micro_batch(self, first_sample: int) -> MicroBatch:
        """Reads the micro-batch that starts at a sample."""
        layout = self.layout
        own_starts = [
            start + layout.data_parallel_rank * layout.seq_length
            for start, _ in layout.windows(first_sample)
        ]
        lengths = np.concatenate(
            [self.stream.document_lengths(start, start + layout.seq_length) for start in own_starts]
        )
        starts = np.array(own_starts, dtype=np.int64)
        positions = expand_ranges(np.zeros_like(lengths), lengths)
        tokens, labels, loss_mask = read_positions(
            self.stream, expand_ranges(starts, np.full_like(starts, layout.seq_length))
        )
        if self.dense:
            dense = [_dense_mask(lengths, mask) for mask in self.masks.masks]
            attention = {"attention_mask": torch.stack(dense)[None]}
        else:
            attention = {"packed_seq_params": document_params(lengths, self.as_one_sequence)}
        return MicroBatch(
            tokens,
            labels,
            loss_mask,
            torch.from_numpy(positions)[None],
            million_pairs=million_pairs(lengths, self.masks),
            **attention,  # type: ignore[arg-type]
        )


def _dense_mask(lengths: Int64s, mask: Mask) -> torch.Tensor:
    """Makes a mask as Megatron's, bool `[tokens, tokens]`, True where a query must not look."""
    return ~document_visibility(lengths.tolist(), mask.window_left)


class PackedIterator(Iterator[MicroBatch]):
    """Yields a split's plain micro-batches, each read one ahead on a thread. Endless.

    Args:
        reader: reader of the micro-batches.
        first_sample: number of samples consumed so far.
        device: device of the model.
        fused_rotary: as for `MicroBatch.to`.
    """

    def __init__(
        self,
        reader: PackedReader,
        first_sample: int,
        device: torch.device,
        fused_rotary: bool = False,
    ) -> None:
        self._device, self._fused_rotary = device, fused_rotary
        step = reader.layout.samples_per_micro_batch
        self._batches = Prefetcher(
            reader.micro_batch(sample) for sample in itertools.count(first_sample, step)
        )
        self._million_pairs, self._taken = 0.0, 0

    def __next__(self) -> MicroBatch:
        micro_batch = next(self._batches)
        self._million_pairs += micro_batch.million_pairs
        self._taken += 1
        return micro_batch.to(self._device, self._fused_rotary)

    def take_figures(self) -> dict[str, float]:
        """Returns figures of the micro-batches since the last call, by their names on boards."""
        found = {PAIRS: self._million_pairs / max(self._taken, 1)}
        self._million_pairs, self._taken = 0.0, 0
        return found

    def close(self) -> None:
        """Ends the thread."""
        self._batches.close()
