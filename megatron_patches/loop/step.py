"""One forward step: the model on a micro-batch, and its loss."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megatron_patches.batches.micro_batch import MicroBatch

_ALMOST_NONE = 1e-30
"""Targets of a micro-batch without any, which vanish beside a single one."""


def forward_step(data_iterator: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
    """Runs the model on the next micro-batch, as Megatron's `forward_step_func`.

    Returns:
        The model's output and a function from it to `(loss, tokens, report)`: the loss summed over
        this micro-batch's targets, weighted, the number of those that count, and the `[sum, count]`
        pair for the log line.
    """
    batch = next(data_iterator)
    output = model(
        batch.tokens,
        batch.position_ids,
        batch.attention_mask,
        labels=batch.labels,
        packed_seq_params=batch.packed_seq_params,
    )
    return output, partial(sum_loss, batch)


def sum_loss(
    batch: MicroBatch, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sums the loss over the micro-batch's targets; see `forward_step`."""
    loss = torch.sum(losses.view(-1).float() * batch.loss_mask.view(-1))
    targets = torch.count_nonzero(batch.loss_mask).float()
    # Where no target of a global batch counts, the loss that loops log is 0 rather than 0/0.
    report = {"lm loss": torch.stack([loss.detach().clone(), targets.clamp(min=_ALMOST_NONE)])}
    return loss, targets.to(torch.int), report
