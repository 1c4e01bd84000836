"""Timelines of runs and simulations, as files in Chrome's and Perfetto's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from distca.whole_file import write_text

LANES = ("ticks", "exchange", "kernels", "pipeline")
"""Lines of a rank in the viewer, by which its spans are sorted."""


class TimelineEvent(TypedDict):
    """A span in the viewers' format, in microseconds; `tdur` is the thread's CPU time."""

    ph: str
    name: str
    cat: str
    pid: int
    tid: int
    ts: float
    dur: float
    tdur: float
    args: dict[str, object]


def write_trace(path: Path, ranks: Sequence[tuple[str, Sequence[TimelineEvent]]]) -> None:
    """Writes a timeline of all ranks, whose first event is at time 0.

    Args:
        path: JSON file to write; ui.perfetto.dev and chrome://tracing open it.
        ranks: name of each rank in the viewer, and its events.
    """
    first = min((event["ts"] for _, events in ranks for event in events), default=0.0)
    all_events: list[dict[str, object]] = []
    for rank, (name, events) in enumerate(ranks):
        names = [("process_name", 0, name)]
        names += [("thread_name", lane, label) for lane, label in enumerate(LANES)]
        all_events += [
            {"ph": "M", "name": kind, "pid": rank, "tid": lane, "args": {"name": label}}
            for kind, lane, label in names
        ]
        all_events += [{**event, "ts": event["ts"] - first} for event in events]
    text = json.dumps({"traceEvents": all_events, "displayTimeUnit": "ms"})
    write_text(path, text + "\n")
