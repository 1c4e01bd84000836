"""The record of one run of tests: which lines each ran, in which time, and whether it passed."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coverage

CONFIGURATION = """\
[run]
branch = False
parallel = True
data_file = {folder}/lines
context = ${{MUTATION_CONTEXT-}}
concurrency = thread,greenlet
patch = _exit,fork
sigterm = True
disable_warnings = no-data-collected,module-not-imported,module-not-measured,couldnt-parse
include =
{include}
"""


@dataclass
class TestRecord:
    """One test.

    Attributes:
        passed: without any mutant.
        seconds: its own, without shared fixtures.
        fixtures: names of the fixtures that it shares.
        processes: whether it runs code in other processes.
        lines: that it ran, of each file.
    """

    __test__ = False

    passed: bool
    seconds: float
    fixtures: list[str]
    processes: bool = False
    lines: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class FixtureRecord:
    """One fixture that several tests share; see `TestRecord`."""

    seconds: float = 0.0
    processes: bool = False
    lines: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Record:
    """Of some test files.

    Attributes:
        tests: by pytest's node id.
        fixtures: by name.
    """

    tests: dict[str, TestRecord] = field(default_factory=dict)
    fixtures: dict[str, FixtureRecord] = field(default_factory=dict)

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(self, default=vars)

    @classmethod
    def from_json(cls, text: str) -> Record:
        """The record that `to_json` wrote."""
        value = json.loads(text)
        return cls(
            {name: TestRecord(**test) for name, test in value["tests"].items()},
            {name: FixtureRecord(**fixture) for name, fixture in value["fixtures"].items()},
        )

    def add(self, other: Record) -> None:
        """Joins what the other holds."""
        self.tests |= other.tests
        self.fixtures |= other.fixtures


def configure(folder: Path, copy: Path, packages: tuple[str, ...]) -> Path:
    """Writes coverage's configuration for a run whose data come to `folder`."""
    path = folder / "coverage.ini"
    include = "\n".join(f"    {copy / package}/*" for package in packages)
    path.write_text(CONFIGURATION.format(folder=folder, include=include))
    return path


def read(folder: Path, copy: Path) -> tuple[Record, list[str]]:
    """What a run wrote to `folder`, and the test files that it finished.

    Args:
        folder: folder of `configure`; the plugin's log is `log.jsonl`.
        copy: where the sources were.
    """
    record, finished, main = Record(), [], 0
    names: dict[str, tuple[str, str]] = {}
    log = folder / "log.jsonl"
    for line in log.read_text().splitlines() if log.exists() else []:
        entry: dict[str, Any] = json.loads(line)
        if "context" in entry:
            names[entry["context"]] = entry["kind"], entry["name"]
        elif "test" in entry:
            record.tests[entry["test"]] = TestRecord(
                entry["passed"], entry["seconds"], entry["fixtures"]
            )
        elif "fixture" in entry:
            record.fixtures[entry["fixture"]] = FixtureRecord(entry["seconds"])
        elif "finished" in entry:
            finished.append(entry["finished"])
        else:
            main = entry["pid"]
    lines: dict[tuple[str, str], dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    elsewhere = set()
    for path in folder.glob("lines.*"):
        for context, file, numbers in _lines_of(path):
            # A process's own context stands before that of the function that it runs.
            owner = names.get(context.rpartition("|")[2])
            if owner is not None:
                lines[owner][str(Path(file).relative_to(copy))] |= numbers
                if f".pid{main}." not in path.name:
                    elsewhere.add(owner)
    kinds: dict[str, dict[str, Any]] = {"test": record.tests, "fixture": record.fixtures}
    for (kind, name), files in lines.items():
        if name in kinds[kind]:
            kinds[kind][name].lines = {file: sorted(found) for file, found in files.items()}
            kinds[kind][name].processes = (kind, name) in elsewhere
    return record, finished


def _lines_of(path: Path) -> list[tuple[str, str, set[int]]]:
    data = coverage.CoverageData(str(path))
    try:
        data.read()
    except coverage.CoverageException:
        # A process was killed as it wrote.
        return []
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for file in data.measured_files():
        for number, contexts in data.contexts_by_lineno(file).items():
            for context in contexts:
                found[context, file].add(number)
    data.close()
    return [(context, file, numbers) for (context, file), numbers in found.items()]
