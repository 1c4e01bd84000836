"""Dedicated attention servers: processes that hold no model and only serve (paper, Section 8).

A dedicated server makes the same plans from the same data as all other ranks. Before each global
batch the first rank tells it which split the batch is of.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_patches.batches.planned_iterator import PlannedIterator
from megatron_patches.pipeline.data_iterators import DataIterators, unwrap
from megatron_patches.pipeline.idle_rank import serve_tick


def serve(
    build_data: Callable[[], DataIterators], dtype: torch.dtype, softmax_scale: float
) -> None:
    """Runs a dedicated process, which serves instead of training. Collective with the whole job.

    Args:
        build_data: function that builds the iterators, as the processes with a model do.
        dtype: type of the activations.
        softmax_scale: factor of the scores.
    """
    data = build_data()
    control = data.control
    assert control is not None
    while (number := control.next_number()) is not None:
        ticks = unwrap(data.numbered()[number])
        serve_global_batch(ticks, dtype, softmax_scale)
    data.finish()


def serve_global_batch(ticks: PlannedIterator, dtype: torch.dtype, softmax_scale: float) -> None:
    """Computes what the plans of the next global batch give this process. Collective.

    Args:
        ticks: ticks of the global batch's split.
        dtype: type of the activations.
        softmax_scale: factor of the scores.
    """
    tick_input = next(ticks)
    maker = ticks.maker
    activation = torch.empty(0, dtype=dtype, device=ticks.device)
    layers = range(1, 1 + sum(len(group.layers) for group in maker.layer_groups))
    with maker.core_attention.transport.checked():
        for number in range(len(tick_input.schedule.ticks)):
            if number:
                tick_input = next(ticks)
            placed = maker.placed(tick_input)
            serve_tick(maker, placed, list(layers), softmax_scale, activation)
