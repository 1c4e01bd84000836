"""The plan of a prefill from near to far: which keys travel in which step, and how many of them.

Near tokens are on near ranks (`distca.schedule.serving.csps.levels`). Queries stay at home. In step
0 a rank computes those that see its own keys; then those of its node come, of its rack, and of
other racks. The keys of a level are cut into micro-partitions, a step each: one is on its way while
the one before is computed.

The paper has three phases, since its ranks exchange heads. Here outputs are at home and the third,
their return, has no bytes; the program of a plan's steps has it all the same, for plans whose
queries travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.plan import BLOCK, KeptRows, Mask, Placement, Plan, SteppedPlan
from distca.plan.span import Bools, Int64s, distinct, expand_ranges
from distca.schedule.serving.csps.levels import Levels
from distca.schedule.serving.csps.sparsity import OfHeads, Sparsity, kept_count
from distca.schedule.serving.rings import Stepped, tasks_of, visible_pieces
from distca.schedule.serving.steps import step_plan, step_tokens

NAME = "csps"


@dataclass(frozen=True)
class NearToFar:
    """A strategy of prefills: keys travel from near to far, and of far ones only some.

    Attributes:
        levels: how far ranks are from each other, and who has which tokens.
        sparsity: shares of rows that are kept.
        windows: for each layer how many earlier tokens a query sees; None: all. Layers with a
            window drop nothing.
        partitions: micro-partitions of each level from level 1 on; the last is that of all others.

    Raises:
        ValueError: there are fewer than one partition.
    """

    levels: Levels
    sparsity: Sparsity
    windows: tuple[int | None, ...]
    partitions: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        if not self.partitions or min(self.partitions) < 1:
            raise ValueError(
                f"{', '.join(map(str, self.partitions)) or 'no'} micro-partitions: give at least 1"
            )

    def shard(self, starts: Int64s, ends: Int64s) -> Placement:
        """Shards new tokens; see `Levels.shard`."""
        return self.levels.shard(starts, ends)

    def plan(self, held: Placement, new: Placement, mask: Mask, block: int = BLOCK) -> SteppedPlan:
        """Plans the layers of a mask that drop nothing; see `step_plan`."""
        if mask.window_left is not None:
            return step_plan(held, new, "pass-kv", mask, block, in_steps=True)
        lengths, prefix, placement = step_tokens(held, new, mask)
        tasks, step = pass_near_to_far(placement, new, self.levels, self.partitions, block)
        plan = Plan(lengths, placement, tasks, mask, block, NAME, cached_prefix=prefix)
        return SteppedPlan(plan, step, relays=False)

    def sparse_plans(
        self, dense: SteppedPlan, whole: Bools | None = None
    ) -> Mapping[int, SteppedPlan]:
        """Plans of the layers that drop rows, by number; layers that drop the same rows share one.

        Args:
            dense: plan of the layers without a window.
            whole: sequences that drop nothing, bool `[sequences]`, or None.
        """
        by_ratios: dict[tuple[object, ...], SteppedPlan] = {}
        plans: dict[int, SteppedPlan] = {}
        if whole is not None and whole.all():
            return plans
        for layer, window in enumerate(self.windows):
            if window is None and self.sparsity.drops_in(layer):
                ratios = self.sparsity.keys[layer], self.sparsity.queries[layer]
                if ratios not in by_ratios:
                    by_ratios[ratios] = thinned(dense, self.levels, *ratios, whole)
                plans[layer] = by_ratios[ratios]
        return plans


def pass_near_to_far(
    placement: Placement, new: Placement, levels: Levels, partitions: Sequence[int], block: int
) -> Stepped:
    """Makes tasks at home, to which keys travel level by level, in micro-partitions, and the step
    of each.

    Args:
        placement: all pieces, sorted by sequence and position.
        new: pieces that have queries.
        levels: how far ranks are from each other.
        partitions: see `NearToFar`.
        block: tokens in a kernel's block, on whose multiples partitions are cut.
    """
    q, kv = visible_pieces(placement, new)
    server = new.rank[q]
    level = levels.of(placement.rank[kv], server)
    tasks = tasks_of(placement, new, q, kv, server)
    of_level = np.array(partitions)[
        np.minimum(np.arange(level.max(initial=0)), len(partitions) - 1)
    ]
    parts = np.concatenate([np.ones(1, dtype=np.int64), of_level])
    # Levels begin one after the other, the own rows in step 0.
    begins = np.cumsum(parts) - parts
    count = parts[level]
    task = np.repeat(np.arange(len(count)), count)
    number = expand_ranges(np.zeros_like(count), count)
    start, rows = tasks.kv_start[task], (tasks.kv_end - tasks.kv_start)[task]

    def cut(at: Int64s) -> Int64s:
        inner = (start + rows * at // count[task] + block // 2) // block * block
        ends = (at == 0) | (at == count[task])
        return np.where(ends, start + rows * (at > 0), np.clip(inner, start, start + rows))

    step = begins[level[task]] + number
    tasks = replace(tasks[task], kv_start=cut(number), kv_end=cut(number + 1))
    some = tasks.kv_end > tasks.kv_start
    tasks, step = tasks[some], step[some]
    return tasks, np.searchsorted(distinct(step), step)


def thinned(
    stepped: SteppedPlan,
    levels: Levels,
    keys: OfHeads,
    queries: OfHeads,
    whole: Bools | None = None,
) -> SteppedPlan:
    """Says how many rows each task of a plan keeps.

    Args:
        stepped: plan whose queries are at home.
        levels: how far ranks are from each other.
        keys: share of keys that is kept, by key-value head and level.
        queries: share of queries, likewise.
        whole: sequences that drop nothing, bool `[sequences]`, or None.
    """
    plan, t = stepped.plan, stepped.plan.tasks
    owner = plan.owners(plan.document_offsets[t.document] + t.kv_start).rank
    of_keys, of_queries = np.array(keys), np.array(queries)
    level = np.minimum(levels.of(owner, t.server), of_keys.shape[1] - 1)
    if whole is not None:
        level = np.where(whole[t.document], 0, level)
    return replace(
        stepped,
        kept=KeptRows(
            kept_count(of_queries[:, level].T, (t.q_end - t.q_start)[:, None]),
            kept_count(of_keys[:, level].T, (t.kv_end - t.kv_start)[:, None]),
        ),
    )
