"""Options and reports of the simulated experiments of `paper.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import pages
from benchmarks.cluster.sweep import Case
from distca.simulate import PUBLISHED, UNCHARGED
from distca.simulate.speed_up import enough_batches

K = 1024
BATCHES = 30
"""Batches of each case of a figure by default."""


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

    given_batches: int | None
    """Batches of each case; None: as many as are enough."""
    finalists: int
    published: str
    models: tuple[str, ...]
    documents: tuple[str, ...]
    baseline_ideal: bool = False
    papers_documents: bool = False
    systems: tuple[str, ...] = ()
    """Systems to simulate in a table whose others are those of the stored one; (): all."""
    most_sequences: int | None = None
    """Sequences of a batch above which a table's jobs are those of the stored one, or None."""

    @property
    def in_part(self) -> bool:
        """Whether a table takes some of its figures from the stored one."""
        return bool(self.systems) or self.most_sequences is not None

    def case(self, model: str, documents: str, context: int, sequences: int, gpus: int) -> Case:
        """A case with the published charges, but for `--baseline-ideal`."""
        return Case(
            *(model, documents, context * K, sequences, gpus),
            published=self.published,
            charges=UNCHARGED if self.baseline_ideal else PUBLISHED,
            papers_way=self.papers_documents,
        )

    def batches_of(self, case: Case) -> int:
        """The batches of a job of a table: those given, or enough for ratios within about 1%."""
        return self.given_batches or enough_batches(case.sequences)

    @property
    def batches(self) -> int:
        """The batches of each case of a figure."""
        return self.given_batches or BATCHES

    @property
    def counted(self) -> str:
        """The number of batches, in words."""
        return f"means of {self.batches} batches" if self.batches > 1 else "one batch"


def share_that_fits(rows: Sequence[dict[str, Any]]) -> str:
    """Says in how many batches no GPU runs out of memory."""
    return f"{sum(row['fits'] for row in rows)} of {len(rows)}"


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Formats rows as lines of a Markdown table."""
    names = list(rows[0])
    return pages.table(names, [[_cell(row[name]) for name in names] for row in rows]).splitlines()


def in_percent(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row whose shares are in percent, and whose other fractions have one digit."""
    return {
        name: (f"{value:.1%}" if "share" in name else f"{value:.1f}")
        if isinstance(value, float)
        else value
        for name, value in row.items()
    }


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if np.isnan(value) else f"{value:.3f}"
    return str(value)
