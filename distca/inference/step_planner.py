"""Steps of a model's inference as all ranks know them, and who plans them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from distca.inference.models import ServedModel
from distca.plan import Mask, Placement
from distca.plan.span import Int64s
from distca.schedule.serving import Sharding, shard_evenly
from distca.schedule.serving.accounts import Accounts, Growth, NewBlocks
from distca.schedule.serving.blocks import BlockPool
from distca.schedule.serving.csps.layouts import SharedRows, SplitModel
from distca.schedule.serving.decode import DecodeBatch, plan_decode
from distca.schedule.serving.holdings import Holdings
from distca.schedule.serving.layer_plans import PrefillStrategy, plan_layers
from distca.schedule.serving.prefill_batch import PrefillBatch
from distca.schedule.serving.restripe import Restripe, even_shares, restripe


@dataclass(frozen=True)
class Step:
    """What all ranks know of a step before it runs.

    Attributes:
        parts: prefills and decoded tokens; in each layer their attention runs in this order.
        blocks: blocks that it adds to sequences.
        shared: how ranks that split weights share its rows; None: each has all.
    """

    parts: tuple[PrefillBatch | DecodeBatch, ...]
    blocks: NewBlocks = field(default_factory=dict)
    shared: SharedRows | None = None

    def beside(self, other: Step) -> Step:
        """Both steps as one; the other was planned after this one, and feeds other sequences."""
        return Step(self.parts + other.parts, {**self.blocks, **other.blocks})

    @property
    def sequences(self) -> tuple[int, ...]:
        """Sequences that the step feeds, those of one part after the other."""
        return tuple(sequence for part in self.parts for sequence in part.sequences)

    def bytes_by_sequence(self, model: ServedModel) -> list[int]:
        """Bytes that the step moves for each sequence, in all layers, by its plans."""
        found: list[int] = []
        size = model.tensor_parallel_size
        for part in self.parts:
            if isinstance(part, PrefillBatch):
                moved = part.bytes_by_sequence(model.windows, model.shape, size)
            else:
                layers = Counter(model.windows).items()
                of_masks = [
                    count * part.bytes_by_sequence(Mask(window), model.shape)
                    for window, count in layers
                ]
                moved = size * np.sum(of_masks, axis=0)
            found += moved.tolist()
        if self.shared is not None:
            tokens = [np.sum(part.rows - part.before, axis=1) for part in self.parts]
            found = (self.shared.bytes_by_sequence(np.concatenate(tokens)) + found).tolist()
        return found


class StepPlanner:
    """Plans steps, and knows who holds which keys and values in which blocks: alike on all ranks.

    Args:
        pool: blocks of all ranks.
        masks: masks of the model's layers.
        stripe: consecutive positions of a sequence that one rank owns in decoding.
        sharding: who owns the new tokens of prefills; None: all ranks evenly, in zigzag.
        restripes: whether rows move after prefills, so that all ranks hold equal shares.
        head_groups: groups of heads that sp-ntp scatters.
        split: layers whose weights ranks split, if they share the rows of prefills.
    """

    def __init__(
        self,
        pool: BlockPool,
        masks: Sequence[Mask],
        stripe: int,
        sharding: Sharding | None = None,
        restripes: bool = False,
        head_groups: int = 1,
        split: SplitModel | None = None,
    ) -> None:
        self._restripes, self._head_groups, self._split = restripes, head_groups, split
        self._masks, self._world_size = tuple(masks), pool.world_size
        self._shard = sharding or partial(shard_evenly, world_size=pool.world_size)
        self.holdings, self.accounts = Holdings(pool.world_size, stripe), Accounts(pool)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence whose keys and values are held."""
        return self.holdings.length(sequence)

    def rows_per_rank(self, sequence: int) -> list[int]:
        """Rows of a sequence that each rank holds."""
        if sequence not in self.holdings:
            return [0] * self._world_size
        lines = self.holdings.lines([sequence])
        return [int(n) for n in self.holdings.rows(lines, self.holdings.lengths(lines))[0]]

    def plan(
        self,
        counts: Mapping[int, int],
        strategy: PrefillStrategy,
        decodes: bool,
        sharding: Sharding | None = None,
    ) -> Step:
        """Plans the step that feeds so many new tokens of each sequence, and takes its blocks.

        Args:
            counts: new tokens by sequence, at least 1 each.
            strategy: what travels in a prefill, or who chooses it.
            decodes: whether one token of each is decoded.
            sharding: who owns the new tokens of this prefill; None: as in all others.

        Raises:
            NoFreeBlocks: a rank's pool is too small; nothing has changed.
        """
        sequences = tuple(counts)
        if decodes:
            assert all(count == 1 for count in counts.values()), "one token is decoded at a time"
            decode = plan_decode(self.holdings, sequences, self._masks)
            blocks = self._take(decode)
            self.holdings.note_decoded(self.holdings.lines(sequences))
            return Step((decode,), blocks)
        lines = self.holdings.lines(sequences)
        starts = self.holdings.lengths(lines)
        before = self.holdings.rows(lines, starts)
        ends = starts + np.fromiter(counts.values(), dtype=np.int64, count=len(counts))
        new = (sharding or self._shard)(starts, ends)

        def held(mask: Mask) -> Placement:
            alike = starts if mask.window_left is None else mask.first_key(starts)
            return self.holdings.placement(sequences, alike)

        plans = plan_layers(held, new, self._masks, strategy, head_groups=self._head_groups)
        prefill = PrefillBatch(sequences, plans, new, before)
        blocks = self._take(prefill)
        self.holdings.note(sequences, new)
        shared = None if self._split is None else self._split.share(sum(counts.values()))
        return Step((prefill,), blocks, shared)

    def restripe(self, step: Step) -> tuple[Restripe, NewBlocks] | None:
        """Plans what moves after a prefill, and takes and gives back its blocks.

        Returns:
            What moves, and the blocks that it adds; None: ranks hold equal shares, or may differ.
        """
        prefills = [
            part for part in step.parts if isinstance(part, PrefillBatch) and self._restripes
        ]
        if not prefills:
            return None
        (prefill,) = prefills
        sequences, holdings = prefill.sequences, self.holdings
        held = holdings.placement(sequences)
        move = restripe(sequences, held, prefill.new, holdings.stripe)
        if move is None:
            return None
        for number, sequence in enumerate(sequences):
            holdings.forget_from(sequence, int(prefill.before[number].sum()))
        holdings.note(sequences, move.new)
        growth = Growth(sequences, move.rows(move.before), move.rows(move.after))
        return move, self.accounts.resize(growth)

    def blocks_needed(self, counts: Mapping[int, int], most_new: int) -> Int64s:
        """Blocks that each rank needs for prompts or turns and their whole answers, `[ranks]`.

        Args:
            counts: tokens of each sequence that are fed, beside those that are held.
            most_new: most tokens of an answer; the last is never fed.
        """
        holdings, sequences = self.holdings, tuple(counts)
        starts = np.array([holdings.length(each) for each in sequences], dtype=np.int64)
        ends = starts + np.fromiter(counts.values(), dtype=np.int64, count=len(counts))
        before = np.array([self.rows_per_rank(each) for each in sequences], dtype=np.int64)
        new, numbers = self._shard(starts, ends), np.array(sequences)
        rows = np.zeros_like(before)
        np.add.at(rows, (new.document, new.rank), new.end - new.start)
        shares = rows
        if self._restripes:
            each = zip(before, rows, strict=True)
            shares = np.stack([even_shares(*of_one, holdings.stripe) for of_one in each])
        answers = holdings.in_stripes(numbers, ends, ends + most_new - 1)
        after = np.maximum(before + rows, before + shares + answers)
        growth = Growth(sequences, before, after)
        blocks: Int64s = growth.blocks(self.accounts.pool.block_size).sum(axis=0)
        return blocks

    def _take(self, part: PrefillBatch | DecodeBatch) -> NewBlocks:
        return self.accounts.take(Growth(part.sequences, part.before, part.rows))

    def drop(self, sequence: int) -> None:
        """Forgets a sequence, and gives its blocks back."""
        self.holdings.drop(sequence)
        self.accounts.drop(sequence)
