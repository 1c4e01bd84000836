"""Plans of a serving engine's iterations: chunks of prompts, and decoded tokens of other sequences.

Chunks have a plan of tasks, in steps; decoded tokens one that is told by numbers of rows. What a
sequence has on one rank alone is computed there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.cost.volume import AttentionShape
from distca.plan import Mask, Placement
from distca.plan.span import Int64s
from distca.schedule.serving.decode import DecodeBatch
from distca.schedule.serving.layer_plans import PrefillStrategy, plan_layers
from distca.schedule.serving.prefill_batch import PrefillBatch


@dataclass(frozen=True)
class BatchEntry:
    """A sequence's part of an iteration.

    Attributes:
        sequence: number of the sequence.
        start: position of the first token that is fed.
        count: tokens that are fed.
        ranks: owners of the sequence's blocks, those of its new tokens included, int64 `[blocks]`.
        dense: whether nothing is dropped of its chunks, whatever the strategy.
    """

    sequence: int
    start: int
    count: int
    ranks: Int64s
    dense: bool = False

    def rows(self, end: int, block_size: int, world_size: int) -> Int64s:
        """Returns the rows of the positions before `end` on each rank, int64 `[ranks]`."""
        if world_size == 1:
            return np.array([end], dtype=np.int64)
        full, rest = divmod(end, block_size)
        rows = np.bincount(self.ranks[:full], minlength=world_size) * block_size
        if rest:
            rows[self.ranks[full]] += rest
        return rows


@dataclass(frozen=True)
class BatchPlan:
    """The plans of an iteration.

    Attributes:
        chunks: chunks of prompts; None: there are none.
        decode: decoded tokens; None: there are none.
        new_tokens: tokens that each rank owns, int64 `[ranks]`.
        members: ranks that take part.
    """

    chunks: PrefillBatch | None
    decode: DecodeBatch | None
    new_tokens: Int64s
    members: frozenset[int]

    @property
    def parts(self) -> tuple[PrefillBatch | DecodeBatch, ...]:
        """What there is of both, in the order in which a layer's attention runs."""
        return tuple(each for each in (self.chunks, self.decode) if each is not None)


def bytes_by_sequence(
    parts: Sequence[PrefillBatch | DecodeBatch],
    windows: Sequence[int | None],
    shape: AttentionShape,
    tensor_ranks: int,
) -> list[int]:
    """Returns the bytes that all layers move for each sequence, those of one part after the other.

    Args:
        parts: parts of an iteration.
        windows: for each layer how many earlier tokens a query sees; None: all.
        shape: heads of one tensor-parallel rank.
        tensor_ranks: tensor-parallel ranks, whose bytes are added up.
    """
    found: list[int] = []
    for part in parts:
        if isinstance(part, PrefillBatch):
            moved = part.bytes_by_sequence(windows, shape, tensor_ranks)
        else:
            of_masks = [
                count * part.bytes_by_sequence(Mask(window), shape)
                for window, count in Counter(windows).items()
            ]
            moved = tensor_ranks * np.sum(of_masks, axis=0)
        found += moved.tolist()
    return found


def plan_iteration(
    parts: Sequence[BatchEntry],
    masks: Sequence[Mask],
    block_size: int,
    world_size: int,
    strategy: PrefillStrategy,
    head_groups: int = 1,
) -> BatchPlan:
    """Plans an iteration.

    Args:
        parts: what is fed, at least one.
        masks: masks of the model's layers.
        block_size: positions of a block.
        world_size: ranks that there are.
        strategy: what travels in chunks of prompts, or who chooses it.
        head_groups: groups of heads that sp-ntp scatters.
    """
    decoded = [part for part in parts if part.count == 1 and part.start]
    chunked = [part for part in parts if part.count > 1 or not part.start]
    members: set[int] = set()
    new_tokens = np.zeros(world_size, dtype=np.int64)
    chunks = decode = None
    if chunked:
        chunks = _plan_chunks(chunked, masks, block_size, world_size, strategy, head_groups)
        members |= chunks.members()
        new_tokens += chunks.new.tokens_per_rank()
    if decoded:
        decode = _plan_decode(decoded, masks, block_size, world_size)
        members |= {*decode.owners.tolist()}
        for mask in masks:
            members |= {*np.flatnonzero(decode.away(mask).any(axis=0)).tolist()}
        new_tokens += np.bincount(decode.owners, minlength=world_size)
    return BatchPlan(chunks, decode, new_tokens, frozenset(members))


def _plan_chunks(
    parts: Sequence[BatchEntry],
    masks: Sequence[Mask],
    block_size: int,
    world_size: int,
    strategy: PrefillStrategy,
    head_groups: int,
) -> PrefillBatch:
    held = _owned([(part, 0, part.start) for part in parts], block_size, world_size)
    new = _owned(
        [(part, part.start, part.start + part.count) for part in parts], block_size, world_size
    )

    if not isinstance(strategy, str) and len({*held.rank.tolist(), *new.rank.tolist()}) == 1:
        # Nothing travels: short requests do not wait for a choice.
        strategy = "pass-kv"
    dense = np.array([part.dense for part in parts])
    plans = plan_layers(lambda _: held, new, masks, strategy, dense, head_groups)
    before = np.stack([part.rows(part.start, block_size, world_size) for part in parts])
    return PrefillBatch(tuple(part.sequence for part in parts), plans, new, before)


def _plan_decode(
    parts: Sequence[BatchEntry], masks: Sequence[Mask], block_size: int, world_size: int
) -> DecodeBatch:
    positions = np.array([part.start for part in parts], dtype=np.int64)

    def rows(ends: Int64s) -> Int64s:
        each = zip(parts, ends.tolist(), strict=True)
        return np.stack([part.rows(end, block_size, world_size) for part, end in each])

    return DecodeBatch(
        tuple(part.sequence for part in parts),
        positions,
        np.array([part.ranks[part.start // block_size] for part in parts], dtype=np.int64),
        rows(positions),
        {mask: rows(mask.first_key(positions)) for mask in masks},
    )


def _owned(
    spans: Sequence[tuple[BatchEntry, int, int]], block_size: int, world_size: int
) -> Placement:
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
