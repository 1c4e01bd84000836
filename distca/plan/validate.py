"""Checks that a plan covers each visible pair exactly once and cuts where it may, and its steps."""

from __future__ import annotations

import numpy as np

from distca.plan.mask import Mask
from distca.plan.plan import Plan
from distca.plan.span import Bools, Int64s, cut_at, distinct, order_by
from distca.plan.stepped import SteppedPlan


def validate_plan(plan: Plan) -> None:
    """Checks a plan.

    Raises:
        ValueError: the plan is not valid; the message has the first offending row.
    """
    if plan.head_groups < 1 or len(plan.lengths) % plan.head_groups:
        raise ValueError(
            f"not a valid plan: {plan.head_groups} head groups of {len(plan.lengths)} documents"
        )
    _check_parents(plan)
    _check_query_shift(plan)
    _check_placement(plan)
    _check_cached_prefixes(plan)
    _check_tasks(plan)
    _check_cuts(plan)
    _check_cover(plan)


def validate_stepped_plan(stepped: SteppedPlan) -> None:
    """Checks a plan, its steps, and how many rows its tasks keep.

    Raises:
        ValueError: the plan is not valid; the message has the first offending row.
    """
    validate_plan(stepped.plan)
    _check_steps(stepped)
    _check_kept(stepped)


def _refuse(condition: Bools, what: str, *columns: Int64s) -> None:
    """Raises ValueError with the first row for which `condition` holds."""
    if np.any(condition):
        row = int(np.flatnonzero(condition)[0])
        values = [int(column[row]) for column in columns]
        raise ValueError(f"not a valid plan: {what} (row {row}: {values})")


def _check_parents(plan: Plan) -> None:
    parents, prefix = plan.parents, plan.cached_prefix
    if parents is None:
        return
    if prefix is None or prefix.shape != plan.lengths.shape or parents.shape != prefix.shape:
        raise ValueError("not a valid plan: it has parents, but not one prefix for each document")
    numbers = np.arange(len(parents))
    # So that nobody is an ancestor of its own.
    _refuse((parents < -1) | (parents >= numbers), "a parent is no earlier document", parents)
    # It branches off behind an own token of the parent. Others may have a cached prefix.
    least = np.where(parents < 0, 0, plan.inherited_lengths[parents] + 1)
    most = np.where(parents < 0, plan.lengths, plan.lengths[parents])
    outside = (prefix < least) | (prefix > most)
    _refuse(outside, "a prefix does not end among the parent's own tokens", prefix, least, most)


def _check_query_shift(plan: Plan) -> None:
    shift = plan.query_shift
    if shift is None:
        return
    if shift.shape != plan.lengths.shape or plan.head_groups > 1 or plan.mask != Mask():
        raise ValueError(
            "not a valid plan: shifts of queries are for each document, under a causal mask "
            "without window and chunks, and without head groups"
        )
    own = plan.own_lengths
    _refuse((shift != 0) & (shift != own), "queries are not behind all own keys", shift, own)


def _check_placement(plan: Plan) -> None:
    placement = plan.placement
    documents = len(plan.lengths)
    _refuse(plan.lengths < 1, "a document has no tokens", plan.lengths)
    columns = (placement.document, placement.start, placement.end, placement.rank)
    _refuse(
        (placement.document < 0) | (placement.document >= documents),
        "no such document is placed",
        *columns,
    )
    _refuse(
        (placement.rank < 0) | (placement.rank >= placement.world_size),
        "placed on no rank",
        *columns,
    )
    first = plan.inherited_lengths[placement.document]
    _refuse(
        (placement.start < first)
        | (placement.start >= placement.end)
        | (placement.end > plan.lengths[placement.document]),
        "a placed span is empty or outside its document",
        *columns,
    )
    order = order_by(placement.document, placement.start)
    starts = plan.document_offsets[placement.document[order]] + placement.start[order]
    ends = plan.document_offsets[placement.document[order]] + placement.end[order]
    expected = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
    _refuse(starts != expected, "the placement leaves out or repeats tokens", starts, expected)
    if int(ends[-1] if len(ends) else 0) != int(plan.own_lengths.sum()):
        raise ValueError("not a valid plan: the placement leaves out the last tokens")


