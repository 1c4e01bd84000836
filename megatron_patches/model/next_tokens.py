"""Columns of a rank's tokens for multi-token prediction (`token_prediction.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NextTokens:
    """Columns of a rank's tokens for each layer of multi-token prediction: of the token as many
    places on as the layer's number, from 1. Zeros where the document has ended.

    Attributes:
        tokens: int64 `[1, tokens]` each.
        position_ids: int64 `[1, tokens]` each.
        labels: int64 `[1, tokens]` each.
        loss_mask: float32 `[1, tokens]` each, weights of labels.
        all_targets: weights of the labels of the global batch, added up: those of the next token,
            then those of each layer.
    """

    tokens: tuple[torch.Tensor, ...]
    position_ids: tuple[torch.Tensor, ...]
    labels: tuple[torch.Tensor, ...]
    loss_mask: tuple[torch.Tensor, ...]
    all_targets: tuple[float, ...]

    def to(self, move: Callable[[torch.Tensor], torch.Tensor]) -> NextTokens:
        """Returns the columns on another device.

        Args:
            move: function that moves a tensor.
        """
        tokens, position_ids, labels, loss_mask = (
            tuple(move(each) for each in column)
            for column in (self.tokens, self.position_ids, self.labels, self.loss_mask)
        )
        return NextTokens(tokens, position_ids, labels, loss_mask, self.all_targets)

    def depth_after(self, tokens: torch.Tensor) -> int:
        """Returns the number, from 0, of the layer that follows the one with some tokens.

        Args:
            tokens: tokens of that layer, or the micro-batch's own.
        """
        same = [depth for depth, each in enumerate(self.tokens) if each is tokens]
        return same[0] + 1 if same else 0
