"""Documents from a user's function: `--distca-documents MODULE:FUNCTION`."""

from __future__ import annotations

import importlib
from argparse import Namespace
from typing import Any


def custom_dataset(args: Namespace, name: str, split: str) -> Any:
    """Calls a user's function for the documents of a split.

    Args:
        args: Megatron-LM's arguments.
        name: `MODULE:FUNCTION`, a function of `(args, split)`.
        split: train, valid or test.

    Returns:
        Its list, which should be a `DocumentList`; None if the split has no documents.

    Raises:
        ValueError: there is no such function.
    """
    return _imported(name)(args, split)


def _imported(name: str) -> Any:
    """Imports the function that `--distca-documents MODULE:FUNCTION` names.

    Raises:
        ValueError: there is none.
    """
    module, _, function = name.partition(":")
    said = f"--distca-documents {name}"
    if not module or not function:
        raise ValueError(f"{said}: give MODULE:FUNCTION, such as my_data:documents")
    try:
        found = importlib.import_module(module)
        for part in function.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{said} cannot be imported ({error}): put its folder in PYTHONPATH"
        ) from error
    if not callable(found):
        raise ValueError(f"{said} is no function of (args, split)")
    return found


def name_of(function: Any) -> str:
    """Returns the name by which `custom_dataset` finds a function again.

    Raises:
        ValueError: it has none, as a lambda or a function within another.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<>")
    if module is None or "<" in name:
        raise ValueError(f"documents={function!r}: give a function that a module defines by name")
    return f"{module}:{name}"
