"""Chunks of a prompt as they are computed: positions and ranks, cut between blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from distca.schedule.serving.cdsp.chunks import Chunk
from distca.schedule.serving.cdsp.groups import Ranks


class Piece(NamedTuple):
    """A chunk as it is computed: positions `[start, end)` on these ranks."""

    start: int
    end: int
    ranks: Ranks


def cut_at_blocks(chunks: Sequence[Chunk], block_size: int) -> list[Piece]:
    """Moves the ends of all chunks but the last one to ends of blocks; none may be left of one.

    What is cached before the first one are whole blocks.
    """
    last = chunks[-1]
    ends = [(each.cached + each.tokens) // block_size * block_size for each in chunks]
    edges = [chunks[0].cached, *ends[:-1], last.cached + last.tokens]
    pieces = zip(pairwise(edges), chunks, strict=True)
    return [Piece(*edge, chunk.ranks) for edge, chunk in pieces if edge[1] > edge[0]]
