"""Models of transformers, whose layers call our attention."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from distca.inference.runnable import LayerAttention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATION = "distca_engine"
"""Name under which transformers knows the engine's attention; "distca" is the library's."""


def register(transformers: ModuleType) -> None:
    """Lets transformers know our attention; models are made for it after that."""
    # Without a function for masks of this name transformers makes none: the plan has it.
    transformers.AttentionInterface.register(IMPLEMENTATION, _attend)


def layer_of(module: torch.nn.Module) -> int:
    """Returns the number of the layer that a block of attention is of."""
    return int(module.layer_idx)  # type: ignore[arg-type]


class TransformersModel:
    """See `distca.inference.runnable.RunnableModel`.

    Args:
        module: model of transformers, made for the attention `IMPLEMENTATION`.
        asks_host: see `RunnableModel.asks_host`.

    Attributes:
        module: the model.
        asks_host: see `RunnableModel.asks_host`.
        scales: the factor of each layer's scores.
    """

    def __init__(self, module: PreTrainedModel, asks_host: bool = True) -> None:
        self.module, self.asks_host = module, asks_host
        scales = {
            int(each.layer_idx): float(each.scaling)
            for each in module.modules()
            if hasattr(each, "layer_idx") and hasattr(each, "scaling")
        }
        assert sorted(scales) == list(range(len(scales))), "layers of another kind"
        self.scales: Sequence[float] = [scales[layer] for layer in range(len(scales))]

    def logits(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        attention: LayerAttention,
    ) -> torch.Tensor:
        """See `RunnableModel.logits`."""
        output = self.module(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            distca_run=attention,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    dropout: float = 0.0,
    *,
    distca_run: LayerAttention,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: `[1, heads, rows, dim]` -> `[1, rows, heads, dim]`."""
    layer = layer_of(module)
    window = distca_run.windows[layer]
    assert sliding_window is None or window == sliding_window - 1, "a layer has another window"
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    return distca_run.attend(layer, q.contiguous(), k, v, scaling, s_aux)[None], None
