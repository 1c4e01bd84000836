"""How often, and in which order, a model chunk calls core attention in a tick.

Ranks that only serve in a tick must take part in every call of the others, which also recompute
some in the backward pass. All stages have as many layers and recompute the same, so the order is
known from the configuration.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from distca.schedule import Phase


class Round(NamedTuple):
    """A call of core attention by all ranks, for each nano-batch.

    Attributes:
        what: forward (also when it is recomputed) or backward.
        layer: of the chunk, from 0.
    """

    what: Phase
    layer: int


def rounds_of_tick(phase: Phase, layers: int, recompute: Any) -> tuple[Round, ...]:
    """The calls of a model chunk in a tick.

    Args:
        phase: of the tick.
        layers: of the chunk.
        recompute: `recompute_granularity`, `recompute_method` and `recompute_num_layers` as
            attributes: Megatron's arguments, or a `TransformerConfig`.
    """
    if phase == "forward":
        return tuple(Round("forward", layer) for layer in range(layers))
    calls: list[Round] = []
    for group, recomputed in reversed(recomputed_groups(layers, recompute)):
        if recomputed:
            calls += [Round("forward", layer) for layer in group]
        calls += [Round("backward", layer) for layer in reversed(group)]
    return tuple(calls)


def recomputed_groups(layers: int, recompute: Any) -> list[tuple[range, bool]]:
    """Layers of a chunk that go back one after the other, after all were recomputed or none.

    Args:
        layers: of the chunk.
        recompute: see `rounds_of_tick`.

    Returns:
        Ranges of layers, in order, and whether they are recomputed.
    """
    if recompute.recompute_granularity != "full":
        return [(range(layers), False)]
    number = recompute.recompute_num_layers
    if recompute.recompute_method == "uniform":
        return [(range(n, n + number), True) for n in range(0, layers, number)]
    one_by_one = [(range(layer, layer + 1), True) for layer in range(min(number, layers))]
    return [*one_by_one, (range(number, layers), False)] if number < layers else one_by_one
