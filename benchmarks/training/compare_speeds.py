"""Compares the speeds of runs by their logs.

    python benchmarks/training/compare_speeds.py sweep/*.log

A log is named by the way of training and its turn, such as `tiles-2.log`; turns of a way count
together. The first way by name `plain`, where there is one, is what the others are compared with.
The first iterations of a log are left out: they warm up.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

_LINE = re.compile(r"iteration +\d+/.*? tokens/s: ([0-9.]+) \|")
BASELINE = "plain"


def read_speeds(log: Path, warm_up: int) -> list[float]:
    """Tokens per second of each logged interval after the first `warm_up`.

    Raises:
        ValueError: the log is missing or has no line left.
    """
    if not log.is_file():
        raise ValueError(f"{log} does not exist")
    found = [float(speed) for speed in _LINE.findall(log.read_text(errors="replace"))]
    if len(found) <= warm_up:
        raise ValueError(
            f"{log} has {len(found)} lines with tokens/s: more than --warm-up {warm_up} are needed"
        )
    return found[warm_up:]


def way_of(log: Path) -> str:
    """Way of training that a log is named after."""
    return re.sub(r"-\d+$", "", log.stem)


def table(speeds: dict[str, list[float]]) -> str:
    """A Markdown table of medians, and their ratios to the baseline's."""
    medians = {way: statistics.median(found) for way, found in speeds.items()}
    baseline = medians.get(BASELINE)
    lines = [
        f"| way | tokens/s, median | slowest | fastest | ratio to {BASELINE} |",
        "| --- | --- | --- | --- | --- |",
    ]
    for way, median in sorted(medians.items(), key=lambda item: item[1]):
        ratio = "" if baseline is None else f"{median / baseline:.3f}"
        low, high = min(speeds[way]), max(speeds[way])
        lines.append(f"| {way} | {median:.0f} | {low:.0f} | {high:.0f} | {ratio} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command: 1 where a log could not be read; the others are shown all the same."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--warm-up", type=int, default=2, help="log lines that are left out")
    args = parser.parse_args(argv)
    speeds: dict[str, list[float]] = {}
    status = 0
    for log in args.logs:
        try:
            speeds.setdefault(way_of(log), []).extend(read_speeds(log, args.warm_up))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
    speeds = {way: found for way, found in speeds.items() if found}
    if speeds:
        print(table(speeds))
    return status


if __name__ == "__main__":
    sys.exit(main())
