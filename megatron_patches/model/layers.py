"""The transformer layers of a model, wherever they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.models.gpt import GPTModel


def prediction_layers(model: GPTModel) -> list[Any]:
    """Returns the transformer layers of multi-token prediction that a stage of the model has."""
    block = getattr(model, "mtp", None)
    return [] if block is None else [layer.mtp_model_layer for layer in block.layers]


def transformer_layers(model: GPTModel) -> Iterator[Any]:
    """Yields all transformer layers that a stage of the model has."""
    yield from model.decoder.layers
    yield from prediction_layers(model)
