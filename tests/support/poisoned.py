"""Trains as `pretrain_gpt.py` does, but one value is NaN: `poisoned.py WHAT@STEP@RANK ...`.

WHAT is `gradient` of a weight, `weight` before the forward pass, `row` of the embedding that no
token uses, after its last use in a step, `bias` of experts before the forward pass, `loss`,
`evaluation` (its loss), `moment` of the optimizer, a weight or bias of experts at the `start` or
`start_bias`, or `nothing`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_patches import megatron_lm
from megatron_patches.batches.micro_batch import forward_step
from megatron_patches.model.gpt import build_model

NAN, UNUSED = float("nan"), 250


class Poison:
    """A forward step that makes a value NaN.

    Args:
        what: what becomes NaN.
        step: iteration from which on it does.
        rank: rank on which it does.
    """

    def __init__(self, what: str, step: int, rank: int) -> None:
        self._what, self._step, self._rank = what, step, rank
        self._hooked = False

    def __call__(self, data_iterator: Iterator[Any], model: Any) -> tuple[Any, Any]:
        weights = {
            "gradient": ("mlp.linear_fc2.weight", self._spoil_gradient),
            "row": ("word_embeddings.weight", self._spoil_row),
            "weight": ("mlp.linear_fc1.weight", None),
        }
        if self._what == "bias" and self._now():
            spoil_bias(model)
        if self._what in weights:
            ending, hook = weights[self._what]
            weight = next(each for name, each in model.named_parameters() if name.endswith(ending))
            if hook is None and self._now():
                weight.data[0, 0] = NAN
            if hook is not None and not self._hooked:
                weight.register_hook(lambda gradient: hook(weight, gradient))
                self._hooked = True
        output, loss = forward_step(data_iterator, model)
        spoilt = "loss" if model.training else "evaluation"
        return output * NAN if self._what == spoilt and self._now() else output, loss

    def spoil_moment(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Spoils the state of an optimizer before its step."""
        if self._what == "moment" and self._now():
            for state in optimizer.state.values():
                state["exp_avg_sq"].fill_(NAN)

    def _now(self) -> bool:
        from megatron.training import get_args

        # With --skip-train there is none.
        made = getattr(get_args(), "curr_iteration", 0)
        return made + 1 >= self._step and dist.get_rank() == self._rank

    def _spoil_gradient(self, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * NAN if self._now() else gradient

    def _spoil_row(self, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if self._now():
            weight.data[UNUSED] = NAN
        return gradient


def spoil_bias(model: torch.nn.Module) -> None:
    """Makes the bias of an expert of the first layer infinite."""
    bias = next(each for name, each in model.named_buffers() if name.endswith("expert_bias"))
    bias[1] = math.inf


def build_spoilt_model(*args: Any, **named: Any) -> Any:
    """Builds a model with NaN in a weight of the second rank."""
    model = build_model(*args, **named)
    if dist.get_rank() == 1:
        model.output_layer.weight.data[0, 0] = NAN
    return model


def build_biased_model(*args: Any, **named: Any) -> Any:
    """Builds a model with infinity in a bias of experts of the second rank."""
    model = build_model(*args, **named)
    if dist.get_rank() == 1:
        spoil_bias(model)
    return model


if __name__ == "__main__":
    what, step, rank = sys.argv.pop(1).split("@")
    poison = Poison(what, int(step), int(rank))
    register_optimizer_step_pre_hook(poison.spoil_moment)
    spoilt: dict[str, Any] = {"forward_step": poison}
    if what == "start":
        spoilt["build_model"] = build_spoilt_model
    elif what == "start_bias":
        spoilt["build_model"] = build_biased_model
    with mock.patch.multiple(megatron_lm, **spoilt):
        megatron_lm.pretrain(os.environ)
