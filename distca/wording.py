"""Words of messages."""

from __future__ import annotations

from pathlib import Path

_ABOVE = Path(__file__).resolve().parents[1]
"""The folder that this package lies in: a checkout, or one of installed packages."""


def ordinal(number: int) -> str:
    """Returns a number as a place in a row: `2nd`, `11th`."""
    ends = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number:,}{ends or 'th'}"


def install(extra: str) -> str:
    """Returns the command that installs an extra of this package.

    A package that runs from its checkout, installed with `-e` or not at all, may be on no index.
    """
    project = _ABOVE / "pyproject.toml"
    # Some packages leave a file of this name among installed ones.
    if project.is_file() and 'name = "distca"' in project.read_text(encoding="utf-8"):
        return f"pip install -e '.[{extra}]', in the checkout of DistCA"
    return f"pip install 'distca[{extra}]'"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, which has an s unless the number is 1: `1,024 tokens`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
