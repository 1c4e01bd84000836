"""Micro-batches of packed documents, as plain Megatron trains them.

The token stream of a split (see `stream.py`) is cut into *windows* of data-parallel size times
`--seq-length` tokens; a micro-batch is `--micro-batch-size` windows, of each of which every
data-parallel rank owns `--seq-length` tokens. Sample `i` of Megatron's counting is the tokens
`[i * seq_length, (i + 1) * seq_length)` of the stream, so that consumed samples say where a run
resumes, whatever its number of ranks.

Without `--distca` a rank's documents end where its tokens end. With it (`planned.py`) the
documents of a window span its ranks, and which tokens of a micro-batch a rank owns is for the
scheduler to say, as is which micro-batch of a global batch a document is in; the loss is a sum over
all targets of the global batch, so it depends on neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from distca.attention.reference import document_visibility
from distca.plan import Mask
from distca.plan.span import Int64s, expand_ranges
from distca.runtime import Prefetcher
from megatron_patches.batches.stream import TokenStream
from megatron_patches.model.core_attention import DocumentParams


@dataclass(frozen=True)
class WindowLayout:
    """Division of the token stream into samples and windows, and of windows among ranks.

    Attributes:
        data_parallel_rank: number of this rank's part in every window.
        data_parallel_size: ranks that share a window.
        seq_length: tokens of a window that each rank owns.
        micro_batch_size: windows in a micro-batch.
    """

    data_parallel_rank: int
    data_parallel_size: int
    seq_length: int
    micro_batch_size: int

    @property
    def window_tokens(self) -> int:
        return self.data_parallel_size * self.seq_length

    @property
    def samples_per_micro_batch(self) -> int:
        return self.data_parallel_size * self.micro_batch_size

    def windows(self, first_sample: int, chain: int = 1) -> list[tuple[int, int]]:
        """Stream positions of the windows of the micro-batch that starts at a sample.

        Args:
            first_sample: sample at which the micro-batch starts.
            chain: number of micro-batches that share documents, whose windows are longer.
        """
        start, tokens = first_sample * self.seq_length, chain * self.window_tokens
        return [
            (start + n * tokens, start + (n + 1) * tokens) for n in range(self.micro_batch_size)
        ]


@dataclass(frozen=True)
class MicroBatch:
    """This rank's tokens of one micro-batch; `tokens = micro_batch_size * seq_length`.

    Attributes:
        tokens: int64 `[1, tokens]`.
        labels: int64 `[1, tokens]`, the next token of the same document.
        loss_mask: float32 `[1, tokens]`, weights of labels, 0 where a document has no next token.
        position_ids: int64 `[1, tokens]`, positions in the document.
        packed_seq_params: description of the documents; None with a dense mask.
        attention_mask: bool `[1, masks, tokens, tokens]`, True where a query must not look; or
            None.
        report: figures for the log line, by name.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    packed_seq_params: DocumentParams | None = None
    attention_mask: torch.Tensor | None = None
    report: dict[str, float] = field(default_factory=dict)

    def to(self, device: torch.device, fused_rotary: bool = False) -> MicroBatch:
        """Returns the micro-batch on another device.

        Args:
            device: device of the model.
            fused_rotary: whether a fused kernel applies rotary embedding; otherwise megatron-core
                reads the bounds of the sequences on the host.
        """
        if device.type == "cpu":
            return self

        def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else place(tensor, device)

        params = self.packed_seq_params
        if params is not None:
            params = _moved(params, move, fused_rotary)
            if params.nano_batches is not None:
                ping, pong = (_moved(each, move, fused_rotary) for each in params.nano_batches)
                params = replace(params, nano_batches=(ping, pong))
        return replace(
            self,
            tokens=place(self.tokens, device),
            labels=place(self.labels, device),
            loss_mask=place(self.loss_mask, device),
            position_ids=place(self.position_ids, device),
            attention_mask=move(self.attention_mask),
            packed_seq_params=params,
        )


