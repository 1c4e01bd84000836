"""Figures of `published.md`, which rows of claims show: what it simulates has no other figure."""

from __future__ import annotations

from typing import Any

from benchmarks.claims import stored_json
from benchmarks.serving.papers.verdicts import made_by
from benchmarks.serving.published_times import Number, Run

PUBLISHED = made_by("published")
RIGHT = "right"
"""What a comparison says whose sign is right in all fits."""


def stored_number(run: Run, over: Run | None = None) -> dict[str, Any]:
    """Returns what `published.json` has of a run: `published` and `ours`, predicted by the fit that
    did not see the number, in seconds; `over`: the ratio of its time to another run's.

    Raises:
        ValueError: it has no such number, or several.
    """
    said = run.said + (f"; over {over.said}" if over else "")
    every = stored_json("serving/published")["numbers"]
    found = [each for each in every if each["run"] == said and each["place"].startswith(run.paper)]
    if len(found) != 1:
        raise ValueError(f"published.json has {len(found)} numbers of {said!r}, not one")
    return dict(found[0])


def ours_and_theirs(*numbers: Number) -> tuple[list[float], list[float]]:
    """Returns ours and what is published, of numbers or of their runs alone."""
    found = [stored_number(each.run, each.over) for each in numbers]
    return [each["ours"] for each in found], [each["published"] for each in found]


def stored_comparisons(place: str, words: str = "") -> list[dict[str, str]]:
    """Returns the comparisons of a place, by the fit to all numbers: `comparison`, `ours`, `sign`.

    Args:
        place: such as "Meta, Table 7".
        words: what the comparison must say.

    Raises:
        ValueError: there is none.
    """
    every = stored_json("serving/published")["comparisons"]
    found = [each for each in every if each["place"] == place and words in each["comparison"]]
    if not found:
        raise ValueError(f"published.json has no comparison of {place!r} with {words!r}")
    return found
