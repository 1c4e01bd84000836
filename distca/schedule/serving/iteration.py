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
    return _Blocks(feeds, block_size, world_size).rows(ends)


class _Blocks:
    """Blocks of sequences.

    Decoded sequences may be thousands: blocks of those that have few are counted together. Blocks
    of long ones are counted without a copy of them.

    Args:
        feeds: sequences.
        block_size: positions of a block.
        world_size: ranks that there are.
    """

    def __init__(self, feeds: Sequence[ScheduledTokens], block_size: int, world_size: int) -> None:
        self._ranks = [feed.ranks for feed in feeds]
        lengths = np.fromiter(map(len, self._ranks), np.int64, len(feeds))
        self._short, self._long = (
            np.flatnonzero(each) for each in (lengths <= _FEW_BLOCKS, lengths > _FEW_BLOCKS)
        )
        # Owners of the short ones' blocks, and the first of each sequence.
        few = self._ranks
        if len(self._long):
            few = [each for each in self._ranks if len(each) <= _FEW_BLOCKS]
        self._owner = np.concatenate(few) if few else np.zeros(0, dtype=np.int64)
        self._first = np.cumsum(lengths[self._short]) - lengths[self._short]
        self._size, self._world_size = block_size, world_size

    def owners(self, positions: Int64s) -> Int64s:
        """Returns the owner of a position of each sequence, int64 `[sequences]`."""
        block = positions // self._size
        found = np.empty_like(positions)
        found[self._short] = self._owner[self._first + block[self._short]]
        for n in self._long.tolist():
            found[n] = self._ranks[n][block[n]]
        return found

    def rows(self, ends: Int64s) -> Int64s:
        """Returns what `rows_on_ranks` does."""
        if self._world_size == 1:
            return ends[:, None]
        shape = len(ends), self._world_size
        if not ends.any():
            # As what a mask without a window hides. It takes no memory.
            return np.broadcast_to(np.zeros(1, dtype=np.int64), shape)
        full, rest = np.divmod(ends, self._size)
        table = np.zeros(shape, dtype=np.int64)
        few = ends[self._short] > 0
        short, first = self._short[few], self._first[few]
        counts = full[short] + (rest[short] > 0)
        owner = self._owner[expand_ranges(first, counts)]
        rows = np.full(len(owner), self._size)
        rows[np.cumsum(counts) - 1] -= (self._size - rest[short]) * (rest[short] > 0)
        # With two indices this takes twice as long.
        np.add.at(table.reshape(-1), np.repeat(short * self._world_size, counts) + owner, rows)
        for n in self._long.tolist():
            of_blocks = np.bincount(self._ranks[n][: full[n]], minlength=self._world_size)
            table[n] = of_blocks * self._size
            if rest[n]:
                table[n, self._ranks[n][full[n]]] += rest[n]
        return table

    def placed(self, start: Int64s, end: Int64s) -> Placement:
        """Places spans `[start, end)` of the sequences; neighbouring blocks of a rank are one
        piece."""
        first = start // self._size
        blocks = -(-end // self._size) - first
        bounds = zip(self._ranks, first.tolist(), (first + blocks).tolist(), strict=True)
        rank = np.concatenate([ranks[low:high] for ranks, low, high in bounds])
        document = np.repeat(np.arange(len(start)), blocks)
        line = document * self._world_size + rank
        opens = np.ones(len(line), dtype=bool)
        opens[1:] = line[1:] != line[:-1]
        document, rank = document[opens], rank[opens]
        edges = expand_ranges(first, blocks)[opens] * self._size
        starts = np.maximum(edges, start[document])
        ends = end[document]
        goes_on = document[1:] == document[:-1]
        ends[:-1][goes_on] = starts[1:][goes_on]
        return Placement(document, starts, ends, rank, self._world_size)


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
    blocks = _Blocks(feeds, block_size, world_size)
    starts = np.array([feed.start for feed in feeds], dtype=np.int64)
    counts = np.array([feed.count for feed in feeds], dtype=np.int64)
    held, new = blocks.placed(np.zeros_like(starts), starts), blocks.placed(starts, starts + counts)
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
    sequences = tuple(feed.sequence for feed in feeds)
    return PrefillBatch(sequences, plans, new, blocks.rows(starts))


def _plan_decode(
    feeds: Sequence[ScheduledTokens], masks: Sequence[Mask], block_size: int, world_size: int
) -> DecodeBatch:
    positions = np.array([feed.start for feed in feeds], dtype=np.int64)
    blocks = _Blocks(feeds, block_size, world_size)
    return DecodeBatch(
        tuple(feed.sequence for feed in feeds),
        positions,
        blocks.owners(positions),
        blocks.rows(positions),
        {mask: blocks.rows(mask.first_key(positions)) for mask in masks},
    )


def decode_seconds(decode: DecodeBatch, mask: Mask, cost_model: CostModel) -> Floats:
    """Predicts the seconds in which each rank attends to keys of decoded tokens, in a layer of a
    mask, float64 `[ranks]`."""
    rows, hidden = decode.rows, decode.hidden[mask]
    # Most sequences lie on one rank: few numbers of these large tables differ.
    sequence, rank = np.divmod(np.flatnonzero(rows != hidden), rows.shape[1])
    keys = rows[sequence, rank] - hidden[sequence, rank]
    seconds = cost_model.seconds(np.ones_like(keys), keys, keys)
    return np.bincount(rank, weights=seconds, minlength=rows.shape[1])
