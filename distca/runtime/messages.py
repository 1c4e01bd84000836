"""Messages: rows of several tensors, packed into one message for each rank, and unpacked.

Tensors are of two kinds: as many rows of each tensor of a kind travel to a rank. A message holds
its rows of queries, then its rows of keys, and a row of a kind is that row of all its tensors, side
by side. So a row begins after so many rows of either kind: all rows of a tensor are found by one
strided view of the messages, and copied by one operation, however many ranks there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from distca.plan.span import Int64s
from distca.transport import MessageSizes


class ByKind(NamedTuple):
    """Tensors whose rows travel as those of queries do, and those whose rows travel as keys do."""

    q: Sequence[torch.Tensor] = ()
    kv: Sequence[torch.Tensor] = ()

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a row of all tensors of each kind."""
        return _row_bytes(self.q), _row_bytes(self.kv)


@dataclass(frozen=True)
class PeerRows:
    """Rows of one kind between this rank and the others, sorted by the other.

    Attributes:
        counts: rows of each other rank, int64 `[ranks]`.
        before: rows that lower ranks than this one have with each rank, int64 `[ranks]`.
        place: for each row, the number of rows of its kind before it in all messages, and of the
            other kind: two int64 `[rows]`.
    """

    counts: Int64s
    before: Int64s
    place: tuple[torch.Tensor, torch.Tensor]


def peer_rows(
    q_counts: Int64s, q_before: Int64s, kv_counts: Int64s, kv_before: Int64s
) -> tuple[PeerRows, PeerRows]:
    """Works out where the rows of queries and those of keys lie in messages.

    Args:
        q_counts: rows of queries in the message of each rank.
        q_before: rows of queries that lower ranks than this one have with each rank.
        kv_counts: rows of keys, likewise.
        kv_before: rows of keys, likewise.
    """
    # A message's keys come after its queries.
    among_q = np.repeat(np.cumsum(kv_counts) - kv_counts, q_counts)
    among_kv = np.repeat(np.cumsum(q_counts), kv_counts)
    return (
        PeerRows(q_counts, q_before, _place(among_q)),
        PeerRows(kv_counts, kv_before, _place(among_kv)),
    )


def _place(others: Int64s) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(len(others)), torch.from_numpy(others)


def message_sizes(
    send: tuple[PeerRows, PeerRows], receive: tuple[PeerRows, PeerRows], row_bytes: tuple[int, int]
) -> MessageSizes:
    """Sizes of the messages in which a row of queries, and one of keys, takes so many bytes.

    Args:
        send: rows of each kind that this rank sends.
        receive: rows of each kind that this rank receives.
        row_bytes: bytes of a row of each kind; 0: none travel.
    """

    def total(q: Int64s, kv: Int64s) -> tuple[int, ...]:
        return tuple((q * row_bytes[0] + kv * row_bytes[1]).tolist())

    return MessageSizes(
        send=total(send[0].counts, send[1].counts),
        receive=total(receive[0].counts, receive[1].counts),
        put_at=total(send[0].before, send[1].before),
    )


def pack(into: torch.Tensor, rows: tuple[PeerRows, PeerRows], tensors: ByKind) -> None:
    """Writes the messages to rank 0, 1, ...

    Args:
        into: memory of the messages, uint8 `[bytes of all]`.
        rows: rows of each kind.
        tensors: contiguous tensors with the rows, sorted by destination.
    """
    for view, place, words in _views(into, rows, tensors):
        if place is None:
            view.copy_(words)
        else:
            # Elements of the view overlap, but no two rows do. (`--deterministic-mode`, in which
            # torch would copy the whole view, is refused.)
            view.index_put_(place, words)


def unpack(buffer: torch.Tensor, rows: tuple[PeerRows, PeerRows], tensors: ByKind) -> None:
    """Copies received messages into tensors: the inverse of `pack`.

    Args:
        buffer: messages from rank 0, 1, ..., concatenated: uint8.
        rows: rows of each kind.
        tensors: contiguous tensors for the rows, sorted by source.
    """
    for view, place, words in _views(buffer, rows, tensors):
        if place is None:
            words.copy_(view)
        else:
            torch.ops.aten.index.Tensor_out(view, place, out=words)


def _views(
    messages: torch.Tensor, rows: tuple[PeerRows, PeerRows], tensors: ByKind
) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None, torch.Tensor]]:
    """Finds each tensor's rows in the messages.

    Yields a view of the messages, the indices of the rows in it (None: all, in order), and the
    tensor as a matrix of the view's elements.
    """
    word = _word([*tensors.q, *tensors.kv])
    messages = messages.view(word)
    sizes = [nbytes // word.itemsize for nbytes in tensors.row_bytes]
    for kind, of_kind in enumerate(tensors):
        size, other_size = sizes[kind], sizes[1 - kind]
        place = rows[kind].place
        number, others = len(place[0]), len(rows[1 - kind].place[0])
        column = 0
        for tensor in of_kind:
            width = _row_bytes([tensor]) // word.itemsize
            words = tensor.view(number, width * word.itemsize // tensor.itemsize).view(word)
            begin = messages[column:]
            if other_size:
                shape, strides = (number, others + 1, width), (size, other_size, 1)
                yield begin.as_strided(shape, strides), place, words
            else:
                yield begin.as_strided((number, width), (size, 1)), None, words
            column += width


def _row_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(math.prod(each.shape[1:]) * each.itemsize for each in tensors)


_WORDS = (torch.complex128, torch.complex64, torch.int32, torch.uint8)


def _word(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The widest type that divides the rows of all tensors: a thread of a GPU copies one."""
    divisor = math.gcd(*(_row_bytes([each]) for each in tensors))
    return next(word for word in _WORDS if divisor % word.itemsize == 0)
