"""Repairs of megatron-core 0.16 where Transformer Engine and apex are not installed."""

from __future__ import annotations

import functools
from typing import Any

import torch


def repair_megatron() -> None:
    """Mends megatron-core where it needs a missing package. May be called again."""
    _repair_recompute()
    _repair_distributed_optimizer()


def _repair_recompute() -> None:
    """Mends selective recomputation, which takes `fp8=False` for fp8, Transformer Engine's."""
    from megatron.core.tensor_parallel import random

    original = random.CheckpointWithoutOutput.__init__
    if random.HAVE_TE or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.fp8 = False

    random.CheckpointWithoutOutput.__init__ = init


def _repair_distributed_optimizer() -> None:
    """Mends loading of the state: it writes to a view of a leaf, and misses Adam's `step`."""
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states
    if HAVE_APEX_OR_TE or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        own = {k: v for k, v in self.optimizer.state[main_param].items() if k == "step"}
        with torch.no_grad():
            return original(self, model_param, own | tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
