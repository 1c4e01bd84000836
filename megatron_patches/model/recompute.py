"""Groups of layers whose backward passes run together, by Megatron's recomputation flags."""

from __future__ import annotations

from typing import Any

from distca.schedule.program import LayerGroup, layer_groups


def groups_of_layers(layers: int, flags: Any) -> tuple[LayerGroup, ...]:
    """Returns the groups of a model chunk's layers, the same on all stages.

    Args:
        layers: number of layers of the chunk.
        flags: Megatron's arguments, or a `TransformerConfig`.
    """
    return layer_groups(
        layers, flags.recompute_granularity, flags.recompute_method, flags.recompute_num_layers
    )
