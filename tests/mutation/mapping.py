"""The map of tests to lines: made by one run, kept, and made anew for tests that changed."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

from mutation.checkout import Checkout, Copy
from mutation.processes import Commands
from mutation.recorded import Record, configure, read
from mutation.recording import LOG


class Map:
    """Records of test files, kept in a folder.

    Args:
        checkout: what is tested.
        folder: folder of all that is kept about it.
        commands: run the tests.
    """

    def __init__(self, checkout: Checkout, folder: Path, commands: Commands) -> None:
        self._checkout, self._commands = checkout, commands
        self._folder = folder / "map" / checkout.digest_of_surroundings()

    def record(self, tests: list[str]) -> Record:
        """What is known of tests; runs those that have not been run as they are now.

        Args:
            tests: files, or pytest's names of tests in them.

        Raises:
            RuntimeError: the tests could not be run.
        """
        self._keep()
        missing = [name for name in tests if not self._path(name).exists()]
        if missing:
            self._run(missing)
        record = Record()
        for name in tests:
            if self._path(name).exists():
                record.add(Record.from_json(self._path(name).read_text()))
        return record

    def _run(self, tests: list[str]) -> None:
        run = self._folder / "run"
        run.mkdir(parents=True, exist_ok=True)
        copy = Copy(self._checkout)
        try:
            about = {"copy": str(copy.root), "paths": {t: str(self._path(t)) for t in tests}}
            (run / "about.json").write_text(json.dumps(about))
            environment = copy.environment(
                COVERAGE_PROCESS_START=str(configure(run, copy.root, self._checkout.packages)),
                OMP_NUM_THREADS="1",
                **{LOG: str(run / "log.jsonl")},
            )
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            print(f"mapping the tests of {len(tests)} files to lines (once)", file=sys.stderr)
            command += ["-p", "mutation.recording", *tests]
            status, _ = self._commands.run(command, copy.root, environment, shown=True)
            # Tests may fail: they are then not asked about mutants.
            if status not in (0, 1):
                raise RuntimeError(f"pytest ended with status {status}")
        finally:
            self._keep()
            copy.close()

    def _keep(self) -> None:
        """Keeps what a run has finished, whether or not it was interrupted."""
        run = self._folder / "run"
        if not (run / "about.json").exists():
            shutil.rmtree(run, ignore_errors=True)
            return
        about = json.loads((run / "about.json").read_text())
        record, finished = read(run, Path(about["copy"]))
        for name, path in about["paths"].items():
            if name.partition("::")[0] not in finished:
                continue
            tests = {n: test for n, test in record.tests.items() if _belongs(n, name)}
            used = {fixture for test in tests.values() for fixture in test.fixtures}
            kept = {n: fixture for n, fixture in record.fixtures.items() if n in used}
            Path(path).write_text(Record(tests, kept).to_json())
        shutil.rmtree(run)

    def _path(self, name: str) -> Path:
        digest = self._checkout.digest_of_file(name.partition("::")[0])
        return self._folder / f"{re.sub(r'[^a-zA-Z0-9_]+', '-', name)}-{digest}.json"


def _belongs(test: str, name: str) -> bool:
    return test == name or test.startswith((f"{name}::", f"{name}["))
