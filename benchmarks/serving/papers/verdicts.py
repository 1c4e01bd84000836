"""Verdicts on claims of papers: reproduced, different, impossible here, or missing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.claims import span

REPRODUCED = "reproduced"
NO_CLAIM = "no claim"
"""The paper draws or lists something, and says nothing that could be wrong."""
WITHIN = 0.1
"""Relative error up to which a figure counts as reproduced."""
VERDICT = re.compile(
    rf"{REPRODUCED}|{NO_CLAIM}|differs by [^:]+: .+|not possible here: .+|missing: .+"
)
"""What a verdict looks like."""
EXACTLY = 0.005
"""Likewise of figures that are computed and not measured: what rounding leaves."""


def differs(how: str, because: str) -> str:
    """Says how what is here differs, and why."""
    return f"differs by {how}: {because}"


def not_possible(why: str) -> str:
    """Says why a claim cannot be shown here."""
    return f"not possible here: {why}"


def missing(what: str) -> str:
    """Says what has not been built or measured."""
    return f"missing: {what}"


def judged(
    ours: Sequence[float], theirs: Sequence[float], because: str, within: float = WITHIN
) -> str:
    """Compares figures of one kind.

    Args:
        ours: figures that are found here.
        theirs: as many published ones.
        because: why they differ, if one differs by more than `within`.
        within: relative error up to which a figure counts as reproduced.
    """
    errors = [one / other - 1 for one, other in zip(ours, theirs, strict=True)]
    if max(map(abs, errors)) <= within + 1e-9:
        return REPRODUCED
    return differs(span(errors, "+.0%"), because)


def holds(found: bool, how: str, because: str) -> str:
    """Says that a claim is reproduced, if it is found to hold, else how it differs, and why."""
    return REPRODUCED if found else differs(how, because)


def page(name: str) -> str:
    """Formats a link to a stored page beside this one."""
    return f"[{name}.md]({name}.md)"


def made_by(name: str, flags: str = "--output DIR", script: str | None = None) -> str:
    """Formats the command that makes a stored page, and a link to the page."""
    return f"`python benchmarks/serving/{script or name}.py {flags}`: {page(name)}"


def tests(*paths: str) -> str:
    """Formats commands that run tests: paths in the folder of tests."""
    return ", ".join(f"`pytest tests/{path}.py`" for path in paths)
