"""Messages: rows of several tensors, packed into one message for each rank, and unpacked.

Tensors are of two kinds, those with a row for each query and those with a row for each key. A rank
gets equally many rows of all tensors of a kind. A message holds the rows of queries, and then those
of keys. A packed row of a kind is that row of all its tensors, side by side, each at a multiple of
16 bytes. One strided view of the messages therefore finds all rows of a kind, and one operation
copies them, however many ranks and tensors there are. That operation needs the rows in one piece of
memory. Where a rank's messages have rows of one kind alone, or many rows for each of a few peers,
they are written and read in the messages themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from distca.attention.fused.jobs import Before, RowMemory
from distca.cost.volume import in_pieces, padded
from distca.plan.span import Int64s
from distca.runtime.workspace import Workspace, contiguous_strides
from distca.transport import MessageSizes

WORD = torch.complex128
"""Type by which rows are copied, the widest: a thread of a GPU copies one word."""


def as_numbers(words: torch.Tensor) -> torch.Tensor:
    """Views words `[rows, words]` as float64 `[rows, words, 2]`, which kernels can copy."""
    return torch.view_as_real(words)


class QAndKV(NamedTuple):
    """Tensors with a row for each query, and tensors with a row for each key."""

    q: Sequence[torch.Tensor] = ()
    kv: Sequence[torch.Tensor] = ()

    @property
    def row_types(self) -> RowTypes:
        """Shape and dtype of a row of each tensor of each kind."""
        return row_types(self.q), row_types(self.kv)


def row_types(tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """Returns shape and dtype of a row of each tensor."""
    return tuple((each.shape[1:], each.dtype) for each in tensors)


RowTypes = tuple[tuple[tuple[torch.Size, torch.dtype], ...], ...]
"""Shape and dtype of a row of each tensor, by kind: queries, keys."""


@dataclass(frozen=True)
class PeerRows:
    """Rows of one kind between this rank and the others, sorted by the other.

    Attributes:
        counts: rows of each other rank, int64 `[ranks]`.
        before: rows that lower ranks than this one have with each rank, int64 `[ranks]`.
        place: for each row, how many rows of its own kind and of the other kind lie before it in
            the messages: two int64 `[rows]`.
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


