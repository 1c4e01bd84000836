"""Launches and waits of a step on simulated GPUs: now, and when they were first counted.

    python benchmarks/kernels/launches.py --output DIR

`tests/simgpu` counts what a step launches on a simulated GPU, and how often its host waits for the
device. Two files of budgets hold the counts: a step that has more fails a test. This page compares
them with the first count of each job, which it reads from the repository's history.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser

ROOT = Path(__file__).parents[2]
TRAINING, ANSWERS = "tests/simgpu/training_budgets.json", "tests/simgpu/budgets.json"
KINDS = "prefill launches", "prefill syncs", "decode launches", "decode syncs"


def versions(name: str) -> list[tuple[str, Any]]:
    """The contents of a file in all commits that changed it, the oldest first, by commit.

    Raises:
        ValueError: there is no history, as in a shallow clone.
    """
    log = ["git", "log", "--reverse", "--format=%h", "--", name]
    commits = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    if not commits:
        raise ValueError(f"git has no history of {name}: run this in a whole clone")
    found = []
    for commit in commits.split():
        show = ["git", "show", f"{commit}:{name}"]
        text = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        found.append((commit, json.loads(text)))
    return found


def first(history: list[tuple[str, Any]], *keys: str) -> int:
    """The count that the oldest version has which counted it."""
    for _, counts in history:
        for key in keys:
            counts = counts.get(key) if isinstance(counts, dict) else None
        if counts is not None:
            return int(counts)
    raise KeyError(keys)


def training_table(history: list[tuple[str, Any]], now: Any) -> str:
    """A row for each job of training."""
    rows = []
    for job, counts in now.items():
        cells = (f"{first(history, job, kind)} → {counts[kind]}" for kind in ("launches", "syncs"))
        rows.append([job, *cells])
    return pages.table(["job", "launches, all ranks", "waits of a rank"], rows)


def answers_table(history: list[tuple[str, Any]], now: Any) -> str:
    """A row for each number of ranks and family of models."""
    rows = [
        [
            ranks.split()[0],
            family,
            *(f"{first(history, ranks, family, k)} → {counts[k]}" for k in KINDS),
        ]
        for ranks, families in now.items()
        for family, counts in families.items()
    ]
    heads = [kind.replace("syncs", "waits") for kind in KINDS]
    return pages.table(["ranks", "family", *heads], rows)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    args = parser.parse_args()
    try:
        training, answers = versions(TRAINING), versions(ANSWERS)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        parser.error(str(error))
    (of_training, now), (of_answers, models) = (
        (history[0][0], json.loads((ROOT / name).read_text()))
        for history, name in ((training, TRAINING), (answers, ANSWERS))
    )
    page = [
        "# Launches and waits of a step on simulated GPUs",
        "",
        f"`{pages.typed('benchmarks/kernels/launches.py')}`. Counted, not timed: a simulated GPU "
        "sees torch's own launches and waits, but has no clock. Left of each arrow is the first "
        f"count that was kept (training since commit {of_training}, models since {of_answers}). "
        "Right of it is the count of this version.",
        "",
        "## A training step of two layers",
        "",
        "All jobs except *one rank* have two ranks; "
        "[test_simulated_training.py](../../tests/simgpu/test_simulated_training.py) has their "
        "flags. The waits are Megatron-LM's, except those of the capture of graphs.",
        "",
        training_table(training, now),
        "",
        "## Prefill and decode steps of small models",
        "",
        answers_table(answers, models),
    ]
    pages.save(args.output, "launches", "\n".join(page), __file__)


if __name__ == "__main__":
    main()
