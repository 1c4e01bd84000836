"""One rank's part of a plan that drops rows: how many rows of each span stay, step by step.

Rows of single key-value heads travel and are computed, since each head keeps others: a row of keys
is `[head_dim]`, and a row of queries those of a group, `[heads / kv_heads, head_dim]`. A rank's own
keys are computed as without drops.

Messages hold the spans of a rank in the order of positions, each with its heads in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from distca.cost.volume import Messages
from distca.plan import SteppedPlan
from distca.plan.kept import KeptKeys
from distca.plan.placement import find_tokens
from distca.plan.span import Int64s, expand_ranges
from distca.runtime.serving.step_exchange import (
    ExchangeStep,
    Index,
    SteppedExchange,
    build_stepped_exchange,
    index_of,
    step_messages,
)


@dataclass(frozen=True)
class KeptSpan:
    """Consecutive local rows; some of them stay.

    Attributes:
        begin: first row.
        end: end of the rows.
        counts: rows that stay in each key-value head.
    """

    begin: int
    end: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class KeptCall:
    """One kernel call: sequences of full rectangles in single heads, of different queries.

    Attributes:
        queries: spans of local queries, each of whose heads is a sequence.
        keys: rows that arrived, one sequence after the other.
        cu_seqlens_q: first query of each sequence, and the total: int32 `[sequences + 1]`, CPU.
        cu_seqlens_kv: first key of each sequence, and the total, likewise.
    """

    queries: tuple[KeptSpan, ...]
    keys: Index
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor


@dataclass(frozen=True)
class KeptStep:
    """One step of a rank's part.

    Attributes:
        send: spans of local keys that it sends, in the order of messages.
        calls: kernel calls.
    """

    send: tuple[KeptSpan, ...]
    calls: tuple[KeptCall, ...]


@dataclass(frozen=True)
class KeptExchange:
    """Everything that one rank needs to run the steps of a plan that drops rows.

    Attributes:
        steps: steps of the plan, as this rank sees them.
        own: messages of all steps, and calls over this rank's own keys.
        key_places: where each local key row lies, int64 `[local key rows]`.
        key_of_query: local key row of each local query's own token, int64 `[local queries]`.
        always: local queries that stay in any case, those of sequences' last tokens: int64.
    """

    steps: tuple[KeptStep, ...]
    own: SteppedExchange
    key_places: torch.Tensor
    key_of_query: torch.Tensor
    always: torch.Tensor


def build_kept_exchange(stepped: SteppedPlan, rank: int, key_places: Int64s) -> KeptExchange:
    """Works out one rank's part of a plan that drops rows.

    Args:
        stepped: a valid plan.
        rank: rank of the plan's placement.
        key_places: where each local key row lies, as for `build_stepped_exchange`.
    """
    plan, t = stepped.plan, stepped.plan.tasks
    at_home = plan.owners(plan.document_offsets[t.document] + t.kv_start).rank == t.server
    alone = replace(stepped.select(at_home), kept=None)
    own = build_stepped_exchange(alone, rank, key_places)
    first = own.steps[0]
    steps, kept_steps = [], []
    for number in range(stepped.steps):
        kept = stepped.kept_keys.of_step(number)
        rows = Messages(*kept.moved(), plan.world_size)
        nothing = replace(rows, sizes=0 * rows.sizes)
        calls = first.calls if number == 0 else ()
        steps.append(
            ExchangeStep(
                step_messages(rank, nothing, rows),
                slice(0, 0),
                (),
                calls,
                step_messages(rank, nothing, nothing),
                slice(0, 0),
                (),
            )
        )
        theirs = stepped.select((stepped.step == number) & ~at_home & (t.server == rank))
        sent = kept.select(kept.owner == rank)
        spans = zip(
            sent.owner_row.tolist(),
            (sent.owner_row + sent.end - sent.start).tolist(),
            map(tuple, sent.counts.tolist()),
            strict=True,
        )
        calls_of = _calls(theirs, kept.select(kept.server == rank))
        kept_steps.append(KeptStep(tuple(KeptSpan(*span) for span in spans), calls_of))
    mine = plan.placement.rank == rank
    pieces = np.flatnonzero(mine & plan.own_pieces)
    placement = plan.placement
    lengths = (placement.end - placement.start)[pieces]
    last = placement.end[pieces] == plan.lengths[placement.document[pieces]]
    return KeptExchange(
        tuple(kept_steps),
        replace(own, steps=tuple(steps)),
        torch.from_numpy(key_places),
        torch.from_numpy(expand_ranges(placement.first_rows()[pieces], lengths)),
        torch.from_numpy(np.cumsum(lengths)[last] - 1),
    )


def _calls(stepped: SteppedPlan, arriving: KeptKeys) -> tuple[KeptCall, ...]:
    """Kernel calls over keys that arrive: all spans of one query span that keep as many of its
    queries are sequences together; what is left of a query span is for further calls."""
    plan, tasks, kept = stepped.plan, stepped.plan.tasks, stepped.kept
    assert kept is not None, "tasks that drop nothing"
    offset = plan.document_offsets[tasks.document]
    rows = plan.placement.first_rows(plan.own_pieces)
    begin = find_tokens(plan.placement, plan.document_offsets, rows, offset + tasks.q_start).row
    # Rows that arrive are those of each span, head by head.
    sizes = arriving.counts.ravel()
    first = (np.cumsum(sizes) - sizes).reshape(arriving.counts.shape)
    number_of = {start: number for number, start in enumerate(arriving.start.tolist())}
    groups: dict[KeptSpan, list[int]] = {}
    order = np.argsort(tasks.kv_start, kind="stable")
    for task in order.tolist():
        end = int(begin[task] + tasks.q_end[task] - tasks.q_start[task])
        span = KeptSpan(int(begin[task]), end, tuple(kept.q[task].tolist()))
        groups.setdefault(span, []).append(number_of[int((offset + tasks.kv_start)[task])])
    # A call has each query once.
    calls: list[dict[KeptSpan, list[int]]] = []
    for span, numbers in groups.items():
        free = (each for each in calls if all(other.begin != span.begin for other in each))
        call = next(free, None)
        if call is None:
            calls.append(call := {})
        call[span] = numbers
    return tuple(_call(call, first, arriving.counts) for call in calls)


def _call(groups: dict[KeptSpan, list[int]], first: Int64s, counts: Int64s) -> KeptCall:
    keys, lengths = [], []
    for span, numbers in groups.items():
        for head, queries in enumerate(span.counts):
            keys.append(expand_ranges(first[numbers, head], counts[numbers, head]))
            lengths.append([queries, len(keys[-1])])
    edges = np.zeros((2, len(lengths) + 1), dtype=np.int32)
    np.cumsum(np.array(lengths).T, axis=1, out=edges[:, 1:])
    return KeptCall(
        tuple(groups),
        index_of(np.concatenate(keys)),
        torch.from_numpy(edges[0]),
        torch.from_numpy(edges[1]),
    )
