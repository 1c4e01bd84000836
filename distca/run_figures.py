"""Figures of training runs: their names on boards, and how they are read from boards and logs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

LOSS, GRADIENTS = "lm loss", "grad norm"
"""Names that are Megatron-LM's."""
SECONDS, SPEED = "s", "tokens/s"
BUSIEST, MEAN = "CPU seconds of the busiest rank", "CPU seconds of the mean rank"
"""What a step takes of CPUs that stand in for GPUs."""
ATTENTION_BUSIEST, ATTENTION_MEAN = "attention s, busiest rank", "attention s, mean rank"
WAIT, MFU, TFLOPS = "exposed wait, share of a step", "MFU", "TFLOP/s of a device"
ALLOCATED, RESERVED, RESIDENT = "peak allocated GB", "peak reserved GB", "peak RSS GB"
BEFORE, AFTER = "load max/mean before", "load max/mean"
"""Core attention of the busiest rank over the mean: in plain data parallelism, and planned."""
MOVED, PLAN_WAIT = "MB moved", "plan wait ms"

Scalars = Mapping[str, Mapping[int, float]]
"""Figures of a run, by name and iteration."""

_LINE = re.compile(r"iteration +(\d+)/ *\d+ \|(.*)\|\s*$")
_MILLISECONDS = "elapsed time per iteration (ms)"


def board_files(folder: Path) -> list[Path]:
    """Returns the files that runs wrote for TensorBoard into a folder, the oldest first."""
    return sorted(folder.glob("events.*"), key=lambda file: file.stat().st_mtime_ns)


def read_boards(files: Sequence[Path]) -> Scalars:
    """Reads files of TensorBoard; of what several have, the last counts.

    Raises:
        ImportError: tensorboard is not installed.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ImportError("TensorBoard's files need it: pip install tensorboard") from error
    found: dict[str, dict[int, float]] = {}
    for file in files:
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            values = {event.step: event.value for event in events.Scalars(name)}
            found.setdefault(name, {}).update(values)
    return found


def read_log(path: Path) -> Scalars:
    """Reads the lines of iterations that a run printed, with and without `--distca`."""
    found: dict[str, dict[int, float]] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if (match := _LINE.search(line)) is None:
                continue
            for field in match[2].split(" | "):
                name, _, value = field.strip().rpartition(":")
                for known, number in _numbers(name, value.strip()):
                    found.setdefault(known, {})[int(match[1])] = number
    return found


def _numbers(name: str, value: str) -> list[tuple[str, float]]:
    """Returns the figures of a field of a line, by their names on boards."""
    try:
        if name == _MILLISECONDS:
            return [(SECONDS, float(value) / 1e3)]
        if name == "attention s":
            busiest, mean = value.split("/")
            return [(ATTENTION_BUSIEST, float(busiest)), (ATTENTION_MEAN, float(mean))]
        if name == "wait":
            return [(WAIT, float(value.removesuffix("%")) / 100)]
        if name == MFU:
            return [(MFU, float(value.removesuffix("%")) / 100)]
        if name == "GB":
            first, *reserved = value.split("/")
            names = (ALLOCATED, RESERVED) if reserved else (RESIDENT,)
            return list(zip(names, map(float, (first, *reserved)), strict=True))
        return [(name, float(value))]
    except ValueError:
        return []