@dataclass(frozen=True)
class RowFormat:
    """Places of several tensors' rows in a packed row.

    Attributes:
        types: shape and dtype of a row of each tensor.
        begins: byte at which each tensor's row begins.
        strides: strides of each tensor within a row.
        words: words of a packed row.
    """

    types: tuple[tuple[torch.Size, torch.dtype], ...]
    begins: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    words: int

    @staticmethod
    def of(types: tuple[tuple[torch.Size, torch.dtype], ...]) -> RowFormat:
        """Puts rows side by side, each at a multiple of 16 bytes."""
        sizes = [padded(shape.numel() * dtype.itemsize) for shape, dtype in types]
        begins = tuple(sum(sizes[:number]) for number in range(len(sizes)))
        strides = tuple(contiguous_strides(shape) for shape, _ in types)
        return RowFormat(types, begins, strides, sum(sizes) // WORD.itemsize)

    def tensors(
        self, words: torch.Tensor, memory: Callable[[torch.dtype], torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Returns the tensors in packed rows `[rows, words]`, which may lie apart: views.

        `memory` gives the memory in which the words lie as elements of a dtype, if that is known.
        """
        rows, row, at = words.shape[0], words.stride(0), int(words.storage_offset())
        elements, found = {}, []
        for (shape, dtype), begin, strides in zip(
            self.types, self.begins, self.strides, strict=True
        ):
            if dtype not in elements:
                elements[dtype] = (memory or words.view)(dtype)
            factor, first = WORD.itemsize // dtype.itemsize, begin // dtype.itemsize
            found.append(
                elements[dtype].as_strided(
                    (rows, *shape), (row * factor, *strides), at * factor + first
                )
            )
        return found


@dataclass(frozen=True)
class PackedRows:
    """Rows of several tensors side by side.

    Attributes:
        words: packed rows, `[rows, words]`.
        format: what a packed row holds.
        tensors: views of each tensor.
    """

    words: torch.Tensor
    format: RowFormat
    tensors: list[torch.Tensor]

    @staticmethod
    def at(words: torch.Tensor, of: RowFormat) -> PackedRows:
        """Returns the rows in memory that is there."""
        return PackedRows(words, of, of.tensors(words))

    @staticmethod
    def take(workspace: Workspace, of: RowFormat, rows: int) -> PackedRows:
        """Takes memory for rows."""
        words = workspace.take((rows, of.words), WORD)
        return PackedRows(words, of, of.tensors(words, workspace.elements))

    def gather(self, rows: torch.Tensor, scratch: Workspace) -> PackedRows:
        """Copies the rows at int64 indices `[n]`."""
        found = PackedRows.take(scratch, self.format, rows.shape[0])
        torch.index_select(self.words, 0, rows, out=found.words)
        return found


@dataclass(frozen=True)
class KindLayout:
    """The rows of a kind in the messages that a rank sends or receives.

    Attributes:
        rows: number of rows.
        strides: words from a row of this kind to the next, and for each row of the other kind.
        place: indices of the rows among rows of this kind and among rows of the other; None: all,
            in order, since there are none of the other.
        others: rows of the other kind.
        pieces: rows that follow each other, and word at which they begin; none if they are many.
        format: what a row holds.
    """

    rows: int
    strides: tuple[int, int]
    place: tuple[torch.Tensor, torch.Tensor] | None
    others: int
    pieces: tuple[tuple[slice, int], ...]
    format: RowFormat

    def in_place(self, messages: torch.Tensor) -> torch.Tensor:
        """Returns all rows, `[rows, words]`, where there are none of the other kind."""
        assert self.place is None
        ((_, rows),) = self.views(messages)
        return rows

    def views(self, messages: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Each piece's rows, and they in messages: `[rows, words]`."""
        strides, begin = (max(self.strides[0], 1), 1), int(messages.storage_offset())
        for rows, at in self.pieces:
            size = rows.stop - rows.start, self.format.words
            yield rows, messages.as_strided(size, strides, begin + at)

    def memories(self, messages: torch.Tensor) -> list[RowMemory]:
        """Memory of each tensor's rows in messages, for fused kernels."""
        return [self._among(each) for each in self.format.tensors(self._rows(messages))]

    def memory(self, messages: torch.Tensor) -> RowMemory:
        """Memory of whole rows in messages, as numbers, for fused kernels."""
        return self._among(as_numbers(self._rows(messages)))

    def _rows(self, messages: torch.Tensor) -> torch.Tensor:
        """Rows as they would lie without those of the other kind, `[rows, words]`."""
        return messages.as_strided((self.rows, self.format.words), (max(self.strides[0], 1), 1))

    def _among(self, rows: torch.Tensor) -> RowMemory:
        if self.place is None:
            return RowMemory(rows)
        stride = self.strides[1] * WORD.itemsize // rows.itemsize
        return RowMemory(rows, Before(self.place[1], stride))

    def put(self, messages: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes packed rows, where there are rows of the other kind, too."""
        # Elements of the view overlap, but no two rows do. (`--deterministic-mode`, in which torch
        # would copy the whole view, is refused.)
        self._view(messages, self.format.words).index_put_(self.place, rows)

    def take(self, messages: torch.Tensor, into: torch.Tensor) -> None:
        """Reads packed rows, `[rows, words]`."""
        if self.place is None:
            into.copy_(self.in_place(messages))
        else:
            # At once, without a copy on the way, however many pieces there are.
            view = self._view(messages, self.format.words)
            torch.ops.aten.index.Tensor_out(view, self.place, out=into)

    def take_apart(self, messages: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
        """Reads each tensor's rows to a contiguous tensor."""
        if self.place is None:
            for found, tensor in zip(
                self.format.tensors(self.in_place(messages)), into, strict=True
            ):
                tensor.copy_(found)
            return
        for tensor, begin in zip(into, self.format.begins, strict=True):
            nbytes = math.prod(tensor.shape[1:]) * tensor.itemsize
            word = next(each for each in _WORDS if nbytes % each.itemsize == 0)
            view = self._view(messages.view(word), nbytes // word.itemsize, begin)
            rows = tensor.view(self.rows, -1).view(word)
            torch.ops.aten.index.Tensor_out(view, self.place, out=rows)

    def _view(self, messages: torch.Tensor, width: int, begin: int = 0) -> torch.Tensor:
        words = WORD.itemsize // messages.itemsize
        strides = self.strides[0] * words, self.strides[1] * words, 1
        at = int(messages.storage_offset()) + begin // messages.itemsize
        return messages.as_strided((self.rows, self.others + 1, width), strides, at)


_WORDS = (torch.complex128, torch.complex64, torch.int32, torch.uint8)
"""Types by which a tensor's rows are copied, the widest first."""


@dataclass(frozen=True)
class MessageLayout:
    """Where the rows of tensors lie in the messages of one exchange. All layers have the same.

    Attributes:
        sizes: sizes of the messages.
        send: rows of queries, and of keys, in the messages that this rank sends.
        receive: those in the messages that this rank receives.
    """

    sizes: MessageSizes
    send: tuple[KindLayout, ...]
    receive: tuple[KindLayout, ...]


def message_layout(
    send: tuple[PeerRows, PeerRows], receive: tuple[PeerRows, PeerRows], types: RowTypes
) -> MessageLayout:
    """Lays out messages.

    Args:
        send: rows of queries, and of keys, that this rank sends.
        receive: rows that it receives, likewise.
        types: rows of the tensors that travel.
    """
    formats = [RowFormat.of(kind) for kind in types]
    q_bytes, kv_bytes = (each.words * WORD.itemsize for each in formats)

    def total(q: Int64s, kv: Int64s) -> tuple[int, ...]:
        return tuple((q * q_bytes + kv * kv_bytes).tolist())

    sizes = MessageSizes(
        send=total(send[0].counts, send[1].counts),
        receive=total(receive[0].counts, receive[1].counts),
        put_at=total(send[0].before, send[1].before),
    )
    return MessageLayout(sizes, tuple(_find(send, formats)), tuple(_find(receive, formats)))


def _find(rows: tuple[PeerRows, PeerRows], formats: Sequence[RowFormat]) -> Iterator[KindLayout]:
    # Rows of a kind without tensors take up nothing.
    numbers = [
        each.place[0].shape[0] if of.words else 0 for each, of in zip(rows, formats, strict=True)
    ]
    for kind, of in enumerate(formats):
        others = numbers[1 - kind]
        strides = of.words, formats[1 - kind].words
        place = rows[kind].place if others else None
        pieces = _pieces(rows, formats, kind) if others else ((slice(0, numbers[kind]), 0),)
        yield KindLayout(numbers[kind], strides, place, others, pieces, of)


def _pieces(
    rows: tuple[PeerRows, PeerRows], formats: Sequence[RowFormat], kind: int
) -> tuple[tuple[slice, int], ...]:
    """Returns the rows of a kind in each rank's message, if they are copied in pieces."""
    counts, words = rows[kind].counts, [each.words for each in formats]
    peers = np.flatnonzero(counts)
    if not in_pieces(np.array(len(peers)), np.array(counts.sum()), words[kind] * WORD.itemsize):
        return ()
    sizes = rows[0].counts * words[0] + rows[1].counts * words[1]
    at = np.cumsum(sizes) - sizes + kind * rows[0].counts * words[0]
    ends = np.cumsum(counts)
    return tuple(
        (slice(int(ends[peer] - counts[peer]), int(ends[peer])), int(at[peer])) for peer in peers
    )
