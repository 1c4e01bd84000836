"""Messages: rows of several tensors, packed into one message for each rank, and unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distca.transport import MessageSizes


@dataclass(frozen=True)
class Field:
    """Rows of one tensor inside the messages to (or from) every rank.

    Attributes:
        counts: rows for each rank.
        before: rows that lower ranks send to each rank: there this rank's rows begin.
        row_shape: shape of a row.
        dtype: element type of a row.
    """

    counts: tuple[int, ...]
    before: tuple[int, ...]
    row_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        elements = 1
        for size in self.row_shape:
            elements *= size
        return elements * self.dtype.itemsize


def message_sizes(outgoing: Sequence[Field], incoming: Sequence[Field]) -> MessageSizes:
    """Sizes of messages that hold the rows of several tensors.

    Args:
        outgoing: fields of the messages to every rank.
        incoming: fields of the messages from every rank; `before` is not needed.
    """
    return MessageSizes(
        _bytes([(field.counts, field.row_bytes) for field in outgoing]),
        _bytes([(field.counts, field.row_bytes) for field in incoming]),
        _bytes([(field.before, field.row_bytes) for field in outgoing]),
    )


def _bytes(rows: Sequence[tuple[tuple[int, ...], int]]) -> tuple[int, ...]:
    return tuple(
        sum(count * nbytes for count, (_, nbytes) in zip(counts, rows, strict=True))
        for counts in zip(*(counts for counts, _ in rows), strict=True)
    )


def pack(parts: Sequence[tuple[Field, torch.Tensor]], into: torch.Tensor) -> None:
    """Writes the messages to rank 0, 1, ..., each with its rows of every part in turn.

    Args:
        parts: fields, and their rows `[sum(counts), *row_shape]` sorted by destination.
        into: memory of the messages, uint8 `[bytes of all]`.
    """
    word = _word([field for field, _ in parts])
    torch.cat(_by_rank(parts, word), out=into.view(word))


def unpack(buffer: torch.Tensor, targets: Sequence[tuple[Field, torch.Tensor]]) -> None:
    """Copies received messages into the targets: the inverse of `pack`.

    Args:
        buffer: messages from rank 0, 1, ..., concatenated: uint8.
        targets: fields, and the tensors for their rows: contiguous `[sum(counts), *row_shape]`,
            sorted by source.
    """
    word = _word([field for field, _ in targets])
    places = _by_rank(targets, word)
    pieces = torch.split(buffer.view(word), [len(place) for place in places])
    # A GPU needs a few launches for this, rather than one for each piece.
    torch._foreach_copy_(places, pieces)


def _by_rank(parts: Sequence[tuple[Field, torch.Tensor]], word: torch.dtype) -> list[torch.Tensor]:
    """Pieces of the parts in the order of the messages; at least one, though it be empty."""
    pieces = [
        torch.split(
            _words_of(rows, word), [n * field.row_bytes // word.itemsize for n in field.counts]
        )
        for field, rows in parts
    ]
    of_ranks = [piece for of_rank in zip(*pieces, strict=True) for piece in of_rank]
    return [piece for piece in of_ranks if len(piece)] or of_ranks[:1]


def _word(fields: Sequence[Field]) -> torch.dtype:
    """The widest type that divides the rows of all fields: GPUs copy four elements at a time."""
    even = all(field.row_bytes % torch.int32.itemsize == 0 for field in fields)
    return torch.int32 if even else torch.uint8


def _words_of(rows: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """A view of a contiguous tensor's memory as another type."""
    assert rows.is_contiguous()
    return rows.reshape(-1).view(torch.uint8).view(word)