def _check_cached_prefixes(plan: Plan) -> None:
    if plan.cached_prefix is None:
        return
    placement, prefix = plan.placement, plan.cached_prefix
    _refuse(
        (prefix < 0) | (prefix >= plan.lengths), "a document has no query", prefix, plan.lengths
    )
    columns = (placement.document, placement.start, placement.end, placement.rank)
    cached = placement.start < prefix[placement.document]
    _refuse(
        cached & (placement.end > prefix[placement.document]),
        "a piece is only in part cached",
        *columns,
    )
    t = plan.tasks
    first = (prefix if plan.query_shift is None else prefix + plan.query_shift)[t.document]
    _refuse(t.q_start < first, "a task has a cached query", t.document, t.q_start, t.q_end)


def _check_tasks(plan: Plan) -> None:
    t = plan.tasks
    columns = (t.document, t.q_start, t.q_end, t.kv_start, t.kv_end, t.server)
    documents, servers = len(plan.lengths), plan.world_size
    _refuse((t.document < 0) | (t.document >= documents), "no such document has a task", *columns)
    _refuse((t.server < 0) | (t.server >= servers), "a task has no such server", *columns)
    length = plan.lengths[t.document]
    shift = 0 if plan.query_shift is None else plan.query_shift[t.document]
    _refuse(
        (t.q_start < shift) | (t.q_start >= t.q_end) | (t.q_end > length + shift),
        "a task's queries are empty or outside the document",
        *columns,
    )
    _refuse(
        (t.kv_start < 0) | (t.kv_start >= t.kv_end) | (t.kv_end > length),
        "a task's keys are empty or outside the document",
        *columns,
    )
    full = plan.mask.is_full(t.q_start, t.q_end, t.kv_start, t.kv_end)
    _refuse(
        ~(full | t.ends_on_diagonal),
        "a task is neither a full rectangle nor ends on the diagonal",
        *columns,
    )
    if plan.mask.attention_chunk is not None:
        # Kernels know nothing of chunks.
        _refuse(
            t.kv_start < plan.mask.first_key(t.q_end - 1),
            "a task reaches over the edge of a chunk",
            *columns,
        )


def _check_cuts(plan: Plan) -> None:
    t = plan.tasks
    placement = plan.placement
    owner_changes = np.sort(plan.document_offsets[placement.document] + placement.start)
    first_key = plan.mask.first_key(t.q_start)
    # Of queries that stand behind the keys, the positions of these tokens as keys.
    shift = 0 if plan.query_shift is None else plan.query_shift[t.document]
    for name, position in (
        ("q_start", t.q_start - shift),
        ("q_end", t.q_end - shift),
        ("kv_start", t.kv_start),
        ("kv_end", t.kv_end),
    ):
        where = plan.document_offsets[t.document] + position
        found = np.searchsorted(owner_changes, where)
        at_change = owner_changes[np.minimum(found, len(owner_changes) - 1)] == where
        allowed = (position % plan.block == 0) | (position == plan.lengths[t.document]) | at_change
        if plan.cached_prefix is not None:
            allowed |= (position - plan.cached_prefix[t.document]) % plan.block == 0
        if plan.query_shift is not None and name.startswith("q"):
            allowed |= (position + plan.query_shift[t.document]) % plan.block == 0
        if plan.mask.attention_chunk is not None:
            allowed |= position % plan.mask.attention_chunk == 0
        if name == "kv_start":
            allowed |= position == first_key
        _refuse(
            ~allowed,
            f"{name} is neither on a block of {plan.block}, nor an end, nor a change of owner",
            t.document,
            position,
        )


