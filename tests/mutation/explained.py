"""Survivors of which a person has said why the changed program is as good: `explained.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.work_item import WorkItem, WorkResult

TABLE = Path(__file__).with_name("explained.toml")


@dataclass(frozen=True)
class Explained:
    """A mutant that changes nothing that matters.

    Attributes:
        file: file, from the top folder.
        was: lines that it changes, each without the blanks around it.
        becomes: what it makes of them.
        why: reason why the changed program is as good.
    """

    file: str
    was: tuple[str, ...]
    becomes: tuple[str, ...]
    why: str


def read_explained(path: Path = TABLE) -> list[Explained]:
    """Reads the table."""
    rows = tomllib.loads(path.read_text()).get("mutant", [])
    return [
        Explained(row["file"], _lines(row["was"]), _lines(row["becomes"]), row["why"])
        for row in rows
    ]


def outdated(root: Path, table: Iterable[Explained]) -> list[Explained]:
    """Returns the mutants of lines that are not in their files any more.

    Args:
        root: top folder of the working tree.
        table: mutants.
    """
    found = []
    for each in table:
        path = root / each.file
        lines = _lines(path.read_text()) if path.is_file() else ()
        starts = range(len(lines) - len(each.was) + 1)
        if not any(lines[start : start + len(each.was)] == each.was for start in starts):
            found.append(each)
    return found


def report(
    results: Iterable[tuple[WorkItem, WorkResult]], table: Iterable[Explained]
) -> Iterator[str]:
    """Yields lines that show each survivor without a reason, and how many mutants survived.

    Args:
        results: mutants with their results.
        table: mutants with reasons.
    """
    known = {(each.file, each.was, each.becomes) for each in table}
    total = survived = explained = 0
    for item, result in results:
        total += 1
        if result.is_killed:
            continue
        survived += 1
        (mutation,) = item.mutations
        diff = str(result.diff).splitlines()
        if (str(mutation.module_path), _changed(diff, "-"), _changed(diff, "+")) in known:
            explained += 1
            continue
        yield f"{item.job_id} {mutation.operator_name}"
        yield from (str(result.output), *diff, "")
    if not total:
        yield "no mutant was run"
        return
    share = f"{100 * survived / total:.2f}%"
    yield f"surviving mutants: {survived} of {total} ({share}), {explained} of them explained"


def _changed(diff: Iterable[str], sign: str) -> tuple[str, ...]:
    """Lines that a diff takes away or adds."""
    return tuple(
        line[1:].strip() for line in diff if line.startswith(sign) and not line.startswith(sign * 3)
    )


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())
