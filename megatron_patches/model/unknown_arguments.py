"""Arguments of Megatron's blocks and layers that our versions of them have no use for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def refuse_unknown(
    given: Mapping[str, Any], by: str, remedy: str, known: Collection[str] = ()
) -> None:
    """Refuses an argument that would be dropped silently.

    Args:
        given: arguments by name; None: the caller gives none.
        by: what does not know it, for the message.
        remedy: what to do, for the message.
        known: names that are used.

    Raises:
        ValueError: an argument is given that is not known.
    """
    unknown = [name for name, value in given.items() if value is not None and name not in known]
    if unknown:
        raise ValueError(
            f"Megatron gives its layers {', '.join(unknown)}, which {by} does not know: {remedy}"
        )
