"""Command lines of the benchmarks, which are checked before any work is done."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.published_lengths import LISTS


class Parser(argparse.ArgumentParser):
    """Parser of a benchmark's flags, which refuses values by one line.

    Whole numbers are at least 1, other numbers above 0, `--seed` at least 0. `--output` is a
    folder that can be written to, or made; `--published` is one that has the published lists. A
    `FILE` is there.

    Args:
        description: docstring of the command, whose first line is shown.
        least: least values of other flags, by the name of their value.
    """

    def __init__(
        self, description: str | None, least: Mapping[str, float] | None = None, **named: Any
    ) -> None:
        self._least = {"seed": 0.0, **(least or {})}
        shown = None if description is None else description.splitlines()[0]
        super().__init__(description=shown, allow_abbrev=False, **named)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses the flags, and refuses values that are out of range."""
        found, rest = super().parse_known_args(args, namespace)
        for action in self._actions:
            value = getattr(found, action.dest, None)
            flag = "/".join(action.option_strings) or action.dest
            for each in value if isinstance(value, list | tuple) else [value]:
                problem = None if each is None else self._problem(action, each)
                if problem is not None:
                    self.error(f"{flag} {each}: {problem}")
        return found, rest

    def _problem(self, action: argparse.Action, value: Any) -> str | None:
        """Returns what is wrong with a value, or None."""
        if action.type is int:
            fewest = int(self._least.get(action.dest, 1))
            return None if value >= fewest else f"give at least {fewest}"
        if action.type is float:
            least = self._least.get(action.dest, 0.0)
            above = value >= least if action.dest in self._least else value > least
            if math.isfinite(value) and above:
                return None
            return f"give {'at least' if action.dest in self._least else 'more than'} {least:g}"
        if action.dest == "output":
            return problem_of_folder(value)
        if action.metavar == "FILE":
            return None if is_there(value) else "there is no such file"
        if action.dest == "published":
            missing = [name for name in LISTS if not is_there(value / name)]
            return f"the folder has no {missing[0]}" if missing else None
        return None

    def error(self, message: str) -> NoReturn:
        """Ends the command with a line on standard error."""
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def is_there(file: Path) -> bool:
    """Returns whether there is a file; tests of documented commands have none."""
    return file.is_file()


def problem_of_folder(folder: Path) -> str | None:
    """Returns why files cannot be written to a folder, which may not be there yet, or None."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return "this is a file: give a folder" if there == folder else f"{there} is a file"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written to"
    return None
