"""What a rank has of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx

from distca.library.agreed import agreed_values
from distca.library.documents import IGNORED, check_readable
from distca.library.nodes import Nodes
from distca.plan import Plan
from distca.transport import naming_lost_ranks


class Predictions(NamedTuple):
    """What a rank's tokens predict. A token predicts one other, or several where rollouts part.
    Tokens that no rollout trains are not predicted.

    Attributes:
        rows: row of this rank whose logits predict, rising, int64 `[predictions]`.
        targets: the correct token, int64 `[predictions]`.
        weights: factor of its loss, float32 `[predictions]`: the sum of the weights of the rollouts
            that share it.
    """

    rows: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


class RolloutTokens(NamedTuple):
    """Trained tokens of rollouts that a rank predicts: one that rollouts share has several.

    Attributes:
        prediction: number among this rank's predictions, int64 `[tokens]`.
        rollout: number of the rollout, int64 `[tokens]`.
        position: position of the token in the rollout, int64 `[tokens]`.
        weight: weight of the token in this rollout, float32 `[tokens]`.
    """

    prediction: torch.Tensor
    rollout: torch.Tensor
    position: torch.Tensor
    weight: torch.Tensor


@dataclass
class Progress:
    """What has been computed of a batch.

    Attributes:
        attended: whether core attention has run.
        first: whether core attention had run for no batch of the planner when it was placed.
        positions: positions of this rank's tokens; None: nobody compares them.
    """

    attended: bool = False
    first: bool = True
    positions: torch.Tensor | None = None


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
        num_trained: trained tokens of all documents and rollouts, those with a weight other than 0,
            where one that rollouts share counts for each of them; without trees `num_targets`.
        handle: names the batch in `core_attention`. It is a number, so that nothing moves it to
            another device.
        plans: a plan for each mask, the same on all ranks.
        nodes: documents of the plans.
        rank: number of this rank in the group.
        progress: what has been computed of it.
        group: ranks that share the micro-batch.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    predictions: Predictions
    num_targets: int
    num_trained: int
    handle: int
    plans: tuple[Plan, ...]
    nodes: Nodes
    rank: int
    progress: Progress
    group: dist.ProcessGroup | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that all ranks compute: one that rollouts share counts once."""
        return int(self.nodes.own_lengths.sum())

    @property
    def num_given_tokens(self) -> int:
        """Tokens of all documents and rollouts one by one. Over `num_tokens` it is the factor by
        which sharing makes them fewer."""
        return self.nodes.given_tokens

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

    def log_probabilities(
        self, logits: torch.Tensor, *, of_predictions: bool = False
    ) -> torch.Tensor:
        """Returns the log-probability of each prediction, float32 `[predictions]`; differentiable.

        Args:
            logits: logits of this rank's tokens, `[rows, vocabulary]`, or with a first dimension
                of 1.
            of_predictions: whether the logits are those of `predictions.rows` alone,
                `[predictions, vocabulary]`, which need less memory: most tokens of prompts predict
                nothing.

        Raises:
            ValueError: there is not a row for each token or prediction of this rank; they are no
                floating-point numbers; the batch's core attention has not run: another one gives
                wrong logits; or a target is beyond the vocabulary.
        """
        if not self.progress.attended:
            raise ValueError(
                "core attention of this batch has not run: make the model with "
                'attn_implementation="distca", or call core_attention in every layer'
            )
        if isinstance(logits, torch.Tensor) and logits.dim() == 3 and len(logits) == 1:
            logits = logits[0]
        if _is_no_tensor(logits, 2):
            raise ValueError(
                f"logits are {_kind(logits)}: give the model's, floating-point numbers "
                "[rows, vocabulary] or [1, rows, vocabulary]"
            )
        if of_predictions:
            self._checked_predictions(logits)
        else:
            logits = self._of_tokens(logits)
        # All ranks' targets, on the CPU: all ranks refuse, and nothing waits for a device.
        targets = self.nodes.predictions[2]
        if len(targets) and int(targets.max()) >= logits.shape[1]:
            raise ValueError(
                f"token {int(targets.max())} is trained, but the logits are of "
                f"{logits.shape[1]} tokens: use the model's own tokenizer"
            )
        chosen = (logits if of_predictions else logits[self.predictions.rows]).float()
        return -torch.nn.functional.cross_entropy(
            chosen, self.predictions.targets, reduction="none"
        )

    def loss(self, logits: torch.Tensor, *, of_predictions: bool = False) -> torch.Tensor:
        """Returns the sum of this rank's cross-entropies, each times its weight; differentiable.

        The sums of all ranks add up to what the rollouts give one by one: the sum of weight times
        cross-entropy over all tokens of all rollouts. Divide it as you like, such as by
        `num_trained`.

        Args:
            logits: see `log_probabilities`.
            of_predictions: likewise.
        """
        log = self.log_probabilities(logits, of_predictions=of_predictions)
        return -(log * self.predictions.weights).sum()

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Puts the values of all ranks together, by document. Collective; it has no gradient.

        Args:
            values: a value, or a row of values, for each token of this rank, `[rows, …]`; the same
                dtype and further sizes on all ranks, which compare them first.

        Returns:
            For each document a tensor `[tokens, …]`, such as the tokens' losses; of a tree the
            tokens of its nodes, one node after the other.

        Raises:
            ValueError: there is not one for each token of a rank, or dtypes or sizes differ; on all
                ranks.
            LostRankError: another rank has ended or does not answer.
        """
        placement = self.plans[0].placement
        numbers = [self.nodes.of_rank(placement, rank) for rank in range(placement.world_size)]
        values = self._agreed("gather", lambda: self._of_tokens(values))
        found = self._gather("gather", values, numbers, int(self.nodes.own_lengths.sum()))
        ends = np.cumsum(self.nodes.counts)
        of_documents = np.add.reduceat(self.nodes.own_lengths, ends - self.nodes.counts)
        return list(torch.split(found, of_documents.tolist()))

    def gather_rollouts(self, values: torch.Tensor) -> dict[int, torch.Tensor]:
        """Puts the values of predictions of all ranks together, by rollout. Collective.

        The gradients of all ranks' losses add up, as if one loss were their sum. So each rank may
        have a loss of some rollouts: then the backward pass is collective, too. A rank whose loss
        uses none, such as one of more ranks than rollouts, must add `0 * sum` of the values to it:
        otherwise the others wait for that rank.

        Args:
            values: a value for each prediction of this rank, `[predictions]`, such as
                `log_probabilities`; the same dtype on all ranks, which compare them first.

        Returns:
            For each rollout of the trees, by its number, a tensor `[tokens]`: the value of the
            prediction of each token, and 0 for tokens that no rollout trains. A token of weight 0
            in this rollout has a value, too, if another rollout trains it: multiply by the weights,
            or use `rollout_tokens`.

        Raises:
            ValueError: there is not one for each prediction of a rank, or dtypes or sizes differ;
                on all ranks.
            LostRankError: another rank has ended or does not answer.
        """
        placement, (_, predicted, _, _) = self.plans[0].placement, self.nodes.predictions
        numbers = [
            predicted[self.nodes.predictions_of_rank(placement, rank)[0]]
            for rank in range(placement.world_size)
        ]
        total = int(self.nodes.own_lengths.sum())
        # The last one is for what documents predict.
        found: torch.Tensor = _GatheredValues.apply(  # type: ignore[no-untyped-call]
            self._agreed("gather_rollouts", lambda: self._checked_predictions(values)),
            lambda mine: self._gather("gather_rollouts", mine, numbers, total + 1),
            torch.from_numpy(numbers[self.rank]).to(values.device),
            self.group,
        )
        return {
            rollout: found[torch.from_numpy(tokens).to(found.device)]
            for rollout, tokens in self.nodes.paths().items()
        }

    def rollout_tokens(self) -> RolloutTokens:
        """Returns the trained tokens of rollouts that this rank predicts, for losses that differ
        between rollouts which share a token, such as a clipped ratio with each one's advantage.

        A rank predicts tokens of all ranks' rollouts.
        """
        placement, (_, predicted, _, _) = self.plans[0].placement, self.nodes.predictions
        mine = predicted[self.nodes.predictions_of_rank(placement, self.rank)[0]]
        prediction = np.full(int(self.nodes.own_lengths.sum()) + 1, -1)
        prediction[mine] = np.arange(len(mine))
        number, rollout, position, weight = self.nodes.trained
        here = np.flatnonzero(prediction[number] >= 0)
        columns = (prediction[number[here]], rollout[here], position[here])
        found = (*map(torch.from_numpy, columns), weight[torch.from_numpy(here)])
        return RolloutTokens(*(each.to(self.tokens.device) for each in found))

    @property
    def rollouts(self) -> tuple[int, ...]:
        """Numbers of all rollouts, rising."""
        return tuple(sorted(self.nodes.paths()))

    def sum_rollouts(self, values: torch.Tensor) -> torch.Tensor:
        """Adds up the values of each rollout's trained tokens on all ranks, each times its weight
        in the rollout. Collective.

        The sums are the same on all ranks. Their gradients go to this rank's values alone: if all
        ranks compute one loss of the sums, the gradients of all ranks add up to the loss's.

        Args:
            values: a value for each prediction of this rank, `[predictions]`, such as
                `log_probabilities`; the same dtype on all ranks, which compare them first.

        Returns:
            A sum for each of `rollouts`, in their order, `[rollouts]`.

        Raises:
            ValueError: there is not one for each prediction of a rank, they are no floating-point
                numbers of one dimension, or dtypes differ; on all ranks.
            LostRankError: another rank has ended or does not answer.
        """

        def checked() -> torch.Tensor:
            # Numbers of 1 byte cannot be added.
            if _is_no_tensor(self._checked_predictions(values), 1) or values.itemsize == 1:
                raise ValueError(
                    f"values are {_kind(values)}: give floating-point numbers of one dimension, "
                    "one for each prediction, of 2 bytes or more"
                )
            return values

        values = self._agreed("sum_rollouts", checked)
        tokens = self.rollout_tokens()
        order = torch.tensor(self.rollouts, dtype=torch.int64, device=values.device)
        places = torch.searchsorted(order, tokens.rollout)
        mine = values.new_zeros(len(order)).index_add(
            0, places, values[tokens.prediction] * tokens.weight
        )
        everyone = mine.detach().clone()
        with naming_lost_ranks("sum_rollouts"):
            dist.all_reduce(everyone, group=self.group)
        return mine + (everyone - mine.detach())

    def _of_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Checks that there is a row for each token of this rank, and returns them without the one
        that `inputs_of` gives a model on a rank without tokens."""
        count = len(self.tokens)
        if not count and isinstance(values, torch.Tensor) and values.dim() and len(values) == 1:
            _check_dense("values", values)
            return values[:0]
        _check_count(values, count, "tokens")
        return values

    def _checked_predictions(self, values: torch.Tensor) -> torch.Tensor:
        """Checks that there is a row for each prediction of this rank, and returns the values."""
        _check_count(values, len(self.predictions.rows), "predictions")
        return values

    def _agreed(self, operation: str, check: Callable[[], torch.Tensor]) -> torch.Tensor:
        return agreed_values(operation, check, self.tokens.device, self.group)

    def _gather(
        self, operation: str, values: torch.Tensor, numbers: Sequence[np.ndarray], total: int
    ) -> torch.Tensor:
        """Puts values of all ranks in one tensor `[total, …]`: `numbers` has each rank's places."""
        most = max(len(each) for each in numbers)
        # As bytes: gloo knows few dtypes, and torch moves rows of few.
        row = values.shape[1:]
        size = row.numel() * values.element_size()
        mine = self.tokens.new_zeros((most, size), dtype=torch.uint8)
        mine[: len(values)] = (
            values.detach().contiguous().view(-1).view(torch.uint8).view(len(values), size)
        )
        everyone = [torch.empty_like(mine) for _ in numbers]
        with naming_lost_ranks(operation):
            dist.all_gather(everyone, mine, self.group)
        found = mine.new_zeros((total, size))
        for places, each in zip(numbers, everyone, strict=True):
            found[torch.from_numpy(places).to(found.device)] = each[: len(places)]
        return found.view(-1).view(values.dtype).view(total, *row)


