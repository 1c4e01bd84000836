"""Steps of a model's inference, planned as an engine plans them, with no requests and no scheduler.

Blocks of new tokens are shared out in zigzag, or by a chain; those of decoded tokens go round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from distca.inference.model_runner import ModelRunner
from distca.plan import Mask
from distca.schedule.serving import shard_evenly
from distca.schedule.serving.batches import Batch, PrefillStrategy
from distca.schedule.serving.csps.layouts import SplitModel
from distca.schedule.serving.csps.levels import Levels
from distca.schedule.serving.iteration import plan_iteration
from distca.schedule.serving.partitions import Chain
from distca.schedule.serving.scheduled import ScheduledTokens


class PlannedSteps:
    """Sequences and their blocks, the same on all ranks.

    Args:
        masks: masks of the model's layers.
        ranks: ranks that share each sequence.
        block_size: tokens of a block.
        split: layers whose weights processes split, if they share the rows of prefills.
        runner: model that runs the batches on a rank, which is given its blocks, or None.
    """

    def __init__(
        self,
        masks: Sequence[Mask],
        ranks: int,
        block_size: int,
        split: SplitModel | None = None,
        runner: ModelRunner | None = None,
    ) -> None:
        self._runner = runner
        self._masks, self._ranks, self._size, self._split = masks, ranks, block_size, split
        self._lengths: dict[int, int] = {}
        self._owners: dict[int, list[int]] = {}
        self._taken = [0] * ranks

    def plan(
        self,
        counts: Mapping[int, int],
        strategy: PrefillStrategy = "pass-kv",
        chain: Chain | Levels | None = None,
    ) -> Batch:
        """Plans the batch that feeds more tokens of sequences.

        Args:
            counts: new tokens by sequence; one token of a sequence that is known is decoded.
            strategy: what travels in prefills, or who chooses it.
            chain: who shares out the new tokens; None: in zigzag.
        """
        entries = []
        for sequence, count in counts.items():
            start = self._lengths.get(sequence, 0)
            owners = self._owners.setdefault(sequence, [])
            missing = -(-(start + count) // self._size) - len(owners)
            for rank in self._shared_out(sequence, start, count, missing, chain):
                owners.append(rank)
                if self._runner is not None and rank == self._runner.rank:
                    self._runner.add_blocks(sequence, [self._taken[rank]])
                self._taken[rank] += 1
            self._lengths[sequence] = start + count
            entries.append(
                ScheduledTokens(sequence, start, count, np.array(owners, dtype=np.int64))
            )
        plan = plan_iteration(entries, self._masks, self._size, self._ranks, strategy)
        prefills = () if plan.prefill is None else (plan.prefill,)
        decodes = () if plan.decode is None else (plan.decode,)
        shared = None
        if prefills and self._split is not None:
            shared = self._split.share(int(plan.new_tokens.sum()))
        return Batch((*prefills, *decodes), shared)

    def drop_all(self) -> None:
        """Forgets all sequences; their blocks are free."""
        if self._runner is not None:
            for sequence in self._owners:
                self._runner.drop(sequence)
        self._lengths, self._owners, self._taken = {}, {}, [0] * self._ranks

    def _shared_out(
        self, sequence: int, start: int, count: int, missing: int, chain: Chain | Levels | None
    ) -> list[int]:
        """Owners of the blocks that a sequence lacks."""
        if not missing:
            return []
        if start and count == 1:
            return [(len(self._owners[sequence]) + sequence) % self._ranks]
        if chain is not None:
            return chain.owners(missing, start, start + count)
        placed = shard_evenly(np.array([0]), np.array([missing]), self._ranks)
        placed = placed.select(np.argsort(placed.start))
        return [*map(int, np.repeat(placed.rank, placed.end - placed.start))]
