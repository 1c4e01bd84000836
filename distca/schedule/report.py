"""What a plan balanced, in a few numbers and as a small table for logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from distca.cost.model import CostModel
from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Plan
from distca.plan.span import Int64s
from distca.schedule.base import server_loads, tasks_at_home


@dataclass(frozen=True)
class PlanSummary:
    """The figures of a plan. Bytes are of one layer and one tensor-parallel rank.

    Attributes:
        scheduler: who made the plan.
        servers: attention servers.
        documents, tokens: what the plan is for.
        documents_spanning: documents that several ranks own.
        documents_split: documents that several servers compute.
        tasks: rows of the task table.
        query_rows_moved: queries that a server computes for another rank.
        load_unit: "seconds (predicted)" or "pairs".
        load_mean: mean load of a server, in that unit.
        load_max_over_mean_before: the busiest rank over the mean if no query moved.
        load_max_over_mean, load_min_over_mean: the busiest and the idlest server over the mean.
        bytes_total: all bytes of the forward pass.
        bytes_max_sent, bytes_max_received: of the rank that sends or receives most, forward.
        bytes_backward: all bytes of the backward pass.
        notes: the plan's.
    """

    scheduler: str
    servers: int
    documents: int
    tokens: int
    documents_spanning: int
    documents_split: int
    tasks: int
    query_rows_moved: int
    load_unit: str
    load_mean: float
    load_max_over_mean_before: float
    load_max_over_mean: float
    load_min_over_mean: float
    bytes_total: int
    bytes_max_sent: int
    bytes_max_received: int
    bytes_backward: int
    notes: tuple[str, ...]


def describe(
    plan: Plan,
    shape: AttentionShape,
    backward: Literal["resend", "keep"] = "resend",
    cost_model: CostModel | None = None,
) -> PlanSummary:
    """The figures of a valid plan.

    Args:
        plan: the plan.
        shape: the attention heads of one tensor-parallel rank.
        backward: how the backward pass gets its inputs.
        cost_model: loads in predicted seconds; None: in visible pairs.
    """
    world_size, at, tasks = plan.world_size, plan.placement, plan.tasks
    home = server_loads(tasks_at_home(at, plan.mask), plan.mask, world_size, cost_model)
    loads = server_loads(tasks, plan.mask, world_size, cost_model)
    moved = plan_bytes(plan, shape, backward)
    forward = moved.forward()
    mean, mean_at_home = float(loads.mean()), float(home.mean())
    row_bytes = shape.q_row_bytes + shape.lse_row_bytes
    return PlanSummary(
        scheduler=plan.scheduler,
        servers=world_size,
        documents=len(plan.lengths),
        tokens=int(plan.lengths.sum()),
        documents_spanning=_in_several(at.document, at.rank, world_size),
        documents_split=_in_several(tasks.document, tasks.server, world_size),
        tasks=len(tasks),
        query_rows_moved=int(moved.phases["return"].sum()) // row_bytes,
        load_unit="pairs" if cost_model is None else "seconds (predicted)",
        load_mean=mean,
        load_max_over_mean_before=float(home.max()) / mean_at_home if mean_at_home else 1.0,
        load_max_over_mean=float(loads.max()) / mean if mean else 1.0,
        load_min_over_mean=float(loads.min()) / mean if mean else 1.0,
        bytes_total=forward.total,
        bytes_max_sent=int(forward.sent().max()),
        bytes_max_received=int(forward.received().max()),
        bytes_backward=moved.total - forward.total,
        notes=plan.notes,
    )


def _in_several(document: Int64s, place: Int64s, places: int) -> int:
    """How many documents stand with more than one place."""
    found = np.unique(document * places + place) // places
    return int((np.unique(found, return_counts=True)[1] > 1).sum())


def format_summary(summary: PlanSummary) -> str:
    """The figures as a small table of several lines, without a newline at the end."""
    s = summary
    rows = [
        (
            "documents",
            f"{s.documents:,} of {s.tokens:,} tokens, {s.documents_spanning:,} on >1 rank",
        ),
        ("tasks", f"{s.tasks:,}; {s.documents_split:,} documents on >1 server"),
        ("queries moved", f"{s.query_rows_moved:,} rows, {_percent(s.query_rows_moved, s.tokens)}"),
        (
            "load max/mean",
            f"{s.load_max_over_mean_before:.3f} -> {s.load_max_over_mean:.3f} "
            f"(min/mean {s.load_min_over_mean:.3f}; mean {s.load_mean:.4g} {s.load_unit})",
        ),
        (
            "MB a layer",
            f"{s.bytes_total / 1e6:,.2f} forward (busiest sends {s.bytes_max_sent / 1e6:,.2f}, "
            f"receives {s.bytes_max_received / 1e6:,.2f}), {s.bytes_backward / 1e6:,.2f} backward",
        ),
        *(("note", note) for note in s.notes),
    ]
    title = f"plan by {s.scheduler or 'an unnamed scheduler'} for {s.servers} servers"
    return "\n".join([title, *(f"  {name:14} {value}" for name, value in rows)])


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"
