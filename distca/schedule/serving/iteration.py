"""Plans of a serving engine's iterations: chunks of prompts, and decoded tokens of other sequences.

Chunks have a plan of tasks, in steps. Decoded tokens have one that consists of numbers of rows.
What a sequence has on one rank alone is computed there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.plan import Mask, Placement
from distca.plan.span import Floats, Int64s, expand_ranges
from distca.schedule.serving.balanced import BalancedTiles
from distca.schedule.serving.batches import DecodeBatch, PrefillBatch, PrefillStrategy, plan_layers
from distca.schedule.serving.scheduled import ScheduledTokens

_FEW_BLOCKS = 32
"""Full blocks of a sequence up to which it is counted together with others."""


@dataclass(frozen=True)
class BatchPlan:
    """The plans of an iteration.

    Attributes:
        prefill: chunks of prompts, or None.
        decode: decoded tokens, or None.
        new_tokens: tokens that each rank owns, int64 `[ranks]`.
        members: ranks that take part.
    """

    prefill: PrefillBatch | None
    decode: DecodeBatch | None
    new_tokens: Int64s
    members: frozenset[int]

    @property
    def parts(self) -> tuple[PrefillBatch | DecodeBatch, ...]:
        """What there is of both, in the order in which a layer's attention runs."""
        return tuple(each for each in (self.prefill, self.decode) if each is not None)


def rows_on_ranks(
    feeds: Sequence[ScheduledTokens], ends: Int64s, block_size: int, world_size: int
) -> Int64s:
    """Returns the rows of the positions before `ends[i]` of sequence `i` on each rank.

    Shapes `[feeds]`, `[feeds]` -> int64 `[feeds, ranks]`.
    """
    if world_size == 1:
        return ends[:, None]
    if not ends.any():
        # As what a mask without a window hides.
        return np.zeros((len(feeds), world_size), dtype=np.int64)
    full, rest = np.divmod(ends, block_size)
    # Short sequences may be thousands. Blocks of long ones are counted without a copy of them.
    short = full <= _FEW_BLOCKS
    some, counts = np.flatnonzero(short), full[short]
    owners = [
        feeds[n].ranks[:count] for n, count in zip(some.tolist(), counts.tolist(), strict=True)
    ]
    cells = np.repeat(some, counts) * world_size
    if owners:
        cells += np.concatenate(owners)
    table = np.bincount(cells, minlength=len(feeds) * world_size).reshape(len(feeds), world_size)
    for n in np.flatnonzero(~short).tolist():
        table[n] = np.bincount(feeds[n].ranks[: full[n]], minlength=world_size)
    table *= block_size
    cut = np.flatnonzero(rest)
    if len(cut):
        owner = [feeds[n].ranks[full[n]] for n in cut.tolist()]
        table[cut, owner] += rest[cut]
    return table


def plan_iteration(
    feeds: Sequence[ScheduledTokens],
    masks: Sequence[Mask],
    block_size: int,
    world_size: int,
    strategy: PrefillStrategy,
    head_groups: int = 1,
) -> BatchPlan:
    """Plans an iteration.

    Args:
        feeds: what is fed, at least one.
        masks: masks of the model's layers.
        block_size: positions of a block.
        world_size: ranks that there are.
        strategy: what travels in chunks of prompts, or who chooses it.
        head_groups: groups of heads that sp-ntp scatters.
    """
    decoded = [feed for feed in feeds if feed.count == 1 and feed.start]
    chunked = [feed for feed in feeds if feed.count > 1 or not feed.start]
    members: set[int] = set()
    new_tokens = np.zeros(world_size, dtype=np.int64)
    prefill = decode = None
    if decoded:
        decode = _plan_decode(decoded, masks, block_size, world_size)
        members |= {*decode.owners.tolist()}
        for mask in masks:
            members |= {*np.flatnonzero(decode.away(mask).any(axis=0)).tolist()}
        new_tokens += np.bincount(decode.owners, minlength=world_size)
    if chunked:
        how = strategy, head_groups
        prefill = _plan_prefill(chunked, masks, block_size, world_size, *how, decode)
        members |= prefill.members()
        new_tokens += prefill.new.tokens_per_rank()
    return BatchPlan(prefill, decode, new_tokens, frozenset(members))


