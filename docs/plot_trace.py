"""Draws a timeline that `--distca-trace` wrote, for where there is no browser.

python docs/plot_trace.py trace.json trace.png
python docs/plot_trace.py trace.json trace.png --milliseconds 100 250
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from distca.palette import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION

_COLOURS = {
    "forward": BLUE,
    "backward": ORANGE,
    "serve": GREY,
    "wait": VERMILION,
    "kernel": GREEN,
    "exchange": BLACK,
}


def kind_of(event: dict[str, Any]) -> str:
    """What a span is coloured by."""
    if event["cat"] == "ticks":
        phase, runs = event["name"].split(": ")
        return "serve" if runs == "serve" else phase
    if event["cat"] == "kernels":
        return "kernel"
    return "wait" if event["name"].startswith("wait") else "exchange"


def draw(trace: dict[str, Any], path: Path, window: tuple[float, float] | None) -> None:
    """Draws every rank's lanes.

    Args:
        trace: the file's content.
        path: the picture; its suffix says in which format.
        window: from and to, in milliseconds; None: all.

    Raises:
        ValueError: the trace has no spans.
    """
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    if not spans:
        raise ValueError("the trace has no spans: was --distca-trace-iterations reached?")
    names = {
        event["pid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    lanes = ("ticks", "exchange", "kernels")
    rows = [(rank, lane) for rank in sorted(names) for lane in lanes]
    figure = Figure(figsize=(13, 0.32 * len(rows) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    for number, (rank, lane) in enumerate(rows):
        for kind, colour in _COLOURS.items():
            bars = [
                (event["ts"] / 1e3, event["dur"] / 1e3)
                for event in spans
                if event["pid"] == rank and event["cat"] == lane and kind_of(event) == kind
            ]
            axes.broken_barh(bars, (number - 0.45, 0.9), color=colour, linewidth=0)
    for kind, colour in _COLOURS.items():
        axes.bar(0, 0, color=colour, label=kind)
    axes.set_yticks(range(len(rows)), [f"rank {rank} {lane}" for rank, lane in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    if window is not None:
        axes.set_xlim(*window)
    axes.legend(ncol=len(_COLOURS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--milliseconds", type=float, nargs=2, metavar=("FROM", "TO"))
    args = parser.parse_args(argv)
    try:
        draw(json.loads(args.trace.read_text()), args.picture, args.milliseconds)
    except (OSError, ValueError, KeyError) as error:
        parser.exit(2, f"error: {args.trace}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
