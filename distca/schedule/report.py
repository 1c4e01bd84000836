"""Summaries of plans: how balanced they are and what they move, as figures and as a table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.cost.kernel_time import AnalyticCost, CostModel
from distca.cost.rows import rank_rows
from distca.cost.volume import BackwardInputs, plan_bytes
from distca.plan import Plan
from distca.plan.span import Floats, Int64s, distinct
from distca.schedule.base import (
    ScheduleConfig,
    document_loads,
    even_capacities,
    relative_loads,
    server_loads,
)
from distca.schedule.baselines.packed import plain_loads
from distca.wording import counted


@dataclass(frozen=True)
class PlanSummary:
    """Figures of a plan. Bytes are those of one layer with the heads of the configured shape.

    Attributes:
        scheduler: name of the scheduler that made the plan.
        servers: number of attention servers.
        documents, tokens: number of documents, and of their tokens.
        tokens_max_over_mean: tokens of the rank with most over the mean.
        documents_spanning: documents that several ranks own.
        documents_split: documents that several servers compute.
        tasks: number of tasks.
        kernel_calls: fused kernel calls of all servers, each at most one for each task shape.
        query_rows_moved: queries that a server computes for another rank.
        key_rows_moved: keys, with their values, that a server has from another rank; those that
            several servers have count several times.
        load_unit: "pairs", or "seconds (predicted)": from measured times.
        load_mean: mean load of a server, in that unit.
        load_max_over_mean_before: load of the busiest rank over the mean in plain data parallelism
            (`plain_loads`).
        load_max_over_mean, load_min_over_mean: loads of the busiest and the idlest server over the
            mean; with unequal speeds, their times over the time if all were busy equally long.
        bytes_total: all bytes of the forward pass.
        servers_per_node: number of servers that share a node.
        bytes_between_nodes: bytes of the forward pass that leave a node.
        bytes_max_sent, bytes_max_received: most bytes that a rank sends or receives, forward.
        bytes_max_buffered: most bytes of queries, keys and values that a server receives.
        bytes_backward: all bytes of the backward pass.
        link_seconds_max: longest time that the links of a rank are busy, forward.
        notes: notes of the plan.
        max_buffer_bytes: bound of `bytes_max_buffered`, or None.
    """

    scheduler: str
    servers: int
    documents: int
    tokens: int
    tokens_max_over_mean: float
    documents_spanning: int
    documents_split: int
    tasks: int
    kernel_calls: int
    query_rows_moved: int
    key_rows_moved: int
    load_unit: str
    load_mean: float
    load_max_over_mean_before: float
    load_max_over_mean: float
    load_min_over_mean: float
    bytes_total: int
    servers_per_node: int
    bytes_between_nodes: int
    bytes_max_sent: int
    bytes_max_received: int
    bytes_max_buffered: int
    bytes_backward: int
    link_seconds_max: float
    notes: tuple[str, ...]
    max_buffer_bytes: int | None


def describe(
    plan: Plan,
    config: ScheduleConfig,
    backward: BackwardInputs = "resend",
    before: Floats | None = None,
) -> PlanSummary:
    """Computes the figures of a valid plan.

    Args:
        plan: a valid plan.
        config: shape, cost model, links and speeds that loads and bytes are measured by.
        backward: how the backward pass gets its inputs.
        before: load of each server in plain data parallelism, `[servers]`, in any unit; None:
            computed for the plan's documents in their order, divided evenly over the ranks that
            own tokens.
    """
    shape, cost_model = config.shape, _judging(config)
    servers, placement, tasks = plan.world_size, plan.placement, plan.tasks
    speeds = config.speeds_of(servers)
    loads = server_loads(tasks, plan.mask, servers, cost_model)
    relative = relative_loads(loads, speeds)
    moved = plan_bytes(plan, shape, backward)
    forward = moved.forward()
    tokens = placement.tokens_per_rank()
    if before is None:
        before = loads_before(plan, cost_model)
    most_before = float(relative_loads(before, speeds).max())
    notes, bound = plan.notes, config.max_buffer_bytes
    if bound is not None and relative.max() > most_before + 1e-9:
        notes += (
            f"this is worse balanced than plain data parallelism ({most_before:.3f}): allow more "
            f"buffer bytes than {bound:,}",
        )
    return PlanSummary(
        scheduler=plan.scheduler,
        servers=servers,
        documents=len(plan.lengths),
        tokens=int(plan.own_lengths.sum()),
        tokens_max_over_mean=float(tokens.max() / max(tokens.mean(), 1)),
        documents_spanning=_in_several(placement.document, placement.rank, servers),
        documents_split=_in_several(tasks.document, tasks.server, servers),
        tasks=len(tasks),
        kernel_calls=len(distinct(tasks.server * 2 + tasks.ends_on_diagonal)),
        query_rows_moved=int(moved.messages["combine"].sizes.sum()) // shape.result_row_bytes,
        key_rows_moved=int(rank_rows(plan)[1].received.sum()),
        load_unit="pairs" if cost_model is None else "seconds (predicted)",
        load_mean=float(loads.mean()),
        load_max_over_mean_before=most_before,
        load_max_over_mean=float(relative.max()),
        load_min_over_mean=float(relative.min()),
        bytes_total=forward.total,
        servers_per_node=config.links.ranks_per_node,
        bytes_between_nodes=config.links.between_nodes(forward),
        bytes_max_sent=int(forward.sent().max()),
        bytes_max_received=int(forward.received().max()),
        bytes_max_buffered=int(forward.messages["dispatch"].received().max()),
        bytes_backward=moved.total - forward.total,
        link_seconds_max=float(config.links.busy_seconds(forward).max()),
        notes=notes,
        max_buffer_bytes=bound,
    )


def _judging(config: ScheduleConfig) -> CostModel | None:
    """Returns what loads are measured by; None: visible pairs."""
    # The other one's seconds are pairs at a rate that no machine was measured for.
    return None if isinstance(config.cost_model, AnalyticCost) else config.cost_model


def loads_over_mean(plan: Plan, config: ScheduleConfig) -> tuple[Floats, Floats]:
    """Returns each server's load over the mean in plain data parallelism and in a plan, `[servers]`
    each, as `describe` has them."""
    servers, cost_model = plan.world_size, _judging(config)
    speeds = config.speeds_of(servers)
    loads = server_loads(plan.tasks, plan.mask, servers, cost_model)
    before = loads_before(plan, cost_model)
    return relative_loads(before, speeds), relative_loads(loads, speeds)


def loads_before(plan: Plan, cost_model: CostModel | None) -> Floats:
    """Returns the load of each server if a plan's documents were trained on in plain data
    parallelism: in their order, divided evenly over the ranks that own tokens. Trees are whole on
    the rank on which they begin.

    Args:
        plan: a valid plan.
        cost_model: predicts seconds; None: loads are visible pairs.
    """
    tokens = plan.placement.tokens_per_rank()
    capacities, owners = np.zeros_like(tokens), np.flatnonzero(tokens)
    if len(owners):
        capacities[owners] = even_capacities(int(tokens.sum()), len(owners))
    if plan.parents is None or plan.cached_prefix is None:
        return plain_loads(plan.lengths, capacities, plan.mask, cost_model)
    loads = document_loads(
        plan.lengths, plan.mask, cost_model, plan.cached_prefix, plan.query_shift
    )
    tree = plan.trees
    own = np.bincount(tree, weights=plan.own_lengths)
    first = np.searchsorted(np.cumsum(capacities), np.cumsum(own) - own, side="right")
    return np.bincount(first[tree], weights=loads, minlength=len(tokens)).astype(np.float64)


def _in_several(document: Int64s, place: Int64s, places: int) -> int:
    """Counts the documents that are in more than one place."""
    found = distinct(document * places + place) // places
    return int((np.unique(found, return_counts=True)[1] > 1).sum())


def format_summary(summary: PlanSummary, known_links: bool = True) -> str:
    """Formats the figures as a small table of several lines, without a newline at the end.

    Args:
        summary: figures of a plan.
        known_links: whether the configured links are those of the machine; without them nothing
            is said of their time.
    """
    s = summary
    moved = [
        f"{s.bytes_total / 1e6:,.2f} forward (busiest sends {s.bytes_max_sent / 1e6:,.2f}, "
        f"receives {s.bytes_max_received / 1e6:,.2f}), {s.bytes_backward / 1e6:,.2f} backward"
    ]
    # Of the bytes that leave a node; nothing where a node is a server, or has them all.
    if 1 < s.servers_per_node < s.servers:
        moved.append(f"{s.bytes_between_nodes / 1e6:,.2f} forward between nodes")
    rows_bound = []
    if s.max_buffer_bytes is not None:
        held = f"{s.bytes_max_buffered / 1e6:,.2f} MB of queries, keys and values at most, of "
        rows_bound.append(("buffers", f"{held}{s.max_buffer_bytes / 1e6:,.2f} MB allowed"))
    busy = f"busy for at most {1e3 * s.link_seconds_max:.3f} ms forward"
    rows = [
        (
            "documents",
            f"{s.documents:,} of {counted(s.tokens, 'token')}, {s.documents_spanning:,} on >1 rank",
        ),
        (
            "tasks",
            f"{s.tasks:,} in {counted(s.kernel_calls, 'kernel call')}; "
            f"{counted(s.documents_split, 'document')} on >1 server",
        ),
        (
            "queries moved",
            f"{counted(s.query_rows_moved, 'row')}, {_percent(s.query_rows_moved, s.tokens)}"
            + _instead(s),
        ),
        (
            "load max/mean",
            f"{s.load_max_over_mean_before:.3f} -> {s.load_max_over_mean:.3f} "
            f"(min/mean {s.load_min_over_mean:.3f}; mean {s.load_mean:.4g} {s.load_unit})",
        ),
        ("MB a layer", "; ".join(moved)),
        *rows_bound,
        *([("links", busy)] if known_links else []),
        *(("note", note) for note in s.notes),
    ]
    if s.tokens_max_over_mean > 1.001:
        rows.insert(1, ("tokens max/mean", f"{s.tokens_max_over_mean:.3f}"))
    title = f"plan by {s.scheduler or 'an unnamed scheduler'} for {counted(s.servers, 'server')}"
    return "\n".join([title, *(f"  {name:15} {value}" for name, value in rows)])


def _instead(summary: PlanSummary) -> str:
    """Says what the bytes are where no query moves; nothing where one does, or no byte is."""
    if summary.query_rows_moved or not summary.key_rows_moved:
        return ""
    return f"; {counted(summary.key_rows_moved, 'row')} of keys and values go to servers"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"
