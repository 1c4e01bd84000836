"""What the loaded modules of Megatron and torch are made of, by identity."""

from __future__ import annotations

import sys
import types
from typing import Any

PREFIXES = ("megatron.", "torch.distributed.")


def identities(*prefixes: str) -> dict[str, Any]:
    """Returns every name of the loaded modules, and of the classes that they define.

    Args:
        prefixes: what the modules' names begin with.

    Returns:
        The objects by `module:name` or `module:Class.name`, methods as the class has them.
    """
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if not f"{name}.".startswith(prefixes) or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if key.startswith("__"):
                continue
            found[f"{name}:{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                for inner, method in list(vars(value).items()):
                    if not inner.startswith("__") or isinstance(method, types.FunctionType):
                        found[f"{name}:{key}.{inner}"] = method
    return found


def is_code(value: Any) -> bool:
    """Whether an object is a function, a class or a method."""
    kinds = (types.FunctionType, types.BuiltinFunctionType, type, staticmethod, classmethod)
    return isinstance(value, (*kinds, property))


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Returns the names of `before` that are other objects, or missing, in `after`."""
    missing = object()
    return {name for name, value in before.items() if after.get(name, missing) is not value}
