"""Random documents that share prefixes, and which keys their queries see."""

from __future__ import annotations

import numpy as np

from distca.plan import Mask, Plan
from distca.plan.span import Int64s


def random_nodes(random: np.random.Generator, most: int = 12) -> tuple[Int64s, Int64s]:
    """Draws nodes of trees.

    Returns:
        Own lengths and parents, int64 `[nodes]` each.
    """
    count = int(random.integers(1, most + 1))
    kind = random.choice(["any", "chain", "star", "none"])
    longest = int(random.choice([1, 9, 70, 300]))
    parents = np.full(count, -1, dtype=np.int64)
    for n in range(count):
        if n and kind != "none":
            others = {"chain": n - 1, "star": 0, "any": int(random.integers(-1, n))}
            parents[n] = others[kind]
    return random.integers(1, longest + 1, count), parents


def random_family(random: np.random.Generator, most: int = 12) -> tuple[Int64s, Int64s, Int64s]:
    """Draws documents, some of them with parents that they branch off from anywhere.

    Returns:
        Lengths with those of the parents, parents, and tokens that are the parents', int64
        `[documents]` each.
    """
    own, parents = random_nodes(random, most)
    prefix = np.zeros_like(own)
    for n, parent in enumerate(parents.tolist()):
        if parent >= 0:
            whole = random.random() < 0.3
            prefix[n] = prefix[parent] + (
                own[parent] if whole else random.integers(1, own[parent] + 1)
            )
    return prefix + own, parents, prefix


def random_shift(random: np.random.Generator, own: Int64s) -> Int64s:
    """Draws which documents see all of themselves: see `Plan.query_shift`."""
    return np.where(random.random(len(own)) < 0.4, own, 0)


def tokens_of_path(plan: Plan, document: int) -> Int64s:
    """Global positions of a document's tokens, its parent's first."""
    assert plan.parents is not None
    assert plan.cached_prefix is not None
    first, length = plan.cached_prefix[document], plan.lengths[document]
    own: Int64s = plan.document_offsets[document] + np.arange(first, length)
    parent = int(plan.parents[document])
    return own if parent < 0 else np.concatenate([tokens_of_path(plan, parent)[:first], own])


def visible(plan: Plan, mask: Mask) -> Int64s:
    """How often each query should meet each key, by global positions, `[tokens, tokens]`."""
    total = int(plan.own_lengths.sum())
    found = np.zeros((total, total), dtype=np.int64)
    for document, length in enumerate(plan.lengths.tolist()):
        path = tokens_of_path(plan, document)
        two_way = plan.query_shift is not None and plan.query_shift[document] > 0
        for position in range(length - int(plan.own_lengths[document]), length):
            last = length if two_way else position + 1
            keys = path[int(mask.first_key(position)) : last]
            found[path[position], keys] = 1
    return found


def met(plan: Plan) -> Int64s:
    """How often each query meets each key in the tasks, by global positions, as kernels see them:
    each task's keys are its ranges of `Plan.key_ranges`, one after the other."""
    total, mask, t, ranges = int(plan.own_lengths.sum()), plan.mask, plan.tasks, plan.key_ranges
    found = np.zeros((total, total), dtype=np.int64)
    for n in range(len(t)):
        keys = np.concatenate(
            [
                np.arange(start, end)
                for task, _, start, end in zip(*ranges, strict=True)
                if task == n
            ]
        )
        assert len(keys) == t.kv_end[n] - t.kv_start[n]
        queries = plan.query_offsets[t.document[n]] + np.arange(t.q_start[n], t.q_end[n])
        for row, query in enumerate(queries.tolist()):
            if not t.ends_on_diagonal[n]:
                found[query, keys] += 1
                continue
            # Aligned to the lower right, within the window.
            last = len(keys) - len(queries) + row
            first = 0 if mask.window_left is None else max(last - mask.window_left, 0)
            found[query, keys[first : last + 1]] += 1
    return found
