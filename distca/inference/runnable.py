"""What the runner needs of a model, whoever has implemented its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class LayerAttention(Protocol):
    """Core attention of a batch's layers."""

    @property
    def windows(self) -> Sequence[int | None]:
        """For each layer how many earlier tokens a query sees; None: all."""
        ...

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `distca.inference.attention_runner.ForwardContext.attend`."""
        ...


class RunnableModel(Protocol):
    """A model on a rank, whose layers call a `LayerAttention` in place of their own attention."""

    @property
    def module(self) -> torch.nn.Module:
        """All layers, and their weights."""
        ...

    @property
    def scales(self) -> Sequence[float]:
        """The factor of each layer's scores."""
        ...

    @property
    def asks_host(self) -> bool:
        """Whether layers wait for the host inside a step, which no CUDA graph can hold."""
        ...

    def logits(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        attention: LayerAttention,
    ) -> torch.Tensor:
        """Runs all layers.

        Args:
            ids: token of each row, int64 `[rows]`, at least one.
            positions: position of each in its sequence, int64; as many as there are tokens, or
                as many as `attention` scatters.
            rows: rows whose logits are needed, int64 `[kept]`.
            attention: core attention of the layers.

        Returns:
            Logits `[kept, vocabulary]`.
        """
        ...
