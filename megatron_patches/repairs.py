"""Repairs of megatron-core where something that it counts on is not installed."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch

# Modules that import triton unguarded, and are imported by those that every model needs.
_NEED_TRITON = (
    "megatron.core.transformer.moe.paged_stash",
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
)


class _NeedsTriton(types.ModuleType):
    """A module whose functions cannot run, but whose modes can be asked for: they are off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("is_"):
            return lambda: False

        def refuse(*_: Any, **__: Any) -> None:
            raise ImportError(f"{self.__name__}.{name} needs triton: pip install triton")

        return refuse


def stand_in_for_triton() -> None:
    """Lets megatron-core be imported without triton. Called before its first import."""
    if importlib.util.find_spec("triton") is None:
        for name in _NEED_TRITON:
            sys.modules.setdefault(name, _NeedsTriton(name))


def repair_megatron() -> None:
    """Mends megatron-core where it needs what is missing. May be called again."""
    _repair_recompute()
    _repair_distributed_optimizer()
    _repair_compiling_of_helpers()


def _repair_compiling_of_helpers() -> None:
    """Leaves compiled helpers of datasets as they are in the wheel, which has no Makefile for them.

    Megatron-LM's loop ends the first rank when `make` fails.
    """
    from megatron.core.datasets import utils

    assert utils.__file__ is not None
    if not (Path(utils.__file__).parent / "Makefile").exists():
        utils.compile_helpers = lambda: None


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
