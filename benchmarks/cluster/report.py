"""Options and reports of the simulated experiments of `paper.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks import pages
from benchmarks.cluster.sweep import Case
from distca.simulate import PUBLISHED

K = 1024


@dataclass(frozen=True)
class Report:
    """Result of an experiment.

    Attributes:
        title: title of the page.
        rows: rows of the CSV file.
        text: lines of Markdown below the title.
        draw: function that draws the picture on a figure; None: there is no picture.
    """

    title: str
    rows: list[dict[str, Any]]
    text: list[str]
    draw: Callable[[Any], None] | None


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    batches: int
    sweep_batches: int
    most_promising: int
    finalists: int
    published: str
    models: tuple[str, ...]
    documents: tuple[str, ...]
    baseline_ideal: bool = False
    papers_documents: bool = False

    def case(self, model: str, documents: str, context: int, sequences: int, gpus: int) -> Case:
        """A case in which nothing is charged."""
        return Case(
            *(model, documents, context * K, sequences, gpus),
            published=self.published,
            papers_way=self.papers_documents,
        )

    def charged_case(
        self, model: str, documents: str, context: int, sequences: int, gpus: int
    ) -> Case:
        """A case with the published charges, but for `--baseline-ideal`."""
        case = self.case(model, documents, context, sequences, gpus)
        return case if self.baseline_ideal else replace(case, charges=PUBLISHED)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Formats rows as lines of a Markdown table."""
    names = list(rows[0])
    return pages.table(names, [[_cell(row[name]) for name in names] for row in rows]).splitlines()


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if np.isnan(value) else f"{value:.3f}"
    return str(value)
