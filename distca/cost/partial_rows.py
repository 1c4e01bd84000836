"""Partial outputs of each rank, as plans make them: on servers by several tasks, then at owners."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan import Plan
from distca.plan.span import Int64s, covered


@dataclass(frozen=True)
class PartialRows:
    """Numbers of rows on each rank, int64 `[ranks]`.

    Attributes:
        parts: partial rows.
        shared: rows of which there are several parts, which merge.
        members: parts of the shared rows.
    """

    parts: Int64s
    shared: Int64s
    members: Int64s


def on_servers(plan: Plan) -> PartialRows:
    """The query rows of each server's tasks."""
    t = plan.tasks
    offset = plan.document_offsets[t.document]
    return _partial_rows(t.server, offset + t.q_start, offset + t.q_end, plan.world_size)


def at_owners(plan: Plan) -> PartialRows:
    """The outputs of each rank's queries, one of each server."""
    s = plan.q_segments
    return _partial_rows(s.owner, s.start, s.end, plan.world_size)


def _partial_rows(rank: Int64s, starts: Int64s, ends: Int64s, ranks: int) -> PartialRows:
    parts = np.zeros(ranks, dtype=np.int64)
    np.add.at(parts, rank, ends - starts)
    rows, shared = (covered(rank, starts, ends, ranks, times) for times in (1, 2))
    return PartialRows(parts, shared, parts - (rows - shared))
