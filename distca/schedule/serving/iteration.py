"""Plans of a serving engine's iterations: chunks of prompts and decoded tokens in one plan.

Sequences that lie on one rank are computed there. Chunks of others follow a strategy, and decoded
tokens of others travel to the keys (pass-Q).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.plan import Mask, Placement, Plan, Tasks
from distca.plan.span import Int64s
from distca.schedule.serving.steps import Strategy, step_plan


@dataclass(frozen=True)
class Part:
    """A sequence's part of an iteration.

    Attributes:
        sequence: number of the sequence.
        start: position of the first token that is fed.
        count: tokens that are fed.
        ranks: owners of the sequence's blocks, those of its new tokens included, int64 `[blocks]`.
        decodes: whether the last token alone is fed, once the prompt is computed.
    """

    sequence: int
    start: int
    count: int
    ranks: Int64s
    decodes: bool


@dataclass(frozen=True)
class IterationPlan:
    """The plans of an iteration's layers.

    Attributes:
        sequences: sequences that the iteration feeds, in the order of the plans' documents.
        plans: plan of the layers of each mask.
        new: owners of the new tokens.
    """

    sequences: tuple[int, ...]
    plans: Mapping[Mask, Plan]
    new: Placement

    def members(self) -> frozenset[int]:
        """Ranks that own new tokens, or compute or send something."""
        found = {*self.new.rank.tolist()}
        for plan in self.plans.values():
            found |= {*plan.tasks.server.tolist()}
            for segments in (plan.q_segments, plan.kv_segments):
                found |= {*segments.owner.tolist()}
        return frozenset(found)


def plan_iteration(
    parts: Sequence[Part],
    masks: Sequence[Mask],
    block_size: int,
    world_size: int,
    strategy: Strategy,
) -> IterationPlan:
    """Plans an iteration.

    Args:
        parts: what is fed, at least one.
        masks: masks of the model's layers.
        block_size: positions of a block.
        world_size: ranks that there are.
        strategy: what travels in chunks of prompts.
    """
    held = _owned([(part, 0, part.start) for part in parts], block_size, world_size)
    new = _owned(
        [(part, part.start, part.start + part.count) for part in parts], block_size, world_size
    )
    stays = np.array([len({*part.ranks.tolist()}) == 1 for part in parts])
    to_keys = ~stays & np.array([part.decodes or strategy == "pass-q" for part in parts])
    plans = {mask: _mixed(held, new, mask, to_keys) for mask in masks}
    return IterationPlan(tuple(part.sequence for part in parts), plans, new)


def _owned(spans: Sequence[tuple[Part, int, int]], block_size: int, world_size: int) -> Placement:
    """Owners of spans `[start, end)` of sequences; neighbouring blocks of a rank are one piece."""
    columns = []
    for document, (part, start, end) in enumerate(spans):
        blocks = np.arange(start // block_size, -(-end // block_size))
        rank = part.ranks[blocks]
        opens = np.flatnonzero(np.diff(rank, prepend=-1))
        starts = np.maximum(blocks[opens] * block_size, start)
        ends = np.append(starts[1:], end)[: len(starts)]
        columns.append((np.full_like(starts, document), starts, ends, rank[opens]))
    table = [np.concatenate(column) for column in zip(*columns, strict=True)]
    return Placement(table[0], table[1], table[2], table[3], world_size)


def _mixed(held: Placement, new: Placement, mask: Mask, to_keys: np.ndarray) -> Plan:
    """Plans some documents with queries that travel to the keys, and the others the other way."""
    plans = {name: step_plan(held, new, name, mask) for name in _used(to_keys)}
    if len(plans) == 1:
        return next(iter(plans.values()))
    tasks = [
        plan.tasks[to_keys[plan.tasks.document] == (name == "pass-q")]
        for name, plan in plans.items()
    ]
    return replace(plans["pass-kv"], tasks=Tasks.concatenate(tasks), scheduler="pass-kv, pass-q")


def _used(to_keys: np.ndarray) -> list[Strategy]:
    both: list[Strategy] = ["pass-kv", "pass-q"]
    return [name for name in both if (to_keys == (name == "pass-q")).any()]
