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
    def row_types(self) -> RowTypes:
        """Shape and dtype of a row of each tensor of each kind."""
        q, kv = (tuple((each.shape[1:], each.dtype) for each in kind) for kind in self)
        return q, kv


RowTypes = tuple[tuple[tuple[torch.Size, torch.dtype], ...], ...]
"""Shape and dtype of a row of each tensor, by kind: queries, keys."""


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


class TensorInMessages(NamedTuple):
    """The rows of a tensor in messages, all as matrices of words.

    Attributes:
        begin: word at which the view of the messages begins.
        shape: shape of the view.
        strides: strides of the view, in words.
        place: indices of the rows in the view; None: all, in order.
        width: words of a row.
    """

    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    place: tuple[torch.Tensor, torch.Tensor] | None
    width: int


@dataclass(frozen=True)
class MessageLayout:
    """Where the rows of tensors lie in the messages of one exchange. All layers have the same.

    Attributes:
        sizes: sizes of the messages.
        word: type by which rows are copied.
        send: rows of each tensor in the messages that this rank sends.
        receive: rows of each tensor in the messages that this rank receives.
    """

    sizes: MessageSizes
    word: torch.dtype
    send: tuple[TensorInMessages, ...]
    receive: tuple[TensorInMessages, ...]


def message_layout(
    send: tuple[PeerRows, PeerRows], receive: tuple[PeerRows, PeerRows], types: RowTypes
) -> MessageLayout:
    """Lays out messages.

    Args:
        send: rows of queries, and of keys, that this rank sends.
        receive: rows that it receives, likewise.
        types: rows of the tensors that travel.
    """
    nbytes = [[shape.numel() * dtype.itemsize for shape, dtype in kind] for kind in types]
    q_bytes, kv_bytes = (sum(kind) for kind in nbytes)

    def total(q: Int64s, kv: Int64s) -> tuple[int, ...]:
        return tuple((q * q_bytes + kv * kv_bytes).tolist())

    sizes = MessageSizes(
        send=total(send[0].counts, send[1].counts),
        receive=total(receive[0].counts, receive[1].counts),
        put_at=total(send[0].before, send[1].before),
    )
    divisor = math.gcd(*nbytes[0], *nbytes[1])
    word = next(word for word in _WORDS if divisor % word.itemsize == 0)
    widths = [[each // word.itemsize for each in kind] for kind in nbytes]
    return MessageLayout(sizes, word, tuple(_find(send, widths)), tuple(_find(receive, widths)))


_WORDS = (torch.complex128, torch.complex64, torch.int32, torch.uint8)
"""Types by which rows are copied, the widest first: a thread of a GPU copies one word."""


def _find(
    rows: tuple[PeerRows, PeerRows], widths: Sequence[Sequence[int]]
) -> Iterator[TensorInMessages]:
    for kind, of_kind in enumerate(widths):
        size, other_size = sum(of_kind), sum(widths[1 - kind])
        place = rows[kind].place
        number, others = (each.place[0].shape[0] for each in (rows[kind], rows[1 - kind]))
        begin = 0
        for width in of_kind:
            if other_size:
                shape, strides = (number, others + 1, width), (size, other_size, 1)
                yield TensorInMessages(begin, shape, strides, place, width)
            else:
                yield TensorInMessages(begin, (number, width), (size, 1), None, width)
            begin += width


def pack(into: torch.Tensor, layout: MessageLayout, tensors: Sequence[torch.Tensor]) -> None:
    """Writes the messages to rank 0, 1, ...

    Args:
        into: memory of the messages, uint8 `[bytes of all]`.
        layout: layout of the messages.
        tensors: contiguous tensors with the rows, sorted by destination; those of queries first.
    """
    into = into.view(layout.word)
    for found, tensor in zip(layout.send, tensors, strict=True):
        view, words = _words(into, found, tensor)
        if found.place is None:
            view.copy_(words)
        else:
            # Elements of the view overlap, but no two rows do. (`--deterministic-mode`, in which
            # torch would copy the whole view, is refused.)
            view.index_put_(found.place, words)


def unpack(buffer: torch.Tensor, layout: MessageLayout, tensors: Sequence[torch.Tensor]) -> None:
    """Copies received messages into tensors: the inverse of `pack`.

    Args:
        buffer: messages from rank 0, 1, ..., concatenated: uint8.
        layout: layout of the messages.
        tensors: contiguous tensors for the rows, sorted by source; those of queries first.
    """
    buffer = buffer.view(layout.word)
    for found, tensor in zip(layout.receive, tensors, strict=True):
        view, words = _words(buffer, found, tensor)
        if found.place is None:
            words.copy_(view)
        else:
            torch.ops.aten.index.Tensor_out(view, found.place, out=words)


def _words(
    messages: torch.Tensor, found: TensorInMessages, tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The view of the messages in which a tensor's rows lie, and the tensor in the same words."""
    begin = messages.storage_offset() + found.begin
    view = messages.as_strided(found.shape, found.strides, begin)
    columns = found.width * messages.itemsize // tensor.itemsize
    return view, tensor.view(found.shape[0], columns).view(messages.dtype)
