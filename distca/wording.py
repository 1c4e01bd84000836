"""Words of messages."""

from __future__ import annotations

import importlib.metadata


def ordinal(number: int) -> str:
    """Returns a number as a place in a row: `2nd`, `11th`."""
    ends = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number:,}{ends or 'th'}"


def install(extra: str) -> str:
    """Returns the command that installs an extra of this package.

    A package that is not installed runs from its checkout, and may be on no index.
    """
    try:
        importlib.metadata.version("distca")
    except importlib.metadata.PackageNotFoundError:
        return f"pip install -e '.[{extra}]', in the checkout of DistCA"
    return f"pip install 'distca[{extra}]'"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, which has an s unless the number is 1: `1,024 tokens`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
