"""What of Megatron's model is ours: parts, and functions of instances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from support.models import parse, start_processes


def replaced_parts(flags: Sequence[str], graphs: bool) -> set[str]:
    """Builds a model on one rank, and returns what of Megatron's is replaced.

    Args:
        flags: flags of the model.
        graphs: whether its layers replay CUDA graphs, which need no GPU until they run.

    Returns:
        `module:Class.attribute`, by the class of Megatron's that has it.
    """
    from megatron_patches.model.cuda_graphs import graph_layers
    from megatron_patches.parts import build_model

    args = parse(flags)
    start_processes(args)
    model = build_model(args)
    if graphs:
        graph_layers(model, None)  # type: ignore[arg-type]
    found = set()
    for module in model.modules():
        kind = type(module)
        if kind.__module__.startswith("megatron.core"):
            where = f"{kind.__module__}:{kind.__name__}"
            found |= {f"{where}.{name}" for name in vars(module) if _is_ours(module, name)}
            found |= {
                f"{where}.{name}"
                for name, part in module.named_children()
                if type(part).__module__.startswith("megatron_patches")
            }
    return found


def _is_ours(module: torch.nn.Module, name: str) -> bool:
    """Whether an instance has a function in place of its class's."""
    value: Any = vars(module)[name]
    return callable(value) and callable(getattr(type(module), name, None))
