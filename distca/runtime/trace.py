"""A timeline of what every rank did, in the format of Chrome's and Perfetto's viewers.

Times are of the wall clock, so that ranks of one machine line up; between machines they are as good
as their clocks. On GPUs a span is from one CUDA event to another on the current stream.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

LANES = ("ticks", "exchange", "kernels", "pipeline")
"""What a rank's spans are sorted into: one line each in the viewer."""


class Trace:
    """Spans of one rank; nothing is recorded until `recording` is set.

    Args:
        device: where the spans' work is done.

    Attributes:
        recording: whether spans are kept.
        labels: added to every span, such as the tick that runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.recording = False
        self.labels: dict[str, Any] = {}
        self._cuda = device.type == "cuda"
        self._origin: tuple[int, Any] | None = None
        self._spans: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def span(self, name: str, lane: str, **labels: Any) -> Iterator[None]:
        """Records what happens inside.

        Args:
            name: what it is.
            lane: one of `LANES`.
            labels: shown with it, beside the trace's own.
        """
        if not self.recording:
            yield
            return
        start = self._now()
        cpu = time.thread_time_ns()
        yield
        cpu = time.thread_time_ns() - cpu
        self._spans.append(
            {
                "name": name,
                "lane": lane,
                "start": start,
                "end": self._now(),
                "cpu": cpu,
                "args": self.labels | labels,
            }
        )

    def _now(self) -> Any:
        if not self._cuda:
            return time.time_ns()
        if self._origin is None:
            torch.cuda.synchronize()
            self._origin = time.time_ns(), self._event()
        return self._event()

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _microseconds(self, moment: Any) -> float:
        if not self._cuda:
            return float(moment) / 1e3
        assert self._origin is not None
        at, origin = self._origin
        return at / 1e3 + float(origin.elapsed_time(moment)) * 1e3

    def take(self, rank: int) -> list[dict[str, Any]]:
        """The spans so far as events of the trace format, which are then forgotten.

        Args:
            rank: the process that the viewer shows them under.

        Returns:
            Events with `ts` and `dur` in microseconds, and `tdur`, those that the CPU was busy.
        """
        if self._cuda:
            torch.cuda.synchronize()
        events: list[dict[str, Any]] = []
        for span in self._spans:
            start, end = (self._microseconds(span[edge]) for edge in ("start", "end"))
            events.append(
                {
                    "ph": "X",
                    "name": span["name"],
                    "cat": span["lane"],
                    "pid": rank,
                    "tid": LANES.index(span["lane"]),
                    "ts": start,
                    "dur": end - start,
                    "tdur": span["cpu"] / 1e3,
                    "args": span["args"],
                }
            )
        self._spans, self._origin = [], None
        return events


def write_trace(path: Path, ranks: Sequence[tuple[str, list[dict[str, Any]]]]) -> None:
    """Writes a timeline.

    Args:
        path: a JSON file, to be opened at ui.perfetto.dev or chrome://tracing.
        ranks: each rank's name in the viewer and its events, which start at the first one's time.
    """
    first = min((event["ts"] for _, events in ranks for event in events), default=0.0)
    all_events: list[dict[str, Any]] = []
    for rank, (name, events) in enumerate(ranks):
        names = [("process_name", 0, name)]
        names += [("thread_name", lane, label) for lane, label in enumerate(LANES)]
        all_events += [
            {"ph": "M", "name": kind, "pid": rank, "tid": lane, "args": {"name": label}}
            for kind, lane, label in names
        ]
        all_events += [{**event, "ts": event["ts"] - first} for event in events]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": all_events, "displayTimeUnit": "ms"}) + "\n")
