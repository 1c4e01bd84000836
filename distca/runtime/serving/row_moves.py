"""Keys and values that move from rank to rank between steps, layer by layer, from pool to pool.

The rows of a layer travel while those of the layer before are written. A row on its way is its key
and its value, each padded as in every message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from distca.cost.memory import CoreAttentionMemory
from distca.cost.step_memory import STEP_SLOTS
from distca.cost.volume import AttentionShape
from distca.plan.span import Int64s, expand_ranges
from distca.runtime.core_attention import CoreAttention
from distca.runtime.exchange import map_indices
from distca.runtime.serving.kv_pool import KVCache
from distca.schedule.serving.restripe import Restripe
from distca.transport import Channel, MessageSizes, Pending

PHASE = "restripe"
"""Name under which transports count these bytes."""


@dataclass(frozen=True)
class RowMoves:
    """One rank's part of rows that move; the same in all layers.

    Attributes:
        sent: slots of the rows that it sends, sorted by destination, then position; int64.
        received: slots for the rows that it receives, sorted by source, then position.
        kept: slots of rows that stay on this rank, and lie elsewhere afterwards.
        kept_at: slots where these lie then.
        sizes: messages of a layer.
        room: bytes of the most that any rank sends, and receives, for a layer.
        row_bytes: bytes of a row on its way.
    """

    sent: torch.Tensor
    received: torch.Tensor
    kept: torch.Tensor
    kept_at: torch.Tensor
    sizes: MessageSizes
    room: tuple[int, int]
    row_bytes: int

    def map_indices(self, function: Callable[[torch.Tensor], torch.Tensor]) -> RowMoves:
        """Replaces every tensor of slots by its image."""
        return map_indices(self, function)


def build_row_moves(
    move: Restripe, rank: int, shape: AttentionShape, before: Int64s, after: Int64s
) -> RowMoves:
    """Works out one rank's part.

    Args:
        move: who holds which rows before and after.
        rank: this rank.
        shape: heads of a layer on this rank.
        before: slot of each row that it holds before, in the order of sequences and positions.
        after: slot of each row that it holds after, likewise.
    """
    segments, placed = move.segments, move.after
    starts = move.offsets[placed.document] + placed.start
    order = np.argsort(starts)
    out = segments.select((segments.owner == rank) & (segments.server != rank))
    here = segments.select(segments.server == rank)
    piece = order[np.searchsorted(starts[order], here.start, side="right") - 1]
    first = placed.first_rows()[piece] + here.start - starts[piece]
    arrives = np.repeat(here.owner != rank, here.lengths)
    to, source = (expand_ranges(rows, here.lengths) for rows in (first, here.owner_row))
    kept, kept_at = before[source[~arrives]], after[to[~arrives]]
    shifted = kept != kept_at
    messages = move.messages(shape)
    sizes = messages.matrix()
    columns = sizes[rank], sizes[:, rank], sizes[:rank].sum(axis=0)
    return RowMoves(
        sent=torch.from_numpy(before[expand_ranges(out.owner_row, out.lengths)]),
        received=torch.from_numpy(after[to[arrives]]),
        kept=torch.from_numpy(kept[shifted]),
        kept_at=torch.from_numpy(kept_at[shifted]),
        sizes=MessageSizes(*(tuple(column.tolist()) for column in columns)),
        room=(int(messages.sent().max()), int(messages.received().max())),
        row_bytes=shape.kv_row_bytes,
    )


def move_rows(core: CoreAttention, pool: KVCache, moves: RowMoves) -> None:
    """Moves rows of all layers. Collective.

    Args:
        core: transport and buffers.
        pool: this rank's keys and values.
        moves: this rank's part.
    """
    core.reserve(CoreAttentionMemory(*moves.room))
    under_way: Pending | None = None
    layers = len(pool.keys)
    for layer in range(layers + 1):
        started = _send(core, pool, moves, layer) if layer < layers else None
        if under_way is not None:
            _receive(pool, moves, layer - 1, under_way)
        under_way = started


def _send(core: CoreAttention, pool: KVCache, moves: RowMoves, layer: int) -> Pending:
    """Starts a layer's exchange, and moves what stays on this rank."""
    channel = Channel("dispatch", layer % STEP_SLOTS)
    rows = _rows(core.transport.staging(channel, moves.sizes.sent), pool, moves)
    for number, memory in enumerate(pool.rows(layer)):
        rows[:, number] = memory[moves.sent]
    started = core.transport.start(PHASE, channel, moves.sizes)
    for memory in pool.rows(layer):
        memory[moves.kept_at] = memory[moves.kept]
    return started


def _receive(pool: KVCache, moves: RowMoves, layer: int, pending: Pending) -> None:
    """Writes the rows of a layer that arrive."""
    rows = _rows(pending.wait(), pool, moves)
    for number, memory in enumerate(pool.rows(layer)):
        memory[moves.received] = rows[:, number]
    pending.release()


def _rows(messages: torch.Tensor, pool: KVCache, moves: RowMoves) -> torch.Tensor:
    """Returns the rows of messages, `[rows, 2, kv_heads, head_dim]`: keys and values, without
    padding."""
    keys = pool.keys
    width = moves.row_bytes // 2 // keys.element_size()
    rows = messages.view(keys.dtype).view(-1, 2, width)
    heads, dim = keys.shape[3:]
    return rows[..., : heads * dim].view(len(rows), 2, heads, dim)
