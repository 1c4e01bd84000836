"""Layers in a recipe of Transformer Engine's with ping-pong, against whole micro-batches.

The Engine is a stand-in: its recipe is of the process, and changes what linear layers are given,
each element alone, so that halves of a micro-batch are changed as the whole is. Around whole ones
Megatron's own loop over layers enters the recipe.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import transformer_block

from megatron_patches.model import ping_pong
from support import models
from support.models import StepsDone, train
from support.parity import RECOMPUTE, WHOLE, check_gradients

LENGTHS = [1024, *(1, 300, 5, 1, 129, 588)]
FLAGS = "--num-layers 3 --seq-length 512 --global-batch-size 4 --distca".split()
LINEAR = (layers.ColumnParallelLinear, layers.RowParallelLinear)


class Engine:
    """A stand-in for Transformer Engine."""

    def __init__(self) -> None:
        self._is_on = False

    @contextmanager
    def recipe(self) -> Iterator[None]:
        assert not self._is_on, "calls of two layers overlap"
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def context(
        self, config: Any, layer: int, is_init: bool = False
    ) -> AbstractContextManager[None]:
        """Stands in for megatron-core's `get_fp8_context`; the first layer has no recipe."""
        return self.recipe() if config.fp8 and layer and not is_init else nullcontext()

    def changing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A linear layer's forward pass that is in the recipe."""

        def forward(layer: Any, given: torch.Tensor, *more: Any, **named: Any) -> Any:
            if self._is_on:
                given = torch.tanh(given)
            return original(layer, given, *more, **named)

        return forward


def train_in_fp8(flags: Sequence[str]) -> StepsDone:
    engine, parse = Engine(), models.parse

    def with_fp8(*given: Any) -> Namespace:
        args = parse(*given)
        # The flags are those of Megatron-LM's own loop.
        args.fp8, args.fp8_recipe = "e4m3", "tensorwise"
        return args

    with (
        mock.patch.object(models, "parse", with_fp8),
        mock.patch.object(ping_pong, "get_fp8_context", engine.context),
        mock.patch.object(transformer_block, "get_fp8_context", engine.context),
        mock.patch.object(LINEAR[0], "forward", engine.changing(LINEAR[0].forward)),
        mock.patch.object(LINEAR[1], "forward", engine.changing(LINEAR[1].forward)),
    ):
        return train(flags, LENGTHS, 1)


def test_losses_and_gradients(ranks) -> None:
    """Also where layers run again in the backward pass."""
    run = partial(ranks.run, world_size=2)
    whole = run(train_in_fp8, [*FLAGS, WHOLE])
    for more in ([], RECOMPUTE):
        found = run(train_in_fp8, [*FLAGS, "--distca-ping-pong", *more])
        assert found[0].losses == pytest.approx(whole[0].losses, rel=1e-5), more
        check_gradients(found, whole[0], more)
    without = run(train, [*FLAGS, WHOLE], LENGTHS, 1)
    assert abs(without[0].losses[0] / whole[0].losses[0] - 1) > 1e-4
