"""Spans of tasks: how many rows and keys of a task go to another server.

They are cut on blocks, and neither they nor what is left has too few rows or keys for a kernel.
"""

from __future__ import annotations

from typing import NamedTuple

from distca.plan import Mask
from distca.schedule.base import ScheduleConfig


class Task(NamedTuple):
    """A task of a server: one of the table that there was, by its row, or a new one, with -1."""

    document: int
    q_start: int
    q_end: int
    kv_start: int
    kv_end: int
    load: float
    pairs: int
    row: int = -1


class Span(NamedTuple):
    """Rows `[q_cut, task.q_end)` by keys `[kv_start, kv_end)` of a task, of about `pairs` pairs."""

    q_cut: int
    kv_start: int
    kv_end: int
    pairs: float


class SpanCutter:
    """Cuts spans off tasks.

    Args:
        config: heads and block.
        mask: attention mask of all documents.
        least: fewest rows, and keys, of a span.
    """

    def __init__(self, config: ScheduleConfig, mask: Mask, least: int) -> None:
        self._q_bytes = config.shape.round_trip_bytes
        self._kv_bytes = config.shape.moved_kv_row_bytes
        self._block, self._mask, self._least = config.block, mask, least

    def travelling(self, task: Task, pairs: float) -> Span | None:
        """Cuts off a tile; all of its rows travel."""
        rows, keys = task.q_end - task.q_start, task.kv_end - task.kv_start
        height = max((pairs * self._kv_bytes / self._q_bytes) ** 0.5, self._least)
        span = task.q_end - task.kv_start
        if task.q_end == task.kv_end and height + pairs / height > span:
            # The diagonal is in the way: take the flattest tile below it, if any is large.
            height = (span - max(span * span - 4 * pairs, 0.0) ** 0.5) / 2
        width = round(pairs / min(height, rows))
        if self._mask.window_left is not None or width >= keys or 4 * pairs > span * span:
            return self.last_rows(task, pairs)
        until = task.kv_start + max(width, self._least)
        return self.rectangle(task, pairs, task.kv_start, until)

    def last_rows(self, task: Task, pairs: float) -> Span:
        """Cuts off a task's last rows, with all keys that they see."""
        width = task.kv_end - task.kv_start
        on_diagonal = task.q_end == task.kv_end
        if self._mask.window_left is not None:
            width = min(self._mask.window_left + 1, width)
            on_diagonal = False
        wanted = pairs / width
        if on_diagonal:
            # The corner above the diagonal is missing.
            wanted = width - max(width * width - 2 * pairs, 0.0) ** 0.5
        q_cut = self._row_cut(task, task.q_end - wanted)
        rows = task.q_end - q_cut
        corner = rows * (rows - 1) / 2 if on_diagonal else 0.0
        first = max(task.kv_start, int(self._mask.first_key(q_cut)))
        return Span(q_cut, first, task.kv_end, rows * width - corner)

    def rectangle(self, task: Task, pairs: float, kv_start: int, kv_end: int) -> Span | None:
        """Cuts off a task's last rows, over a range of keys that all of them see."""
        block = self._block
        if kv_start > task.kv_start:
            kv_start = -(-kv_start // block) * block
        on_diagonal = task.q_end == task.kv_end
        if kv_end < task.kv_end or on_diagonal:
            kv_end = kv_end // block * block
        if kv_end - kv_start < self._least:
            return None
        cut = task.q_end - pairs / (kv_end - kv_start)
        q_cut = self._row_cut(task, max(cut, kv_end) if on_diagonal else cut)
        if on_diagonal and q_cut < kv_end - 1:
            return None
        return Span(q_cut, kv_start, kv_end, (task.q_end - q_cut) * (kv_end - kv_start))

    def _row_cut(self, task: Task, wanted: float) -> int:
        """Returns where to cut a task's rows, on a block and with neither side too small."""
        block, least = self._block, self._least
        cut = -(-int(wanted) // block) * block
        if task.q_end - cut < least:
            cut = (task.q_end - least) // block * block
        return cut if cut - task.q_start >= least else task.q_start

    def cut(self, task: Task, span: Span) -> list[tuple[int, int, int, int, int]]:
        """Cuts a task: `(document, q_start, q_end, kv_start, kv_end)` of a span, and of what is
        left."""
        document = task.document
        found = [(document, span.q_cut, task.q_end, span.kv_start, span.kv_end)]
        if span.q_cut > task.q_start:
            ends = span.q_cut if task.q_end == task.kv_end else task.kv_end
            found.append((document, task.q_start, span.q_cut, task.kv_start, ends))
        # Under a window the span's rows see no keys before the span's.
        if span.kv_start > task.kv_start and self._mask.window_left is None:
            found.append((document, span.q_cut, task.q_end, task.kv_start, span.kv_start))
        if span.kv_end < task.kv_end:
            found.append((document, span.q_cut, task.q_end, span.kv_end, task.kv_end))
        return found
