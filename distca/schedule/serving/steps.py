"""Plans of a model's steps in inference, where keys and values stay on the rank that made them.

A step feeds new tokens of some sequences to the model: a prompt, a turn's new tokens, or one
decoded token of each. Every new token has an owner, which runs its linear layers and keeps its keys
and values; those of earlier tokens lie where earlier steps left them, however unevenly. A strategy
says who computes attention (context parallelism of Meta's, Sections 3.4 and 3.5):

* **pass-kv**: queries are computed at home, and keys and values travel to them. For a prompt that
  is long beside what is cached;
* **pass-q**: queries travel to keys and values, and partial outputs come back, to merge by LSE.
  For few new tokens over a long cache, as in decoding.

A baseline of the papers is beside them:

* **all-gather**: every rank is sent all keys and values before it computes, those that its queries
  don't see, too, as tensor and sequence parallelism has it (KV-Runahead, Section 2).

So is SP-NTP of CSPS (`distca.schedule.serving.csps.head_scatter`):

* **sp-ntp**: queries, keys and values of a group of heads travel to the group's rank, and its
  outputs back.

Under a window all are pass-kv, since few keys are seen, and all are near; but where every sequence
is fed one token, as in decoding, queries travel then, too: one row each rather than a window's.

Of cached positions, all new queries see those that the first one sees, unless a window hides them
from later ones; and none sees those before its window. Which is which among them matters to nobody,
so a plan numbers them rank by rank: it has one piece of each rank, in the order of the rank's rows,
however short the stripes are that decoding left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from distca.plan import BLOCK, Mask, Placement, Plan, SteppedPlan
from distca.plan.span import Int64s, expand_ranges
from distca.schedule.base import tasks_at_home
from distca.schedule.baselines.context_parallel import shard_documents
from distca.schedule.serving.csps.head_scatter import scatter_heads
from distca.schedule.serving.rings import pass_keys, pass_keys_in_window, pass_queries

Strategy = Literal["pass-kv", "pass-q", "all-gather", "sp-ntp"]
"""What travels in a step: keys and values that are seen, queries, all keys and values, or groups of
heads."""

Sharding = Callable[[Int64s, Int64s], Placement]
"""Shards new tokens of sequences, given their starts and their ends, int64 `[sequences]`."""

STRATEGIES: tuple[Strategy, ...] = ("pass-kv", "pass-q")
"""Those between which a choice is made."""


def nobody_holds(world_size: int) -> Placement:
    """Returns the placement of no tokens at all."""
    nothing = np.zeros(0, dtype=np.int64)
    return Placement(nothing, nothing, nothing, nothing, world_size)


def shard_evenly(starts: Int64s, ends: Int64s, world_size: int) -> Placement:
    """Shards new tokens in zigzag, so that all ranks own equally many, and equally early ones.

    Args:
        starts: first new position of each sequence, int64 `[sequences]`.
        ends: end of the new positions of each sequence, likewise; no new tokens are possible.
        world_size: ranks that there are. Sequences shorter than that leave some without tokens.
    """
    having = np.flatnonzero(ends > starts)
    whole = Placement(having, starts[having], ends[having], np.zeros_like(having), 1)
    return shard_documents(whole, world_size)


def shard_in_stripes(
    starts: Int64s, ends: Int64s, sequences: Int64s, stripe: int, world_size: int
) -> Placement:
    """Shards new tokens round robin in stripes of positions, so that decoding fills ranks evenly.

    Args:
        starts: first new position of each sequence, int64 `[sequences]`.
        ends: end of the new positions of each sequence, likewise.
        sequences: number of each sequence, by which the ranks of their first stripes differ.
        stripe: consecutive positions that one rank owns.
        world_size: ranks that there are.

    Raises:
        ValueError: the stripe is no positive number.
    """
    if stripe < 1:
        raise ValueError(f"stripe {stripe}: give the positions that one rank owns, at least 1")
    first, last = starts // stripe, -(-ends // stripe)
    stripes = np.maximum(last - first, 0) * (ends > starts)
    document = np.repeat(np.arange(len(starts), dtype=np.int64), stripes)
    number = expand_ranges(first, stripes)
    return Placement(
        document,
        np.maximum(number * stripe, starts[document]),
        np.minimum((number + 1) * stripe, ends[document]),
        (number + sequences[document]) % world_size,
        world_size,
    )


def step_plan(
    held: Placement,
    new: Placement,
    strategy: Strategy,
    mask: Mask,
    block: int = BLOCK,
    in_steps: bool = False,
    head_groups: int = 1,
) -> SteppedPlan:
    """Makes the plan of a step.

    Args:
        held: ranks that hold the keys and values of earlier tokens of the sequences.
        new: owners of the tokens that the step feeds; each sequence has some, which follow those
            that are held.
        strategy: what travels.
        mask: attention mask of the layers that follow the plan.
        block: tokens in a kernel's block.
        in_steps: whether rows travel in steps of the plan, while those of the step before are
            computed; for prefills. Else all at once, which takes less time for few rows.
        head_groups: groups of heads that sp-ntp scatters.
    """
    lengths, prefix, placement = step_tokens(held, new, mask)
    # Of one query all keys in a window are a full rectangle, wherever they are cut.
    single = bool((lengths - prefix <= 1).all())
    groups = head_groups if strategy == "sp-ntp" and mask.window_left is None else 1
    step: Int64s | None = None
    if strategy == "sp-ntp" and mask.window_left is None:
        placement, tasks = scatter_heads(placement, lengths, prefix, groups)
        lengths, prefix = np.tile([lengths, prefix], groups)
    elif strategy == "pass-q" and (mask.window_left is None or single):
        tasks, step = pass_queries(placement, new, mask, in_steps)
    elif not in_steps or strategy == "all-gather":
        tasks = tasks_at_home(new, mask)
    elif mask.window_left is None:
        tasks, step = pass_keys(placement, new, block)
    else:
        tasks, step = pass_keys_in_window(placement, new, mask, block)
    plan = Plan(lengths, placement, tasks, mask, block, strategy, (), prefix, groups)
    if step is None:
        step = np.zeros(len(tasks), dtype=np.int64)
    return SteppedPlan(plan, step, gathers=strategy == "all-gather")


def step_tokens(held: Placement, new: Placement, mask: Mask) -> tuple[Int64s, Int64s, Placement]:
    """Returns the tokens of a step's sequences, those before the new ones, and the owners of all,
    sorted by sequence and position; see `step_plan`."""
    sequences = int(new.document.max(initial=-1)) + 1
    lengths, prefix = np.zeros((2, sequences), dtype=np.int64)
    np.maximum.at(lengths, new.document, new.end)
    np.maximum.at(prefix, held.document, held.end)
    alike = prefix if mask.window_left is None else mask.first_key(prefix)
    return lengths, prefix, _in_order(Placement.concatenate([_rank_by_rank(held, alike), new]))


def held_after(held: Placement, new: Placement) -> Placement:
    """Returns who holds which keys and values after a step; neighbouring pieces are joined."""
    return _in_order(Placement.concatenate([held, new]).joined())


def in_turn(documents: Int64s, starts: Int64s, rows: Int64s) -> Placement:
    """Places spans rank by rank.

    Args:
        documents: document of each span, int64 `[spans]`.
        starts: start of each, likewise.
        rows: rows of each that each rank has, int64 `[spans, ranks]`.
    """
    span, rank = np.nonzero(rows)
    of_rank = rows[span, rank]
    end = starts[span] + np.cumsum(rows, axis=1)[span, rank]
    return Placement(documents[span], end - of_rank, end, rank, rows.shape[1])


def _rank_by_rank(held: Placement, ends: Int64s) -> Placement:
    """Numbers the positions before each sequence's end anew: those of a rank are one piece."""
    end = ends[held.document]
    rows = np.zeros((len(ends), held.world_size), dtype=np.int64)
    before = np.maximum(np.minimum(held.end, end) - held.start, 0)
    np.add.at(rows, (held.document, held.rank), before)
    together = in_turn(np.arange(len(ends)), np.zeros_like(ends), rows)
    start = np.maximum(held.start, end)
    rest = Placement(held.document, start, held.end, held.rank, held.world_size)
    return Placement.concatenate([together, rest.select(rest.start < rest.end)])


