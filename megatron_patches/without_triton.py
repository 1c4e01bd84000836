"""Stand-ins for the modules of megatron-core that import triton, where it is not installed.

Imports no torch, so that `megatron_patches` is there at once.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

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
