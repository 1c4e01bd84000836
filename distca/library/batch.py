"""What a rank has of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from distca.library.documents import IGNORED
from distca.library.nodes import Nodes, tokens_of_rollouts
from distca.plan import Plan


class Predictions(NamedTuple):
    """What a rank's tokens predict. A token predicts one other, or several where rollouts part.

    Attributes:
        rows: row of this rank whose logits predict, rising, int64 `[predictions]`.
        targets: the correct token, int64 `[predictions]`.
        weights: factor of its loss, float32 `[predictions]`.
    """

    rows: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


class RolloutTokens(NamedTuple):
    """Tokens of rollouts that a rank's predictions are of: one that rollouts share has several.

    Attributes:
        prediction: number among this rank's predictions, int64 `[tokens]`.
        rollout: number of the rollout, as `share_prefixes` took it, int64 `[tokens]`.
        position: position of the token in the rollout, int64 `[tokens]`.
    """

    prediction: torch.Tensor
    rollout: torch.Tensor
    position: torch.Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch of the group's ranks, with this rank's tokens.

    A rank's tokens are pieces of documents, one after the other. Every layer except core attention
    runs on them alone.

    Attributes:
        tokens: token ids of this rank, int64 `[rows]`.
        positions: position of each in its document, or on its path in a tree, int64 `[rows]`.
        predictions: what the tokens of this rank predict. The next token itself may be on another
            rank.
        num_targets: predictions of all ranks.
        total_weight: sum of the weights of all ranks' predictions. Without trees it is
            `num_targets`; with weights of 0 and 1 it counts the trained tokens of all rollouts.
        handle: names the batch in `core_attention`. It is a number, so that nothing moves it to
            another device.
        plans: a plan for each mask, the same on all ranks.
        nodes: documents of the plans.
        rank: number of this rank in the group.
        group: ranks that share the micro-batch.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    predictions: Predictions
    num_targets: int
    total_weight: float
    handle: int
    plans: tuple[Plan, ...]
    nodes: Nodes
    rank: int
    group: dist.ProcessGroup | None = None

    @property
    def targets(self) -> torch.Tensor:
        """The correct next token of each, or `IGNORED`, int64 `[rows]`.

        Sum the loss over this rank's targets and divide it by `num_targets`: the losses of all
        ranks add up to the mean.

        Raises:
            ValueError: there are trees, whose tokens may have several next ones.
        """
        if self.nodes.have_trees:
            raise ValueError(
                "tokens that rollouts share have several next tokens: use `predictions`, or `loss`"
            )
        found = torch.full_like(self.tokens, IGNORED)
        return found.index_copy(0, self.predictions.rows, self.predictions.targets)

    def log_probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the log-probability of each prediction, float32 `[predictions]`; differentiable.

        Args:
            logits: logits of this rank's tokens, `[rows, vocabulary]`, or with a first dimension
                of 1.

        Raises:
            ValueError: there is not a row for each token of this rank.
        """
        logits = logits.reshape(-1, logits.shape[-1])
        if len(logits) != len(self.tokens):
            raise ValueError(
                f"{len(logits)} rows of logits are given for {len(self.tokens)} tokens of this "
                "rank: give one for each"
            )
        chosen = logits[self.predictions.rows].float()
        return -torch.nn.functional.cross_entropy(
            chosen, self.predictions.targets, reduction="none"
        )

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the sum of this rank's cross-entropies, each times its weight; differentiable.

        The sums of all ranks add up to what the rollouts give one by one: the sum of weight times
        cross-entropy over all tokens of all rollouts. Divide it as you like, such as by
        `total_weight`.

        Args:
            logits: see `log_probabilities`.
        """
        return -(self.log_probabilities(logits) * self.predictions.weights).sum()

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Puts the values of all ranks together, by document. Collective; it has no gradient.

        Args:
            values: a value, or a row of values, for each token of this rank, `[rows, …]`; the same
                dtype and further sizes on all ranks.

        Returns:
            For each document a tensor `[tokens, …]`, such as the tokens' losses; of a tree the
            tokens of its nodes, one node after the other.

        Raises:
            ValueError: there is not one for each token of this rank.
        """
        placement = self.plans[0].placement
        numbers = [self.nodes.of_rank(placement, rank) for rank in range(placement.world_size)]
        found = self._gather(values, numbers, int(self.nodes.own_lengths.sum()), "tokens")
        ends = np.cumsum(self.nodes.counts)
        of_documents = np.add.reduceat(self.nodes.own_lengths, ends - self.nodes.counts)
        return list(torch.split(found, of_documents.tolist()))

    def gather_rollouts(self, values: torch.Tensor) -> dict[int, torch.Tensor]:
        """Puts the values of predictions of all ranks together, by rollout. Collective; it has no
        gradient.

        Args:
            values: a value for each prediction of this rank, `[predictions]`, such as
                `log_probabilities`; the same dtype on all ranks.

        Returns:
            For each rollout of the trees, by its number, a tensor `[tokens]`: the value of the
            prediction of each token, and 0 for the first one, which nothing predicts.

        Raises:
            ValueError: there is not one for each prediction of this rank.
        """
        placement = self.plans[0].placement
        _, predicted, _, _ = self.nodes.predictions
        numbers = [
            predicted[self.nodes.predictions_of_rank(placement, rank)[0]]
            for rank in range(placement.world_size)
        ]
        total = int(self.nodes.own_lengths.sum()) + 1
        found = self._gather(values, numbers, total, "predictions")
        return {
            rollout: found[torch.from_numpy(tokens).to(found.device)]
            for rollout, tokens in tokens_of_rollouts(self.nodes)
        }

    def rollout_tokens(self) -> RolloutTokens:
        """Returns which tokens of which rollouts this rank predicts, for losses that differ between
        rollouts that share a token, such as a clipped ratio with each rollout's own advantage."""
        placement = self.plans[0].placement
        _, predicted, _, _ = self.nodes.predictions
        mine = predicted[self.nodes.predictions_of_rank(placement, self.rank)[0]]
        order = np.argsort(mine, kind="stable")
        columns: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for rollout, tokens in tokens_of_rollouts(self.nodes):
            # A rollout's first token may be another one's prediction by number alone.
            position = 1 + np.flatnonzero(np.isin(tokens[1:], mine))
            at = order[np.searchsorted(mine[order], tokens[position])]
            columns.append((at, np.full_like(position, rollout), position))
        if not columns:
            columns = [(np.zeros(0, dtype=np.int64),) * 3]
        found = (np.concatenate(each) for each in zip(*columns, strict=True))
        device = self.tokens.device
        return RolloutTokens(*(torch.from_numpy(each).to(device) for each in found))

    def _gather(
        self, values: torch.Tensor, numbers: Sequence[np.ndarray], total: int, what: str
    ) -> torch.Tensor:
        """Puts values of all ranks in one tensor `[total, …]`: `numbers` has each rank's places."""
        if len(values) != len(numbers[self.rank]):
            raise ValueError(
                f"{len(values)} values are given for {len(numbers[self.rank])} {what} of this "
                "rank: give one for each"
            )
        most = max(len(each) for each in numbers)
        mine = values.new_zeros((most, *values.shape[1:]))
        mine[: len(values)] = values.detach()
        everyone = [torch.empty_like(mine) for _ in numbers]
        dist.all_gather(everyone, mine, self.group)
        found = values.new_zeros((total, *values.shape[1:]))
        for places, each in zip(numbers, everyone, strict=True):
            found[torch.from_numpy(places).to(found.device)] = each[: len(places)]
        return found
