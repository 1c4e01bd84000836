"""Refusals of arguments that Megatron gives to its layers, and that ours would drop silently."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any


def refuse_unknown(
    given: Mapping[str, Any],
    by: str,
    remedy: str,
    theirs: Callable[..., Any],
    known: Collection[str] = (),
) -> None:
    """Refuses an argument that a copy of a function of Megatron's would drop silently.

    Args:
        given: arguments by name; None: the caller gives none.
        by: flag whose copy does not know it, for the message.
        remedy: what to do where Megatron's function knows it, for the message.
        theirs: Megatron's function.
        known: names that are used.

    Raises:
        ValueError: an argument is given that is not known.
    """
    unknown = _given(given, known)
    if not unknown:
        return
    parameters = inspect.signature(theirs).parameters
    mistaken = [name for name in unknown if name not in parameters]
    if mistaken:
        raise ValueError(
            f"Megatron's layers get {', '.join(mistaken)}, which they do not know: remove it"
        )
    raise ValueError(
        f"Megatron gives its layers {', '.join(unknown)}, which {by} does not know: {remedy}"
    )


def refuse_uncomputed(given: Mapping[str, Any]) -> None:
    """Refuses arguments of core attention that no plan and no kernel has.

    Args:
        given: arguments by name; None: the caller gives none.

    Raises:
        ValueError: one is given.
    """
    if unknown := _given(given):
        raise ValueError(
            f"core attention is given {', '.join(unknown)}, which DistCA does not compute: "
            "remove it"
        )


def _given(arguments: Mapping[str, Any], known: Collection[str] = ()) -> list[str]:
    return [name for name, value in arguments.items() if value is not None and name not in known]
