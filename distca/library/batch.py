"""What a rank has of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from distca.library.documents import IGNORED, Document
from distca.plan import Placement, Plan


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch of the group's ranks, with this rank's tokens.

    A rank's tokens are pieces of documents, one after the other. Every layer except core attention
    runs on them alone.

    Attributes:
        tokens: token ids of this rank, int64 `[rows]`.
        positions: position of each in its document, int64 `[rows]`.
        targets: the correct next token of each, or `IGNORED`, int64 `[rows]`. A token's target is
            on its rank; the next token itself may be on another.
        num_targets: targets of all ranks that are not `IGNORED`. Sum the loss over this rank's
            targets and divide it by this number: the losses of all ranks add up to the mean.
        handle: names the batch in `core_attention`. It is a number, so that nothing moves it to
            another device.
        plans: a plan for each mask, the same on all ranks.
        group: ranks that share the micro-batch.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    num_targets: int
    handle: int
    plans: tuple[Plan, ...]
    group: dist.ProcessGroup | None = None

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Puts the values of all ranks together, by document. Collective; it has no gradient.

        Args:
            values: a value, or a row of values, for each token of this rank, `[rows, …]`; the same
                dtype and further sizes on all ranks.

        Returns:
            For each document a tensor `[tokens, …]`, such as the tokens' log-probabilities.

        Raises:
            ValueError: there is not one for each token of this rank.
        """
        if len(values) != len(self.tokens):
            raise ValueError(
                f"{len(values)} values are given for {len(self.tokens)} tokens of this rank: give "
                "one for each"
            )
        plan = self.plans[0]
        counts = plan.placement.tokens_per_rank()
        most = int(counts.max())
        mine = values.new_zeros((most, *values.shape[1:]))
        mine[: len(values)] = values.detach()
        everyone = [torch.empty_like(mine) for _ in counts]
        dist.all_gather(everyone, mine, self.group)
        found = [values.new_empty((int(n), *values.shape[1:])) for n in plan.lengths]
        rows = plan.placement.first_rows()
        pieces = plan.placement
        for document, start, end, rank, row in zip(
            *(pieces.document, pieces.start, pieces.end, pieces.rank, rows), strict=True
        ):
            found[document][start:end] = everyone[rank][row : row + end - start]
        return found


def rows_of_rank(
    documents: Sequence[Document], placement: Placement, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the tokens, positions and targets of a rank, int64 `[rows]` each, on the CPU."""
    mine = placement.of_rank(rank)
    none = torch.zeros(0, dtype=torch.int64)
    tokens, positions, targets = [none], [none], [none]
    for document, start, end in zip(mine.document, mine.start, mine.end, strict=True):
        tokens.append(documents[document].tokens[start:end])
        targets.append(documents[document].next_tokens[start:end])
        positions.append(torch.from_numpy(np.arange(start, end, dtype=np.int64)))
    return torch.cat(tokens), torch.cat(positions), torch.cat(targets)


def count_targets(documents: Sequence[Document]) -> int:
    """Counts the targets of documents that are not `IGNORED`."""
    return sum(int((each.next_tokens != IGNORED).sum()) for each in documents)
