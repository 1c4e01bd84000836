"""A tick of a rank that has no micro-batch in it: it takes part in the others' core attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distca.cost.volume import AttentionShape
from distca.runtime import Call, ExchangeSlot
from distca.schedule import Phase
from megatron_patches.planned_batches import NANO_BATCHES
from megatron_patches.tick_batches import TickBatches, TickInput


def serve_tick(
    made: TickBatches,
    current: TickInput,
    layer_numbers: Sequence[int],
    softmax_scale: float,
    activation: torch.Tensor,
) -> None:
    """Takes part in every call of core attention that the working stages make.

    Args:
        made: what made the tick.
        current: the tick.
        layer_numbers: of a chunk's layers, for the timeline.
        softmax_scale: scores are multiplied by it.
        activation: a tensor of the activations' type on their device.
    """
    names = NANO_BATCHES if len(current.exchanges) > 1 else (None,)
    for what, layer in made.rounds[current.tick.phase]:
        calls = [
            made.core_attention.serving_call(
                ExchangeSlot(exchange, number),
                softmax_scale,
                {"layer": layer_numbers[layer], "nano_batch": name},
            )
            for number, (name, exchange) in enumerate(zip(names, current.exchanges, strict=True))
        ]
        _serve(what, calls, made.batches.schedule_config.shape, activation)


@torch.no_grad()
def _serve(
    what: Phase, calls: Sequence[Call], shape: AttentionShape, activation: torch.Tensor
) -> None:
    """Serves a call of each nano-batch, in the order of `ping_pong.py`, without tokens of its own.

    Args:
        what: which pass the working stages do.
        calls: of each nano-batch.
        shape: the attention heads of this rank.
        activation: a tensor of the activations' type on their device.
    """
    q = activation.new_empty((0, shape.heads, shape.head_dim))
    k = activation.new_empty((0, shape.kv_heads, shape.head_dim))
    if what == "forward":
        for call in calls:
            call.start(q, k, k)
        for call in calls:
            call.compute()
        for call in calls:
            call.finish()
        return
    backwards = list(reversed(calls))
    for call in backwards:
        call.start_backward_without_tokens(q, k)
    for call in backwards:
        call.compute_backward()
    for call in backwards:
        call.finish_backward()
