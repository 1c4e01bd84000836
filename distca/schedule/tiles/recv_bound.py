"""Bounding the bytes that servers receive by their arenas, by moving queries to keys.

A rank that computes its own queries of a long document receives the keys of all earlier tokens. If
its arena cannot hold these, some of them stay with their owners, and the queries go there: where an
owner has `k` key rows that `q` query rows need, the owner receives `q * q_row_bytes` instead of the
rank `k * moved_kv_row_bytes`. (Context parallelism calls this pass-Q instead of pass-KV.)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Plan, Segments, Tasks
from distca.plan.span import Int64s
from distca.schedule.tiles.grid import below_diagonal

_ROUNDS = 8
"""Most rounds of moving; each counts exactly what servers receive after the last one."""


def received_bytes(plan: Plan, shape: AttentionShape) -> np.ndarray:
    """Returns the bytes that each server receives for a layer's forward pass, int64 `[servers]`."""
    return plan_bytes(plan, shape).messages["dispatch"].received()


def bound_recv_bytes(plan: Plan, shape: AttentionShape, bound: int) -> Plan:
    """Moves queries to keys until no server receives more than a bound.

    Args:
        plan: a valid plan; under a window it is returned unchanged.
        shape: attention heads of one tensor-parallel rank.
        bound: most bytes that a server may receive.

    Returns:
        A valid plan that keeps to the bound, or at least comes closer.
    """
    if plan.mask.window_left is not None:
        return plan
    for _ in range(_ROUNDS):
        received = received_bytes(plan, shape)
        if (received <= bound).all():
            break
        moved = _one_round(plan, shape, bound, received)
        if moved is None:
            break
        plan = moved
    return plan


def _one_round(plan: Plan, shape: AttentionShape, bound: int, received: np.ndarray) -> Plan | None:
    """Moves queries of the servers above the bound; returns None if none can move."""
    kv, tasks_of = plan.kv_segments, _by_server(plan.tasks.server, plan.world_size)
    segments_of = _by_server(kv.server, plan.world_size)
    room = bound - received
    given: list[tuple[int, int, int, int]] = []
    for server in np.argsort(room, kind="stable").tolist():
        if room[server] >= 0:
            break
        needed = segments_of[server]
        missing = kv.select(needed[kv.owner[needed] != server])
        mine = plan.tasks[tasks_of[server]]
        for _, segment, q_bytes in sorted(_exchanges(plan, shape, mine, missing)):
            owner = int(missing.owner[segment])
            if room[server] >= 0:
                break
            if q_bytes <= room[owner]:
                start, end = int(missing.start[segment]), int(missing.end[segment])
                given.append((server, owner, start, end))
                room[owner] -= q_bytes
                room[server] += (end - start) * shape.moved_kv_row_bytes
    return replace(plan, tasks=_with_given(plan, given)) if given else None


def _by_server(server: Int64s, servers: int) -> list[Int64s]:
    """Lists the rows of each server, in their order."""
    order = np.argsort(server, kind="stable")
    return np.split(order, np.searchsorted(server[order], np.arange(1, servers)))


def _exchanges(
    plan: Plan, shape: AttentionShape, mine: Tasks, missing: Segments
) -> list[tuple[float, int, int]]:
    """Prices segments that tasks miss: `(query bytes over key bytes, segment, query bytes)`."""
    offset = plan.document_offsets[mine.document]
    found = []
    for segment, (start, end) in enumerate(
        zip(missing.start.tolist(), missing.end.tolist(), strict=True)
    ):
        needs = (offset + mine.kv_start < end) & (offset + mine.kv_end > start)
        first = np.maximum(offset + mine.q_start, start)[needs]
        rows = int(np.maximum((offset + mine.q_end)[needs] - first, 0).sum())
        q_bytes = rows * shape.q_row_bytes
        found.append((q_bytes / ((end - start) * shape.moved_kv_row_bytes), segment, q_bytes))
    return found


def _with_given(plan: Plan, given: list[tuple[int, int, int, int]]) -> Tasks:
    """Returns the plan's tasks after servers have given those over some keys to others.

    Args:
        plan: plan before the change.
        given: `(server, recipient, start, end)` of the keys in global positions, disjoint for each
            server.
    """
    tasks, tasks_of = plan.tasks, _by_server(plan.tasks.server, plan.world_size)
    offset = plan.document_offsets[tasks.document]
    kept = np.ones(len(tasks), dtype=bool)
    rows: list[tuple[int, int, int, int, int, int]] = []
    cuts_of: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for server, to, start, end in given:
        cuts_of[server].append((start, end, to))
    for server, unsorted in sorted(cuts_of.items()):
        cuts = sorted(unsorted)
        for task in tasks_of[server].tolist():
            low, high = (
                int(offset[task] + tasks.kv_start[task]),
                int(offset[task] + tasks.kv_end[task]),
            )
            inside = [cut for cut in cuts if cut[0] < high and cut[1] > low]
            if not inside:
                continue
            kept[task] = False
            document, first = int(tasks.document[task]), int(offset[task])
            queries = (int(tasks.q_start[task]), int(tasks.q_end[task]))
            position = low
            for start, end, to in [*inside, (high, high, server)]:
                start, end = max(start, low), min(end, high)
                for kv_start, kv_end, who in ((position, start, server), (start, end, to)):
                    if kv_end > kv_start:
                        rows.append((document, *queries, kv_start - first, kv_end - first, who))
                position = end
    columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    return Tasks.concatenate([tasks[kept], below_diagonal(*columns)])
