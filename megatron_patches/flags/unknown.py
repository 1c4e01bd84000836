"""Messages about flags that the lean loop has not, and about those that no loop has."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from megatron_patches.flags.coverage import Group, group_of, refusal

# Share of letters from which on a flag is taken for a misspelt one.
_ALIKE = 0.85


def message_for(unknown: Sequence[str], known: Sequence[str]) -> str:
    """Returns a line on what to give instead of the words that the parser did not take.

    Args:
        unknown: words of the command line, flags with their values.
        known: the parser's options.
    """
    options = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    if not options:
        return f"{' '.join(unknown)} belongs to no flag"
    return "; ".join(_message(option, known) for option in options)


def _message(option: str, known: Sequence[str]) -> str:
    group = group_of(option)
    if group is not None:
        return _of_megatron(option, group)
    return nearest(option, known)


def nearest(option: str, known: Sequence[str]) -> str:
    """Returns a line on a flag that no loop has."""
    alike = get_close_matches(option, known, 1, _ALIKE)
    if alike:
        return f"there is no {option}: did you mean {alike[0]}?"
    return f"there is no {option}: --help lists all flags"


def _of_megatron(option: str, group: Group) -> str:
    if group.kind == "refused":
        return refusal(group, option)
    if group.kind in ("done", "without effect"):
        return f"the lean loop has no {option}, and needs none: remove it. {group.why}"
    without = "" if group.kind == "covered" else ", without --distca"
    return f"the lean loop has no {option}: --training-loop megatron has it{without}"
