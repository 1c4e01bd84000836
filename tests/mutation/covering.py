"""Which tests run a line: recorded once for each test file, and kept while its code is the same."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

import coverage
from tqdm import tqdm

from mutation.copies import Copy, copied, files_of
from mutation.near import nearness

_QUICK_SECONDS = 2.0
"""What the quick tests of a file take together."""
_CONFIGURATION = """\
[run]
core = ctrace
parallel = True
context = {test_file}
dynamic_context = test_function
concurrency = thread,greenlet
patch = _exit,fork
sigterm = True
data_file = {data}
include = {copy}/*
omit = {copy}/tests/*
disable_warnings = no-data-collected,module-not-imported,module-not-measured,couldnt-parse
[paths]
all =
    {root}
    {copy}
"""


@dataclass(frozen=True)
class Asked:
    """Tests of one file, to be asked about a mutant.

    Attributes:
        names: as pytest takes them: the file, or functions in it.
        failing: names of tests that fail without a mutant.
        seconds: that they take, without starting Python.
    """

    names: tuple[str, ...]
    failing: tuple[str, ...]
    seconds: float

    @property
    def is_quick(self) -> bool:
        """Whether they wait for nothing, so that no busy machine makes them late."""
        return self.seconds <= _QUICK_SECONDS


@dataclass(frozen=True)
class Recorded:
    """What a test file did without mutants.

    Attributes:
        seconds: of each function that passed, with its fixtures.
        failing: names of tests that failed.
        digests: of the test file and the files whose lines it ran, relative to the top folder.
    """

    seconds: dict[str, float]
    failing: list[str]
    digests: dict[str, str]


class Covering:
    """Finds the tests of lines.

    Processes that tests start are recorded as well, unless they are killed. Lines that no test
    function runs itself (other processes, fixtures, imports) belong to all tests of their file.

    Args:
        root: top folder of the working tree.
        folder: folder in which records are kept.
        test_files: files of tests, relative to `root`.
        jobs: number of test files that run at a time.
    """

    def __init__(self, root: Path, folder: Path, test_files: Sequence[str], jobs: int) -> None:
        self._root, self._folder = root, folder
        folder.mkdir(parents=True, exist_ok=True)
        missing = [name for name in test_files if not self._is_current(name)]
        if missing:
            with copied(root, files_of(root)) as copy, ThreadPoolExecutor(jobs) as pool:
                done = pool.map(lambda name: self._record(name, copy), missing)
                try:
                    list(tqdm(done, "lines of tests", len(missing), unit="file", file=sys.stderr))
                finally:
                    pool.shutdown(wait=False, cancel_futures=True)
                    copy.end_processes()
        self._recorded = {name: _read(self._path(name, "json")) for name in test_files}

    def tests(self, path: str, line: int) -> list[Asked]:
        """Returns the tests that run a line, `in_order`, and of a file the quickest first."""
        found = []
        for name, recorded in self._recorded.items():
            contexts = self._lines(name, path).get(line, [])
            functions = {context.rpartition(".")[2] for context in contexts if "|" in context}
            if len(functions) < len(contexts) or not functions <= recorded.seconds.keys():
                names, functions = [name], {*recorded.seconds}
            else:
                quickest = sorted(functions, key=lambda each: (recorded.seconds[each], each))
                names = [f"{name}::{function}" for function in quickest]
            if contexts and recorded.seconds:
                seconds = sum(recorded.seconds[function] for function in functions)
                found.append(Asked(tuple(names), tuple(recorded.failing), seconds))
        return in_order(found, path)

    @functools.cache  # noqa: B019
    def _lines(self, test_file: str, path: str) -> dict[int, list[str]]:
        data = coverage.CoverageData(str(self._path(test_file, "coverage")))
        data.read()
        contexts: dict[int, list[str]] = data.contexts_by_lineno(str(self._root / path))
        data.close()
        return contexts

    def _path(self, test_file: str, kind: str) -> Path:
        return self._folder / f"{re.sub(r'[^a-zA-Z0-9_]+', '-', test_file)}.{kind}"

    def _is_current(self, test_file: str) -> bool:
        path = self._path(test_file, "json")
        return path.exists() and (digests := _read(path).digests) == self._digests(digests)

    def _digests(self, paths: Iterable[str]) -> dict[str, str]:
        return {
            path: hashlib.sha256((self._root / path).read_bytes()).hexdigest()
            for path in paths
            if (self._root / path).exists()
        }

    def _record(self, test_file: str, copy: Copy) -> None:
        settings, data, report = (self._path(test_file, k) for k in ("ini", "coverage", "xml"))
        values = {"test_file": test_file, "data": data, "copy": copy.root, "root": self._root}
        settings.write_text(_CONFIGURATION.format(**values))
        running = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        combining = ["-m", "coverage", "combine", "-q", f"--rcfile={settings}"]
        for command in (
            copy.command(*running, test_file, COVERAGE_PROCESS_START=str(settings)),
            # Of a process that was killed as it wrote there is half a file, which is left out.
            copy.command(*combining, str(data.parent)),
        ):
            nowhere = subprocess.DEVNULL
            subprocess.run(command, stdout=nowhere, stderr=nowhere, check=False)
        seconds, failing = _outcomes(test_file, report)
        measured = coverage.CoverageData(str(data))
        measured.read()
        paths = [Path(path).relative_to(self._root) for path in measured.measured_files()]
        measured.close()
        digests = self._digests([test_file, *map(str, paths)])
        record = Recorded(seconds, failing, digests)
        self._path(test_file, "json").write_text(json.dumps(asdict(record)))
        for path in (settings, report):
            path.unlink(missing_ok=True)


def in_order(found: Iterable[Asked], path: str) -> list[Asked]:
    """Sorts tests of a file's lines: quick ones first, then those of the same folder."""

    def order(asked: Asked) -> tuple[bool, int, float]:
        return not asked.is_quick, -nearness(asked.names[0], path), asked.seconds

    return sorted(found, key=order)


def _read(path: Path) -> Recorded:
    return Recorded(**json.loads(path.read_text()))


def _outcomes(test_file: str, report: Path) -> tuple[dict[str, float], list[str]]:
    """Returns the seconds of functions that passed, and names of tests that failed."""
    seconds: dict[str, float] = {}
    failing = []
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        outcomes = {child.tag for child in case}
        function = case.attrib["name"].partition("[")[0]
        if outcomes & {"failure", "error"}:
            failing.append(f"{test_file}::{case.attrib['name']}")
        elif "skipped" not in outcomes:
            seconds[function] = seconds.get(function, 0.0) + float(case.attrib["time"])
    return seconds, failing
