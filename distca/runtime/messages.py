"""Packing rows of several tensors into one message for each rank, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Field:
    """Rows of one tensor inside the messages to (or from) every rank.

    Attributes:
        counts: rows for each rank.
        row_shape: the shape of a row.
        dtype: its element type.
    """

    counts: tuple[int, ...]
    row_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        elements = 1
        for size in self.row_shape:
            elements *= size
        return elements * self.dtype.itemsize


def message_bytes(fields: Sequence[Field], world_size: int) -> list[int]:
    """The size of the message of each rank."""
    return [sum(f.counts[rank] * f.row_bytes for f in fields) for rank in range(world_size)]


def pack(parts: Sequence[tuple[Field, torch.Tensor]], world_size: int) -> torch.Tensor:
    """One buffer with the messages to rank 0, 1, ...; each holds its rows of every part in turn.

    Args:
        parts: a field and its rows `[sum(counts), *row_shape]`, sorted by destination.
        world_size: ranks.

    Returns:
        uint8 `[sum of all messages]`.
    """
    flat = [_bytes_of(rows) for _, rows in parts]
    at = [0] * len(parts)
    pieces = []
    for rank in range(world_size):
        for number, (field, _) in enumerate(parts):
            size = field.counts[rank] * field.row_bytes
            if size:
                pieces.append(flat[number][at[number] : at[number] + size])
                at[number] += size
    return torch.cat(pieces) if pieces else flat[0].new_empty(0)


def unpack(
    buffer: torch.Tensor, targets: Sequence[tuple[Field, torch.Tensor]], world_size: int
) -> None:
    """Copies received messages into the targets: the inverse of `pack`.

    Args:
        buffer: uint8, the messages from rank 0, 1, ...
        targets: a field and where its rows go, contiguous `[sum(counts), *row_shape]`, by source.
        world_size: ranks.
    """
    flat = [_bytes_of(target) for _, target in targets]
    at = [0] * len(targets)
    read = 0
    for rank in range(world_size):
        for number, (field, _) in enumerate(targets):
            size = field.counts[rank] * field.row_bytes
            if size:
                flat[number][at[number] : at[number] + size] = buffer[read : read + size]
                at[number] += size
                read += size


def _bytes_of(rows: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, without a copy."""
    assert rows.is_contiguous()
    return rows.reshape(-1).view(torch.uint8)
