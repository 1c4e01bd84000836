"""A timeline of what every rank did, in the format of Chrome's and Perfetto's viewers.

Times are the wall clock's, so ranks of one machine line up, and those of several as well as their
clocks do. On GPUs a span lasts from one CUDA event to another on the current stream.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch

from distca.timeline import LANES, TimelineEvent

_Moment: TypeAlias = "int | torch.cuda.Event"
"""Nanoseconds of the wall clock, or an event on a GPU."""


@dataclass(frozen=True)
class _Span:
    """Work of the rank; `cpu` are its thread's nanoseconds."""

    name: str
    lane: str
    start: _Moment
    end: _Moment
    cpu: int
    args: dict[str, object]


class Trace:
    """The spans of one rank, recorded while `recording` is set.

    Args:
        device: device that does the spans' work.

    Attributes:
        recording: whether spans are kept.
        labels: labels added to every span, such as the tick that runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.recording = False
        self.labels: dict[str, object] = {}
        self._cuda = device.type == "cuda"
        self._origin: tuple[int, torch.cuda.Event] | None = None
        self._spans: list[_Span] = []

    @contextlib.contextmanager
    def span(self, name: str, lane: str, **labels: object) -> Iterator[None]:
        """Records the work inside as a span.

        Args:
            name: name of the span.
            lane: one of `LANES`.
            labels: labels of the span, beside the trace's own.
        """
        if not self.recording:
            yield
            return
        start = self._now()
        cpu = time.thread_time_ns()
        yield
        cpu = time.thread_time_ns() - cpu
        self._spans.append(_Span(name, lane, start, self._now(), cpu, self.labels | labels))

    def _now(self) -> _Moment:
        if not self._cuda:
            return time.time_ns()
        if self._origin is None:
            torch.cuda.synchronize()
            self._origin = time.time_ns(), self._event()
        return self._event()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _microseconds(self, moment: _Moment) -> float:
        if isinstance(moment, int):
            return moment / 1e3
        assert self._origin is not None
        origin_ns, origin = self._origin
        return origin_ns / 1e3 + float(origin.elapsed_time(moment)) * 1e3

    def take(self, rank: int) -> list[TimelineEvent]:
        """Returns the spans so far as events of the trace format, and forgets them.

        Args:
            rank: number of the process under which a viewer shows them.

        Returns:
            Events with start `ts`, duration `dur` and the thread's CPU time `tdur` in microseconds.
        """
        if self._cuda:
            torch.cuda.synchronize()
        events: list[TimelineEvent] = []
        for span in self._spans:
            start, end = self._microseconds(span.start), self._microseconds(span.end)
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.lane,
                    "pid": rank,
                    "tid": LANES.index(span.lane),
                    "ts": start,
                    "dur": end - start,
                    "tdur": span.cpu / 1e3,
                    "args": span.args,
                }
            )
        self._spans, self._origin = [], None
        return events
