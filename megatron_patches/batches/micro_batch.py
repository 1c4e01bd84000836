"""A rank's tokens of one micro-batch, the model on them, and their loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.utils import StragglerDetector

from distca.plan import LayerMasks
from distca.plan.span import Int64s
from distca.schedule import DocumentTrees
from distca.schedule.base import document_loads
from distca.schedule.training.planned_batch import PADDING
from megatron_patches.batches.stream import TokenStream
from megatron_patches.model.core_attention import DocumentParams

PAIRS = "million pairs of a micro-batch"
"""Name in logs of the visible pairs of a layer, in the mean micro-batch of a rank."""

_ALMOST_NONE = 1e-30
"""Epsilon that stands for the targets of a micro-batch without any."""


def million_pairs(lengths: Int64s, masks: LayerMasks, trees: DocumentTrees | None = None) -> float:
    """Returns the visible pairs of documents in the mean layer, in millions.

    Args:
        lengths: tokens of each document.
        masks: masks of the layers.
        trees: nodes of the documents; None: all have one.
    """
    prefix = None if trees is None else trees.prefix
    of_paths = lengths if trees is None else trees.lengths
    masks = masks.of_all_stages
    counts = dict(zip(masks.masks, masks.counts(), strict=True))
    pairs = sum(
        count * float(document_loads(of_paths, mask, None, prefix).sum())
        for mask, count in counts.items()
    )
    return pairs / sum(counts.values()) / 1e6


_STRAGGLERS = StragglerDetector()
"""Megatron-LM's detector of stragglers, one for a process, made before its loop turns it on."""


@dataclass(frozen=True)
class MicroBatch:
    """This rank's tokens of one micro-batch.

    `tokens` is `micro_batch_size * seq_length`, but where a scheduler gives ranks unequal numbers.

    Attributes:
        tokens: int64 `[1, tokens]`.
        labels: int64 `[1, tokens]`, the next token of the same document.
        loss_mask: float32 `[1, tokens]`, weights of labels, 0 where a document has no next token.
        position_ids: int64 `[1, tokens]`, positions in the document.
        packed_seq_params: description of the documents; None with a dense mask.
        attention_mask: bool `[1, masks, tokens, tokens]`, True where a query must not look; or
            None.
        targets: targets in the loss, where conversations share tokens; None: labels whose weight is
            not 0.
        million_pairs: visible pairs of this rank's documents in the mean layer, in millions; 0
            where they are counted for a whole global batch.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    packed_seq_params: DocumentParams | None = None
    attention_mask: torch.Tensor | None = None
    million_pairs: float = 0.0
    targets: int | None = None

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
            if params.next_tokens is not None:
                moved = params.next_tokens.to(partial(place, device=device))
                params = replace(params, next_tokens=moved)
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
    """Moves index tensors to the device; those that the host reads stay."""
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


_PADDING = (np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.float32))
"""A token, label and loss mask of padding."""


def read_positions(
    stream: TokenStream, positions: Int64s
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reads tokens, labels and loss mask at positions of the stream, each `[1, len(positions)]`.

    Each contiguous run of positions is one read. At positions that are `PADDING` there are zeros,
    which have no loss.
    """
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    columns = [
        stream.read(int(run[0]), int(run[-1]) + 1) if run[0] != PADDING else _PADDING
        for run in np.split(positions, breaks)
        if len(run)
    ]
    tokens, labels, loss_mask = (
        torch.from_numpy(np.concatenate(column))[None] for column in zip(*columns, strict=True)
    )
    return tokens, labels, loss_mask


def document_params(lengths: Int64s, as_one_sequence: bool) -> DocumentParams:
    """Describes the documents of this rank's tokens to Megatron's layers.

    Args:
        lengths: tokens of each document, int64 `[documents]`.
        as_one_sequence: whether rotary embedding is given one sequence of all tokens, since it
            looks angles up token by token; otherwise it numbers each document's tokens from 0.
    """
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
    if as_one_sequence:
        whole = torch.tensor([0, total], dtype=torch.int32)
        params = replace(
            params,
            cu_seqlens_q_padded=whole,
            cu_seqlens_kv_padded=whole,
            max_seqlen_q=total,
            max_seqlen_kv=total,
        )
    return params


def forward_step(data_iterator: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
    """Runs the model on the next micro-batch, as Megatron's `forward_step_func`.

    Returns:
        The model's output and a function from it to `(loss, tokens, report)`: the loss summed over
        this micro-batch's targets, weighted, the number of those that count, and the `[sum, count]`
        pair for the log line.
    """
    with _STRAGGLERS(bdata=True):
        batch = next(data_iterator)
    with _own_work(batch.packed_seq_params):
        output = model(
            batch.tokens,
            batch.position_ids,
            batch.attention_mask,
            labels=batch.labels,
            loss_mask=batch.loss_mask,
            packed_seq_params=batch.packed_seq_params,
        )
    return output, partial(sum_loss, batch)


@contextmanager
def _own_work(params: DocumentParams | None) -> Iterator[None]:
    """Times a forward pass for `--log-straggler`, without the waits for other ranks.

    In those a rank that is fast would look as slow as the slowest one.

    Args:
        params: description of the micro-batch's documents, or None.
    """
    run = None if params is None else params.run
    waits: AbstractContextManager[None] = nullcontext()
    if run is not None:
        waits = run.core_attention.times.around_waits(_not_timed)
    with waits, _STRAGGLERS(bdata=False):
        yield


@contextmanager
def _not_timed() -> Iterator[None]:
    _STRAGGLERS.stop()
    yield
    _STRAGGLERS.start()


def sum_loss(
    batch: MicroBatch, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sums the loss over the micro-batch's targets; see `forward_step`."""
    loss = torch.sum(losses.view(-1).float() * batch.loss_mask.view(-1))
    if batch.targets is None:
        targets = torch.count_nonzero(batch.loss_mask).float()
    else:
        targets = torch.full((), float(batch.targets), device=batch.loss_mask.device)
    # Where no target of a global batch counts, the loss that loops log is 0 rather than 0/0.
    report = {"lm loss": torch.stack([loss.detach().clone(), targets.clamp(min=_ALMOST_NONE)])}
    return loss, targets.to(torch.int), report
