"""A tick of a rank without a micro-batch, which serves the core attention of the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distca.runtime import AttentionCall, EventCursor, SentLatents
from distca.schedule.program import NANO_BATCHES
from megatron_patches.batches.ticks import TickInput, TickMaker


@torch.no_grad()
def serve_tick(
    maker: TickMaker,
    tick_input: TickInput,
    layer_numbers: Sequence[int],
    softmax_scale: float,
    activation: torch.Tensor,
) -> None:
    """Follows the tick's program without tokens of its own.

    Args:
        maker: maker of the tick.
        tick_input: input of the tick.
        layer_numbers: numbers of a chunk's layers, for the timeline.
        softmax_scale: factor of the scores.
        activation: tensor of the activations' type on their device.
    """
    shape = maker.reader.planner.config.shape
    q = activation.new_empty((0, shape.heads, shape.head_dim))
    k = activation.new_empty((0, shape.kv_heads, shape.head_dim))
    v = activation.new_empty((0, shape.kv_heads, shape.value_dim))
    latents = None
    if shape.kv_rank is not None:
        # A stage keeps its own tasks, so nothing comes here, and nothing is expanded.
        latents = SentLatents(activation.new_empty((0, shape.kv_rank)), shape.rotated_dim, None)
    masks = maker.masks
    names = NANO_BATCHES if len(tick_input.exchanges) > len(masks.masks) else (None,)
    run = EventCursor(tick_input.exchanges, tick_input.program, masks)
    calls: dict[int, AttentionCall] = {}
    while (event := run.next_event) is not None:
        direction, step, nano_batch, layer = event
        run.take_turn(direction, step, nano_batch)
        if step == "dispatch":
            labels = {"layer": layer_numbers[layer], "nano_batch": names[nano_batch]}
            calls[nano_batch] = maker.core_attention.serving_call(
                run, nano_batch, softmax_scale, labels, layer
            )
        call = calls[nano_batch]
        match direction, step:
            case "forward", "dispatch":
                call.dispatch(q, k, v, latents)
            case "forward", "compute":
                call.compute()
            case "forward", "combine":
                call.combine()
            case "backward", "dispatch":
                call.dispatch_backward_without_tokens(q, k, v, latents)
            case "backward", "compute":
                call.compute_backward()
            case "backward", "combine":
                call.combine_backward()
            case _:
                raise AssertionError(f"{event}: all ranks have tokens where keys are sent ahead")
