"""A line about flags that there are not, in place of the parser's."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

# Share of letters from which on a flag is taken for a misspelt one.
_ALIKE = 0.85


def explained(message: str, known: Sequence[str]) -> str:
    """Returns what the parser says of a command line; of unknown flags what to give instead.

    Args:
        message: the parser's.
        known: the parser's options.
    """
    _, is_unknown, words = message.partition("unrecognized arguments: ")
    options = [word.partition("=")[0] for word in words.split() if word.startswith("--")]
    if not (is_unknown and options):
        return message
    return "; ".join(nearest(option, known) for option in options)


def nearest(option: str, known: Sequence[str]) -> str:
    """Returns a line on a flag that there is not."""
    alike = get_close_matches(option, known, 1, _ALIKE)
    if alike:
        return f"there is no {option}: did you mean {alike[0]}?"
    return f"there is no {option}: --help lists all flags"