def _check_cover(plan: Plan) -> None:
    """Checks that no query sees a key twice, and that each document's visible pairs add up."""
    t = plan.tasks
    starts = plan.query_offsets[t.document] + t.q_start
    ends = plan.query_offsets[t.document] + t.q_end
    # Between two neighbouring query cuts a task covers either all queries or none.
    task, slab, _ = cut_at(starts, ends, distinct(np.concatenate([starts, ends])))
    order = order_by(slab, t.kv_start[task])
    task, slab = task[order], slab[order]
    overlap = (slab[1:] == slab[:-1]) & (t.kv_end[task][:-1] > t.kv_start[task][1:])
    _refuse(
        overlap,
        "a query meets a key in two tasks",
        t.document[task][1:],
        t.q_start[task][1:],
        t.q_end[task][1:],
        t.kv_start[task][1:],
        t.kv_end[task][1:],
    )
    covered = np.zeros(len(plan.lengths), dtype=np.int64)
    np.add.at(covered, t.document, t.pairs(plan.mask))
    zeros = np.zeros_like(plan.lengths)
    first = zeros if plan.cached_prefix is None else plan.cached_prefix
    shift = zeros if plan.query_shift is None else plan.query_shift
    visible = plan.mask.pairs(first + shift, plan.lengths + shift, zeros, plan.lengths)
    numbers = np.arange(len(plan.lengths))
    _refuse(
        covered != visible,
        "a document's visible pairs are not all covered (document, covered, visible)",
        numbers,
        covered,
        visible,
    )


def _check_steps(stepped: SteppedPlan) -> None:
    """Checks that steps are numbered in turn, and that a server is sent a row in one of them."""
    plan, t, step = stepped.plan, stepped.plan.tasks, stepped.step
    if len(step) != len(t):
        raise ValueError(f"not a valid plan: {len(t)} tasks in the steps of {len(step)}")
    _refuse(step < 0, "a task is in no step", t.document, t.q_start, t.q_end, step)
    if stepped.steps == 1:
        return
    tasks_of = np.bincount(step)
    _refuse(tasks_of == 0, "a step has no task", np.arange(stepped.steps))
    for kind, whole in (("q", plan.q_segments), ("kv", plan.kv_segments)):
        _, once = whole.moved_per_rank(plan.world_size)
        steps = [getattr(each, kind) for each in stepped.step_segments]
        received = np.sum([each.moved_per_rank(plan.world_size)[1] for each in steps], axis=0)
        _refuse(
            received > once,
            f"a server is sent a row of {kind} in several steps (server, received, distinct)",
            np.arange(plan.world_size),
            received,
            once,
        )


def _check_kept(stepped: SteppedPlan) -> None:
    """Checks how many rows stay, and that those of other ranks' keys alone are dropped."""
    plan, t, kept = stepped.plan, stepped.plan.tasks, stepped.kept
    if kept is None:
        return
    if len(kept.q) != len(t) or kept.q.shape != kept.kv.shape:
        raise ValueError(
            f"not a valid plan: of {len(t)} tasks it says how many rows of {kept.q.shape} and "
            f"{kept.kv.shape} tasks and heads stay"
        )
    if stepped.relays and stepped.steps > 1:
        raise ValueError("not a valid plan: rows that are in part dropped are passed on")
    offset = plan.document_offsets[t.document]
    queries, keys = (plan.owners(offset + start) for start in (t.q_start, t.kv_start))
    columns = (t.document, t.q_start, t.q_end, t.kv_start, t.kv_end, t.server)
    of_one = (offset + t.q_end <= queries.until) & (offset + t.kv_end <= keys.until)
    _refuse(~of_one, "a task that may drop rows has rows of several pieces", *columns)
    _refuse(
        queries.rank != t.server, "a task that may drop rows is not where its queries are", *columns
    )
    at_home = keys.rank == t.server
    for stay, start, end in ((kept.q, t.q_start, t.q_end), (kept.kv, t.kv_start, t.kv_end)):
        rows = (end - start)[:, None]
        outside = np.any((stay < 1) | (stay > rows), axis=1)
        _refuse(outside, "a task keeps no such rows", *columns)
        dropped = np.any(stay < rows, axis=1)
        _refuse(at_home & dropped, "a task drops a rank's own rows", *columns)
    _refuse(at_home & (stepped.step > 0), "a rank's own rows are not in the first step", *columns)
    _refuse(~at_home & t.ends_on_diagonal, "a task on the diagonal has keys elsewhere", *columns)
    sent = stepped.kept_keys
    again = (np.diff(sent.server) == 0) & (sent.start[1:] < sent.end[:-1])
    _refuse(again, "a server is sent several choices of a key", sent.server[1:], sent.start[1:])