def place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor of the CPU on another device, without waiting for what runs there."""
    # Only pinned memory is copied without a wait for all that the GPU was given before.
    source = tensor.pin_memory() if device.type == "cuda" else tensor
    return source.to(device, non_blocking=True)


def _moved(
    params: DocumentParams,
    move: Callable[[torch.Tensor | None], torch.Tensor | None],
    fused_rotary: bool,
) -> DocumentParams:
    """Returns parameters whose index tensors `move` has moved, but what is read on the host."""
    nano_batch = params.nano_batch
    if nano_batch is not None:
        nano_batch = replace(nano_batch, borrowed_rows=move(nano_batch.borrowed_rows))
    chain_part = params.chain_part
    if chain_part is not None:
        chain_part = replace(chain_part, lent_rows=move(chain_part.lent_rows))
    moved = replace(
        params,
        cu_seqlens_q=move(params.cu_seqlens_q),
        cu_seqlens_kv=move(params.cu_seqlens_kv),
        nano_batch=nano_batch,
        chain_part=chain_part,
    )
    if not fused_rotary:
        # Rotary embedding alone reads these, on the host: six waits a layer if they were elsewhere.
        return moved
    return replace(
        moved,
        cu_seqlens_q_padded=move(params.cu_seqlens_q_padded),
        cu_seqlens_kv_padded=move(params.cu_seqlens_kv_padded),
    )


def read_positions(
    stream: TokenStream, positions: Int64s
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reads tokens, labels and loss mask at positions of the stream, each `[1, len(positions)]`.

    Each contiguous run of positions is one read.
    """
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    columns = [
        stream.read(int(run[0]), int(run[-1]) + 1)
        for run in np.split(positions, breaks)
        if len(run)
    ]
    tokens, labels, loss_mask = (
        torch.from_numpy(np.concatenate(column))[None] for column in zip(*columns, strict=True)
    )
    return tokens, labels, loss_mask


@dataclass(frozen=True)
class PackedBatches:
    """Plain micro-batches, in which each rank attends within its own tokens.

    Attributes:
        stream: token stream of the split.
        layout: windows and ranks.
        masks: masks that layers have.
        dense: whether micro-batches have a dense attention mask rather than `packed_seq_params`.
        token_positions: whether rotary angles are looked up token by token (`model/rotary.py`);
            off where Megatron numbers the packed documents itself.
    """

    stream: TokenStream
    layout: WindowLayout
    masks: tuple[Mask, ...]
    dense: bool
    token_positions: bool

    def __call__(self, first_sample: int) -> MicroBatch:
        """Makes the micro-batch that starts at a sample."""
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
            attention = {
                "attention_mask": torch.stack([dense_mask(lengths, m) for m in self.masks])[None]
            }
        else:
            attention = {"packed_seq_params": document_params(lengths, self.token_positions)}
        return MicroBatch(
            tokens,
            labels,
            loss_mask,
            torch.from_numpy(positions)[None],
            **attention,  # type: ignore[arg-type]
        )


def document_params(lengths: Int64s, token_positions: bool) -> DocumentParams:
    """Describes the documents of this rank's tokens to Megatron's layers."""
    ends = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends[1:])
    cu_seqlens = torch.from_numpy(ends)
    total = int(ends[-1])
    params = DocumentParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=int(lengths.max()),
        max_seqlen_kv=int(lengths.max()),
        documents_cu_seqlens=cu_seqlens,
    )
    if token_positions:
        # Describes one sequence to rotary embedding, which looks angles up token by token.
        whole = torch.tensor([0, total], dtype=torch.int32)
        params = replace(
            params,
            cu_seqlens_q_padded=whole,
            cu_seqlens_kv_padded=whole,
            max_seqlen_q=total,
            max_seqlen_kv=total,
        )
    return params


def dense_mask(lengths: Int64s, mask: Mask) -> torch.Tensor:
    """Makes a mask as Megatron's, bool `[tokens, tokens]`, True where a query must not look."""
    return ~document_visibility(lengths.tolist(), mask.window_left)


class MicroBatches:
    """An endless iterator over a split's plain micro-batches, each made one ahead on a thread.

    Args:
        make: function that makes the micro-batch that starts at a sample.
        first_sample: number of samples consumed so far.
        samples_per_micro_batch: number of samples by which each micro-batch advances.
        device: device of the model.
        fused_rotary: as for `MicroBatch.to`.
    """

    def __init__(
        self,
        make: PackedBatches,
        first_sample: int,
        samples_per_micro_batch: int,
        device: torch.device,
        fused_rotary: bool = False,
    ) -> None:
        self._device, self._fused_rotary = device, fused_rotary
        self._batches = Prefetcher(
            make(sample) for sample in itertools.count(first_sample, samples_per_micro_batch)
        )

    def __iter__(self) -> MicroBatches:
        return self

    def __next__(self) -> MicroBatch:
        return next(self._batches).to(self._device, self._fused_rotary)

    def close(self) -> None:
        """Ends the thread."""
        self._batches.close()