def _in_order(placement: Placement) -> Placement:
    """Sorts pieces by sequence and position: the order in which a rank keeps its rows."""
    return placement.select(np.lexsort((placement.start, placement.document)))


Action = Literal["dispatch", "receive", "compute", "combine"]


class StepEvent(NamedTuple):
    """One event of a call of core attention in steps."""

    action: Action
    step: int


def step_program(steps: int) -> tuple[StepEvent, ...]:
    """Makes the program of a layer's core attention in steps, which all ranks follow.

    *dispatch* starts the exchange of a step's rows; *receive* waits for them; *compute* runs the
    kernels of the step, and starts the return of the outputs of queries from other ranks; *combine*
    waits for outputs that return, and merges them. So the rows of a step travel during the kernels
    of the step before, and outputs return during those of the next. A rank passes rows on that it
    has just received:

        dispatch 0  receive 0  dispatch 1  compute 0  receive 1  dispatch 2  compute 1  combine 0
    """
    events = [StepEvent("dispatch", 0)]
    for step in range(steps):
        events.append(StepEvent("receive", step))
        if step + 1 < steps:
            events.append(StepEvent("dispatch", step + 1))
        events.append(StepEvent("compute", step))
        if step > 0:
            events.append(StepEvent("combine", step - 1))
    return (*events, StepEvent("combine", steps - 1))