def _kind(values: object) -> str:
    """Says what is given as values."""
    if isinstance(values, torch.Tensor):
        return f"{values.dtype} {list(values.shape)}"
    return f"a {type(values).__name__}"


def _check_dense(what: str, values: torch.Tensor) -> None:
    """Checks that values have a place in memory each.

    Raises:
        ValueError: they are sparse, nested, quantized, or on the meta device.
    """
    check_readable(what, values)
    if values.is_quantized:
        raise ValueError(f"{what} are quantized: give values.dequantize()")


def _is_no_tensor(values: object, dimensions: int) -> bool:
    """Returns whether values are anything else than floating-point numbers of some dimensions."""
    if not isinstance(values, torch.Tensor):
        return True
    return values.dim() != dimensions or not values.is_floating_point()


def _check_count(values: object, count: int, what: str) -> None:
    """Checks that there is a row for each of something.

    Raises:
        ValueError: there are fewer or more, or values are no tensor with rows.
    """
    if not isinstance(values, torch.Tensor) or not values.dim():
        raise ValueError(
            f"values are {_kind(values)}: give a tensor, one row for each of the {count} {what} of "
            "this rank"
        )
    _check_dense("values", values)
    if len(values) != count:
        raise ValueError(
            f"{len(values)} values are given for {count} {what} of this rank: give one for each"
        )


class _GatheredValues(torch.autograd.Function):
    """Values of all ranks, whose gradients come back to the rank of each."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        values: torch.Tensor,
        gather: Callable[[torch.Tensor], torch.Tensor],
        places: torch.Tensor,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.places, ctx.group = places, group  # type: ignore[attr-defined]
        return gather(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        every = gradient.clone()
        with naming_lost_ranks("the backward pass of gather_rollouts"):
            dist.all_reduce(every, group=ctx.group)
        return every[ctx.places], None, None, None
