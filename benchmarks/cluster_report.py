"""What the simulated experiments of `cluster.py` share: their options, and what they report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cluster_sweep import Case

K = 1024


@dataclass(frozen=True)
class Report:
    """What an experiment found.

    Attributes:
        title: a line.
        rows: of the CSV file.
        text: Markdown below the title.
        draw: draws the picture on a figure; None: there is none.
    """

    title: str
    rows: list[dict[str, Any]]
    text: list[str]
    draw: Callable[[Any], None] | None


@dataclass(frozen=True)
class Options:
    """The command's flags."""

    batches: int
    sweep_batches: int
    most_promising: int
    finalists: int
    published: str
    models: tuple[str, ...]
    documents: tuple[str, ...]

    def case(self, model: str, documents: str, context: int, sequences: int, gpus: int) -> Case:
        return Case(model, documents, context * K, sequences, gpus, published=self.published)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown lines."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names)]
    lines += [[_cell(row[name]) for name in names] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if np.isnan(value) else f"{value:.3f}"
    return str(value)
