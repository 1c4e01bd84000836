"""Pages of Markdown on which benchmarks report."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as benchmarks/__init__.py says

from benchmarks import sources
from distca.whole_file import write_text

RESULTS = Path(__file__).parent / "results"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], rule: str = "---") -> str:
    """Formats a table of Markdown.

    Args:
        head: titles of the columns.
        rows: cells of each row, one for each column.
        rule: what stands below each title; "---:" aligns the column to the right.
    """
    lines = [head, [rule] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def medians(rounds: int) -> str:
    """Returns of how many rounds the figures of a page are, as a part of a sentence.

    Args:
        rounds: number of rounds; a single one has no spread.
    """
    return "one round, so without a spread" if rounds == 1 else f"medians of {rounds} rounds"


def typed(script: str, launcher: str = "python") -> str:
    """Returns the command of this process as a user types it, with DIR for folders, and "DIR ..."
    for those of earlier runs.

    Args:
        script: path of the script in the repository.
        launcher: what starts it.
    """
    words = sys.argv[1:]
    for at, word in enumerate(words):
        if word in ("--output", "--published"):
            words[at + 1] = "DIR"
        elif word.startswith(("--output=", "--published=")):
            words[at] = f"{word.partition('=')[0]}=DIR"
    if "--earlier" in words:
        at = words.index("--earlier") + 1
        others = (n for n, word in enumerate(words) if n > at and word.startswith("--"))
        words[at : next(others, len(words))] = ["DIR", "..."]
    return " ".join([launcher, script, shlex.join(words)]).rstrip()


def write(path: Path, page: str, script: str | None) -> None:
    """Writes a page, which ends with how it was made and a mark of the code that made it.

    Args:
        path: file of the page.
        page: Markdown.
        script: `__file__` of the script that makes it; None: no mark, since older code made a
            part of it.
    """
    end = ""
    if script is not None:
        end = f"\n{sources.provenance()}\n\n{sources.mark(Path(script))}\n"
    write_text(path, f"{page.rstrip()}\n{end}")


def save(folder: Path, name: str, page: str, script: str, figures: Any = None) -> None:
    """Writes `NAME.md`, and `NAME.json` where there are figures, and prints the page.

    Args:
        folder: folder of the files; made if need be.
        name: name of the files.
        page: Markdown, without a newline at the end.
        script: `__file__` of the script that makes it.
        figures: what JSON can hold.
    """
    write(folder / f"{name}.md", page, script)
    if figures is not None:
        write_text(folder / f"{name}.json", json.dumps(figures, indent=1) + "\n")
    print(page)
