"""One forward step: the model on a micro-batch, and its loss."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megatron_patches.batches.micro_batch import MicroBatch, place


def forward_step(data_iterator: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
    """Runs the model on the next micro-batch, as Megatron's `forward_step_func`.

    Returns:
        The model's output and a function from it to `(loss, tokens, report)`: the loss summed over
        this micro-batch's targets, their number, and `[sum, count]` pairs for the log line.
    """
    batch = next(data_iterator)
    output = model(
        batch.tokens,
        batch.position_ids,
        batch.attention_mask,
        labels=batch.labels,
        packed_seq_params=batch.packed_seq_params,
    )
    report = batch.report if model.training else {}
    return output, partial(sum_loss, batch, report)


def sum_loss(
    batch: MicroBatch, figures: dict[str, float], losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sums the loss over the micro-batch's targets; see `forward_step`."""
    loss = torch.sum(losses.view(-1).float() * batch.loss_mask.view(-1))
    targets = batch.loss_mask.sum()
    # One copy for all figures.
    on_host = torch.tensor([[value, 1.0] for value in figures.values()])
    report = {"lm loss": torch.stack([loss.detach().clone(), targets])}
    report |= zip(figures, place(on_host, losses.device), strict=True)
    return loss, targets.to(torch.int), report
