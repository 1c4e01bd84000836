"""The report of `distca profile` as a page: the kernel's rates over lengths, and the errors."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from distca.commands import html_page
from distca.commands.html_page import Cell
from distca.cost.profile import Profile
from distca.plan.span import Floats

_TABLES = {
    "full_seconds": "full rectangles, forward",
    "diagonal_seconds": "tasks that end on the diagonal, forward",
    "backward_full_seconds": "full rectangles, backward",
    "backward_diagonal_seconds": "tasks that end on the diagonal, backward",
}
_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.5, float("inf"))
"""Upper bounds of the errors that are counted together."""


def page_of(
    command: str, profile: Profile, errors: Sequence[float], saved: dict[str, object]
) -> str:
    """Returns the page.

    Args:
        command: what was typed.
        profile: measured times.
        errors: relative errors of predictions for lengths that are not on the grid.
        saved: the output file's content.
    """
    rate = profile.flops_per_second
    answer = (
        f"Attention reaches {_tflops(rate)} forward; predictions for other lengths are "
        f"{statistics.median(errors):.1%} off in the median, {max(errors):.1%} at most."
    )
    parts = [html_page.paragraph(profile.description)]
    lengths = [f"{length:,}" for length in profile.lengths]
    for name, title in _TABLES.items():
        seconds = getattr(profile, name)
        if seconds is None:
            continue
        caption = (
            f"{title}: microseconds of a task, by queries (down) and keys (right); the darker, the "
            "more pairs a second"
        )
        drawn = _drawn(np.array(profile.lengths), np.array(seconds), "diagonal" in name)
        times = html_page.heat_map(caption, "queries, keys", lengths, lengths, *drawn)
        parts.append(html_page.section(f"{title[0].upper()}{title[1:]}", times))
    parts.append(html_page.section("Predictions for other lengths", _errors(errors)))
    provenance = [(name, [Cell(value, is_text=True)]) for name, value in profile.provenance.items()]
    listed = html_page.table("What was measured", ["", "value"], provenance)
    parts.append(html_page.section("Machine", listed))
    parts.append(html_page.section("Command", html_page.shell(command)))
    return html_page.page("distca profile", answer, {**saved, "errors": [*errors]}, parts)


def _drawn(
    lengths: Floats, seconds: Floats, diagonal: bool
) -> tuple[list[list[float | None]], list[list[str]]]:
    """Returns what darkens each cell, and what each says."""
    q, kv = lengths[:, None].astype(np.float64), lengths[None, :].astype(np.float64)
    pairs = q * kv - diagonal * q * (q - 1) / 2
    # A task with fewer keys than queries does not end on the diagonal.
    there = (kv >= q) | (not diagonal)
    rates, shown = [], []
    for row, times, exists in zip(pairs / seconds, seconds, there, strict=True):
        rates.append(
            [float(rate) if is_there else None for rate, is_there in zip(row, exists, strict=True)]
        )
        shown.append([f"{1e6 * time:,.1f}" for time in times])
    return rates, shown


def _errors(errors: Sequence[float]) -> str:
    rows, low = [], 0.0
    for high in _BUCKETS:
        count = sum(low <= error < high for error in errors)
        name = f"{low:.0%} to {high:.0%}" if high < float("inf") else f"{low:.0%} or more"
        rows.append((name, [Cell(str(count), count / len(errors))]))
        low = high
    caption = f"{len(errors)} lengths that are not on the grid, by how far predictions are off"
    return html_page.table(caption, ["error", "lengths"], rows)


def _tflops(rate: float) -> str:
    """Writes operations a second."""
    return f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GFLOP/s"
