"""Ranks without a micro-batch: they serve the core attention of the others.

A pipeline stage has none in some ticks. A dedicated attention server never has one: it holds no
model (paper, Section 8). It makes the same plans from the same data as all other ranks, and before
each global batch the first rank tells it which split the batch is of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from distca.runtime import AttentionCall, EventCursor, SentLatents
from distca.schedule.program import NANO_BATCHES
from megatron_patches.batches.ticks import PlannedIterator, RankRuntime, TickInput
from megatron_patches.pipeline.data_iterators import TRAIN, DataIterators, unwrap
from megatron_patches.pipeline.progress import Progress


def serve(
    build_data: Callable[[], DataIterators],
    dtype: torch.dtype,
    softmax_scale: float,
    progress: Progress,
    skipped: Collection[int] = (),
) -> None:
    """Runs a dedicated process, which serves instead of training. Collective with the whole job.

    Args:
        build_data: function that builds the iterators, as the processes with a model do.
        dtype: type of the activations.
        softmax_scale: factor of the scores.
        progress: notes how far this process is; its iteration is the last one before this run's.
        skipped: iterations that are left out. Nobody announces them to this process.
    """
    data = build_data()
    control = data.control
    assert control is not None
    while True:
        progress.enter("the wait for the next global batch", is_idle=True)
        number = control.next_number()
        if number is None:
            break
        if number == TRAIN:
            while progress.iteration + 1 in skipped:
                unwrap(data.train).skip_global_batch()
                progress.iteration += 1
            progress.begin(progress.iteration + 1)
        else:
            progress.enter("evaluation")
        serve_global_batch(unwrap(data.numbered()[number]), dtype, softmax_scale, progress)
    data.finish()


def serve_global_batch(
    ticks: PlannedIterator,
    dtype: torch.dtype,
    softmax_scale: float,
    progress: Progress | None = None,
) -> None:
    """Computes what the plans of the next global batch give this process. Collective.

    Args:
        ticks: ticks of the global batch's split.
        dtype: type of the activations.
        softmax_scale: factor of the scores.
        progress: notes how far this process is; None: nobody reads it.
    """
    runtime, progress = ticks.runtime, progress or Progress()
    progress.transport = runtime.core_attention.transport
    activation = torch.empty(0, dtype=dtype, device=ticks.device)
    layers = range(1, 1 + sum(len(group.layers) for group in runtime.layer_groups))
    with runtime.core_attention.transport.checked():
        for number, tick in enumerate(runtime.global_batch(ticks)):
            progress.enter(f"{tick.tick.direction} pass of tick {number}")
            serve_tick(runtime, tick, layers, softmax_scale, activation)


@torch.no_grad()
def serve_tick(
    runtime: RankRuntime,
    tick: TickInput,
    layer_numbers: Sequence[int],
    softmax_scale: float,
    activation: torch.Tensor,
) -> None:
    """Follows the tick's program without tokens of its own.

    Args:
        runtime: what this rank runs ticks with.
        tick: input of the tick, placed in the buffers.
        layer_numbers: numbers of a chunk's layers, for the timeline.
        softmax_scale: factor of the scores.
        activation: tensor of the activations' type on their device.
    """
    cursor = EventCursor(tick.exchanges, tick.program, runtime.masks)
    serve_layers(runtime, cursor, 0, layer_numbers, softmax_scale, activation)


@torch.no_grad()
def serve_layers(
    runtime: RankRuntime,
    cursor: EventCursor,
    first_layer: int,
    layer_numbers: Sequence[int],
    softmax_scale: float,
    activation: torch.Tensor,
) -> None:
    """Does the next events of a program, in which this rank has no tokens of its own.

    Args:
        runtime: what this rank runs ticks with.
        cursor: this rank's part of the tick's plans, and the next event.
        first_layer: number of the first layer of a chunk, from 0, that is served; an event of an
            earlier one is left to others.
        layer_numbers, softmax_scale, activation: as for `serve_tick`.
    """
    shape = runtime.shape
    q = activation.new_empty((0, shape.heads, shape.head_dim))
    k = activation.new_empty((0, shape.kv_heads, shape.head_dim))
    v = activation.new_empty((0, shape.kv_heads, shape.value_dim))
    latents = None
    if shape.kv_rank is not None:
        # A stage keeps its own tasks, so nothing comes here, and nothing is expanded.
        latents = SentLatents(activation.new_empty((0, shape.kv_rank)), shape.rotated_dim, None)
    names = NANO_BATCHES if len(cursor.exchanges) > len(runtime.masks.masks) else (None,)
    calls: dict[int, AttentionCall] = {}
    while (event := cursor.next_event) is not None and event.layer >= first_layer:
        direction, step, nano_batch, layer = event
        cursor.take_turn(direction, step, nano_batch)
        if step == "dispatch":
            labels = {"layer": layer_numbers[layer], "nano_batch": names[nano_batch]}
            calls[nano_batch] = runtime.core_attention.serving_call(
                cursor, nano_batch, softmax_scale, labels, layer
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