def _plan_prefill(
    feeds: Sequence[ScheduledTokens],
    masks: Sequence[Mask],
    block_size: int,
    world_size: int,
    strategy: PrefillStrategy,
    head_groups: int,
    decode: DecodeBatch | None,
) -> PrefillBatch:
    held = _owned([(feed, 0, feed.start) for feed in feeds], block_size, world_size)
    new = _owned(
        [(feed, feed.start, feed.start + feed.count) for feed in feeds],
        block_size,
        world_size,
    )
    busy = None
    if isinstance(strategy, BalancedTiles):
        cost_model = strategy.config.cost_model
        if decode is not None and cost_model is not None:
            busy = {mask: decode_seconds(decode, mask, cost_model) for mask in masks}
    elif not isinstance(strategy, str) and len({*held.rank.tolist(), *new.rank.tolist()}) == 1:
        # Nothing travels: short requests do not wait for a choice.
        strategy = "pass-kv"
    dense = np.array([feed.dense for feed in feeds])
    plans = plan_layers(held, new, masks, strategy, dense, head_groups, busy)
    starts = np.array([feed.start for feed in feeds], dtype=np.int64)
    before = rows_on_ranks(feeds, starts, block_size, world_size)
    return PrefillBatch(tuple(feed.sequence for feed in feeds), plans, new, before)


def _plan_decode(
    feeds: Sequence[ScheduledTokens], masks: Sequence[Mask], block_size: int, world_size: int
) -> DecodeBatch:
    positions = np.array([feed.start for feed in feeds], dtype=np.int64)

    def rows(ends: Int64s) -> Int64s:
        return rows_on_ranks(feeds, ends, block_size, world_size)

    return DecodeBatch(
        tuple(feed.sequence for feed in feeds),
        positions,
        np.array([feed.ranks[feed.start // block_size] for feed in feeds], dtype=np.int64),
        rows(positions),
        {mask: rows(mask.first_key(positions)) for mask in masks},
    )


def decode_seconds(decode: DecodeBatch, mask: Mask, cost_model: CostModel) -> Floats:
    """Predicts the seconds in which each rank attends to keys of decoded tokens, in a layer of a
    mask, float64 `[ranks]`."""
    seen = decode.rows - decode.hidden[mask]
    sequence, rank = np.nonzero(seen)
    keys = seen[sequence, rank]
    seconds = cost_model.seconds(np.ones_like(keys), keys, keys)
    return np.bincount(rank, weights=seconds, minlength=seen.shape[1])


def _owned(
    spans: Sequence[tuple[ScheduledTokens, int, int]], block_size: int, world_size: int
) -> Placement:
    """Owners of spans `[start, end)` of sequences; neighbouring blocks of a rank are one piece."""
    start, end = (np.array([span[n] for span in spans], dtype=np.int64) for n in (1, 2))
    first, last = start // block_size, -(-end // block_size)
    bounds = zip(spans, first.tolist(), last.tolist(), strict=True)
    rank = np.concatenate([feed.ranks[low:high] for (feed, *_), low, high in bounds])
    document = np.repeat(np.arange(len(spans)), last - first)
    opens = np.flatnonzero(np.diff(document * world_size + rank, prepend=-1))
    document, rank = document[opens], rank[opens]
    starts = np.maximum(expand_ranges(first, last - first)[opens] * block_size, start[document])
    ends = end[document]
    goes_on = document[1:] == document[:-1]
    ends[:-1][goes_on] = starts[1:][goes_on]
    return Placement(document, starts, ends, rank, world_size)
