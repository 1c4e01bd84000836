"""The report of `distca verify`: lines and figures, and all that one must know to explain them."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from distca.commands.verify.stage import Line
from distca.whole_file import write_text

REPORT = "verify.json"
_COMMANDS = {
    "distca doctor": [sys.executable, "-m", "distca", "doctor"],
    "nvidia-smi": ["nvidia-smi"],
    "nvidia-smi topo -m": ["nvidia-smi", "topo", "-m"],
    "git rev-parse HEAD": ["git", "rev-parse", "HEAD"],
}
_SECONDS = 60
_SETTINGS = "NCCL_", "NVSHMEM_", "CUDA_", "TORCH_NCCL_"
"""How the names of variables begin that change what GPUs and networks do."""


def report(
    lines: Sequence[Line], names: Sequence[str], interrupted: bool = False
) -> dict[str, object]:
    """Returns the report as JSON has it.

    Args:
        lines: lines of the stages that ran.
        names: names of all stages that were to run.
        interrupted: whether a signal has ended the command.
    """
    failed = lines[-1].stage if lines and lines[-1].state == "failed" else None
    left = [] if failed else names[len(lines) :]
    return {
        "failed": failed,
        "interrupted": interrupted,
        # If the command was killed it is the stage in which it was.
        "running": left[0] if left else None,
        "not_reached": list(names[len(lines) :]),
        "stages": [asdict(line) for line in lines],
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)
        },
    }


def describe_machine() -> dict[str, object]:
    """Returns what commands print of this machine, and the packages that are installed."""
    packages = {each.name: each.version for each in importlib.metadata.distributions()}
    return {
        "command": sys.argv,
        "platform": platform.platform(),
        "python": sys.version,
        "packages": dict(sorted(packages.items())),
        "printed": {name: _printed(words) for name, words in _COMMANDS.items()},
    }


def save_report(
    folder: Path,
    lines: Sequence[Line],
    names: Sequence[str],
    machine: Mapping[str, object],
    interrupted: bool = False,
) -> None:
    """Writes `REPORT` with all of that, in place of an older one.

    Raises:
        ValueError: it cannot be written.
    """
    found = {**report(lines, names, interrupted), **machine}
    text = json.dumps(found, indent=1) + "\n"
    write_text(folder / REPORT, text, "make room or give another --output")


def keep_older(folder: Path) -> None:
    """Gives an older `REPORT` another name, `verify.1.json` or the next that is free.

    Raises:
        ValueError: it cannot be renamed.
    """
    path = folder / REPORT
    if not path.exists():
        return
    numbers = itertools.count(1)
    free = next(name for n in numbers if not (name := path.with_suffix(f".{n}.json")).exists())
    try:
        path.rename(free)
    except OSError as error:
        raise ValueError(f"{path} cannot be renamed: {error.strerror}") from error


def _printed(words: Sequence[str]) -> str:
    """What a command prints, or why it cannot run. In a process of its own: CUDA stays unused."""
    try:
        ran = subprocess.run(
            words,
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ran.stdout
