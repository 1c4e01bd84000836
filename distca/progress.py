"""Progress of a command: a bar on a terminal, elsewhere a line after two seconds and every ten."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import TextIO, TypeVar

Item = TypeVar("Item")

SECONDS_BETWEEN_LINES = 10.0
"""Seconds between two lines about progress, where there is no terminal."""
OVERDUE = "longer than estimated"
"""What stands in place of the time that is left once that has passed."""
_SECONDS_TO_FIRST_LINE = 2.0
_SECONDS_BETWEEN_BARS = 1.0


class Progress:
    """What a command has done so far.

    Args:
        unit: what is counted, in the plural, such as "points".
        total: how many there are; None: nobody knows.
        done: how many were done before.
        scaled: whether counts are shown as thousands and millions.
        estimates: whether the time that is left is shown: parts take about equally long.
    """

    def __init__(
        self,
        unit: str = "",
        total: int | None = None,
        done: int = 0,
        scaled: bool = False,
        estimates: bool = True,
    ) -> None:
        self.unit, self.total, self.done, self.scaled = unit, total, done, scaled
        self.estimates = estimates
        self._first = done
        # The count that the last line had, and the seconds when a line first had it.
        self._counted = done, 0.0
        self._doing: Callable[[], str] = str
        self.changed: Callable[[], None] = lambda: None

    def update(self, count: int = 1) -> None:
        """Counts what was done since the last call."""
        self.done += count
        self.changed()

    @property
    def doing(self) -> str:
        """What is being done."""
        return self._doing()

    def describe(self, doing: str | Callable[[], str]) -> None:
        """Says what is being done.

        Args:
            doing: text, or a function that returns it whenever it is shown, perhaps on another
                thread.
        """
        self._doing = doing if callable(doing) else lambda: doing
        self.changed()

    def line(self, seconds: float) -> str:
        """Returns a line about progress, without what the command is called.

        Args:
            seconds: time since the command began.
        """
        parts = [_clock(seconds)]
        if self.unit:
            of = "" if self.total is None else f" of {self._number(self.total)}"
            parts.append(f"{self._number(self.done)}{of} {self.unit}")
        if doing := self.doing:
            parts.append(doing)
        begun = self.total is not None and self._first < self.done < self.total
        if self.estimates and begun and seconds >= 1:
            parts.append(self._left(seconds))
        return ", ".join(parts)

    def _left(self, seconds: float) -> str:
        """Says how long the rest takes at the rate so far.

        While a part goes on, the estimate counts down. It would grow without bound if the rate were
        taken again of the time that has passed.
        """
        assert self.total is not None
        if self._counted[0] != self.done:
            self._counted = self.done, seconds
        done, then = self._counted
        left = (self.total - done) / (done - self._first) * then - (seconds - then)
        return f"about {_clock(left)} left" if left > 0 else OVERDUE

    def _number(self, count: int) -> str:
        if self.scaled:
            for size, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
                if count >= size:
                    return f"{count / size:.1f} {name}"
        return f"{count:,}"


def _clock(seconds: float) -> str:
    """Formats hours, if there are any, minutes and seconds."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


@contextlib.contextmanager
def progress(
    command: str,
    unit: str = "",
    total: int | None = None,
    *,
    done: int = 0,
    doing: str = "",
    scaled: bool = False,
    estimates: bool = True,
    every: float | None = None,
    stream: TextIO | None = None,
) -> Iterator[Progress]:
    """Shows progress on standard error while the block runs, also where a part of it takes long.

    Args:
        command: name of the command, with which lines begin.
        unit: what is counted, in the plural; "": nothing, there is only what is being done.
        total: how many there are; None: nobody knows.
        done: how many were done before.
        doing: what is being done at first.
        scaled: whether counts are shown as thousands and millions.
        estimates: whether the time that is left is shown: parts take about equally long.
        every: seconds between two lines; None: `SECONDS_BETWEEN_LINES`.
        stream: where it is shown; None: standard error.
    """
    out = sys.stderr if stream is None else stream
    shown = Progress(unit, total, done, scaled, estimates)
    shown.describe(doing)
    if out is None:
        # It was closed before this process began.
        yield shown
    elif out.isatty():
        with _bar(shown, out):
            yield shown
    else:
        with _lines(shown, command, every or SECONDS_BETWEEN_LINES, out):
            yield shown


def track(items: Collection[Item], command: str, unit: str) -> Iterator[Item]:
    """Yields items, and shows how many of them are done.

    Args:
        items: what is worked on, one after the other.
        command: name of the command, with which lines begin.
        unit: what the items are called, in the plural.
    """
    with progress(command, unit, len(items)) as shown:
        for item in items:
            yield item
            shown.update()


@contextlib.contextmanager
def _bar(shown: Progress, out: TextIO) -> Iterator[None]:
    from tqdm import tqdm

    form = None if shown.unit else "{desc}, {elapsed}"
    if shown.unit and not shown.estimates:
        form = "{desc}: {n_fmt} of {total_fmt}{unit}, {elapsed}"
    with tqdm(
        desc=shown.doing or None,
        total=shown.total,
        initial=shown.done,
        unit=f" {shown.unit}",
        unit_scale=shown.scaled,
        bar_format=form,
        file=out,
    ) as bar:

        def describe() -> None:
            if doing := shown.doing:
                bar.set_description(doing, refresh=not shown.unit)

        def changed() -> None:
            describe()
            bar.update(shown.done - bar.n)

        def refresh() -> None:
            describe()
            bar.refresh()

        shown.changed = changed
        # A part of the work may take long, and the time goes on.
        with _repeated(refresh, _SECONDS_BETWEEN_BARS):
            yield


@contextlib.contextmanager
def _lines(shown: Progress, command: str, every: float, out: TextIO) -> Iterator[None]:
    begun = time.monotonic()

    def write() -> None:
        # Nobody may read it any more.
        with contextlib.suppress(OSError, ValueError):
            out.write(f"{command}: {shown.line(time.monotonic() - begun)}\n")
            out.flush()

    with _repeated(write, every, min(every, _SECONDS_TO_FIRST_LINE)):
        yield


@contextlib.contextmanager
def _repeated(
    call: Callable[[], object], every: float, first: float | None = None
) -> Iterator[None]:
    """Calls a function again and again while the block runs, on a thread of its own.

    Args:
        call: the function.
        every: seconds between two calls.
        first: seconds until the first call; None: `every`.
    """
    ended = threading.Event()

    def repeat() -> None:
        seconds = every if first is None else first
        while not ended.wait(seconds):
            call()
            seconds = every

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
