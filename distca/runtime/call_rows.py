"""Rows of a kernel call in the two memories that a server has: its own rows, and those received."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from distca.cost.rows import copied_in_pieces
from distca.plan.span import Bools, Int64s


@dataclass(frozen=True)
class Piece:
    """Rows that follow each other in one memory.

    Attributes:
        received: whether they are among the received rows, and not among the local ones.
        rows: their numbers there.
    """

    received: bool
    rows: slice


@dataclass(frozen=True)
class Gather:
    """Rows of one memory.

    Attributes:
        received: whether they are among the received rows, and not among the local ones.
        rows: their numbers there, int64 `[n]`.
    """

    received: bool
    rows: torch.Tensor


@dataclass(frozen=True)
class Pieces:
    """Pieces of both memories, one after the other.

    Attributes:
        pieces: the pieces.
    """

    pieces: tuple[Piece, ...]

    @property
    def total(self) -> int:
        """Number of rows."""
        return sum(each.rows.stop - each.rows.start for each in self.pieces)


@dataclass(frozen=True)
class GatherBoth:
    """Rows of both memories, of which many pieces would be copied.

    Attributes:
        most: rows of the memory that holds most of them; any row stands in for each other one.
        others: rows of the other memory, which take the places of those.
        places: numbers of the others among all rows, int64.
    """

    most: Gather
    others: Gather
    places: torch.Tensor


CallRows = Piece | Gather | Pieces | GatherBoth
"""Rows of a call, one task after the other. Those of one piece are used where they lie."""


def find_call_rows(served: Int64s, local: int) -> CallRows:
    """Finds rows of a call in memory, as `distca.cost.rows.CallRowCounts` counts them.

    Args:
        served: served rows of the call's tasks, one task after the other: local rows have their own
            numbers, received ones begin at `local`.
        local: number of local rows.
    """
    total, received = len(served), served >= local
    at = served - local * received
    ends = np.flatnonzero((np.diff(served) != 1) | np.diff(received)) + 1
    edges = [0, *ends.tolist(), total]
    if len(edges) == 2:
        return _piece(at, received, 0, total)
    if received.all() or not received.any():
        return Gather(bool(received[0]), torch.from_numpy(at))
    if copied_in_pieces(np.array(len(edges) - 1), np.array(total)):
        return Pieces(tuple(_piece(at, received, *span) for span in pairwise(edges)))
    mostly = bool(2 * received.sum() > total)
    others = np.flatnonzero(received != mostly)
    return GatherBoth(
        Gather(mostly, torch.from_numpy(np.where(received == mostly, at, 0))),
        Gather(not mostly, torch.from_numpy(at[others])),
        torch.from_numpy(others),
    )


def _piece(at: Int64s, received: Bools, begin: int, end: int) -> Piece:
    first, is_received = (int(at[begin]), bool(received[begin])) if begin < end else (0, False)
    return Piece(is_received, slice(first, first + end - begin))
