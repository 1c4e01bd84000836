"""Pages of Markdown on which benchmarks report."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[object]], rule: str = "---") -> str:
    """Formats a table of Markdown.

    Args:
        head: titles of the columns.
        rows: cells of each row, one for each column.
        rule: what stands below each title; "---:" aligns the column to the right.
    """
    lines = [head, [rule] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def typed(script: str, launcher: str = "python") -> str:
    """Tells the command of this process as a user types it, with DIR for the folder of results.

    Args:
        script: path of the script in the repository.
        launcher: what starts it.
    """
    words = sys.argv[1:]
    for at, word in enumerate(words):
        if word == "--output":
            words[at + 1] = "DIR"
        elif word.startswith("--output="):
            words[at] = "--output=DIR"
    return " ".join([launcher, script, shlex.join(words)]).rstrip()


def save(folder: Path, name: str, page: str, figures: Any = None) -> None:
    """Writes `NAME.md`, and `NAME.json` where there are figures, and prints the page.

    Args:
        folder: folder of the files; made if need be.
        name: name of the files.
        page: Markdown, without a newline at the end.
        figures: what JSON can hold.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(page + "\n")
    if figures is not None:
        (folder / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(page)
