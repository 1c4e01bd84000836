"""Runs mutants against the tests that cover them, and keeps what became of each."""

from __future__ import annotations

import json
import queue
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mutation.checkout import Checkout, Copy
from mutation.covering import Covering
from mutation.processes import Commands
from mutation.sampling import Mutant, difference

SETTLING_SECONDS = 60.0
"""What starting pytest may take on a busy machine."""
SLOWER = 4.0
"""How many times as long as without a mutant tests may take before they count as hanging."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) .*$", re.MULTILINE)
_ALL_PASSED, _FAILURE, _NOT_COLLECTED, _WRONG_NAMES = 0, 1, 2, 4


@dataclass(frozen=True)
class Result:
    """What became of a mutant.

    Attributes:
        name: name of the mutant.
        outcome: caught, timeout (tests hang: caught, too), survived, uncovered, or unsteady: the
            test that failed then failed without the mutant, too, as on a busy machine.
        difference: the lines that the mutant changes.
        covering: how many tests cover its line.
        tests: how many of them were chosen.
        by: the test that failed, and how.
    """

    name: str
    outcome: str
    difference: list[str] = field(default_factory=list)
    covering: int = 0
    tests: int = 0
    by: str = ""

    @property
    def caught(self) -> bool:
        """Whether a test noticed."""
        return self.outcome in ("caught", "timeout")


class Results:
    """The results of some code, in a file that grows by a line with each.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._results: dict[str, Result] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            # The last line of a tool that was killed may be half of one.
            if line.endswith("}"):
                self._keep(Result(**json.loads(line)))

    def get(self, mutant: Mutant) -> Result | None:
        """What became of a mutant, if it was run."""
        return self._results.get(mutant.name)

    def add(self, result: Result) -> None:
        """Keeps a result; a later one of the same mutant replaces it."""
        self._keep(result)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def _keep(self, result: Result) -> None:
        self._results[result.name] = result


class Runner:
    """Runs mutants, several at a time, each worker in a copy of its own.

    Args:
        checkout: what is mutated.
        covering: finds the tests.
        commands: run them.
        seconds: seconds of tests per mutant, as they were recorded.
        jobs: how many workers.
    """

    def __init__(
        self,
        checkout: Checkout,
        covering: Covering,
        commands: Commands,
        seconds: float,
        jobs: int,
    ) -> None:
        self._checkout, self._covering, self._commands = checkout, covering, commands
        self._seconds, self._jobs = seconds, jobs

    def run(self, mutants: list[Mutant]) -> Iterator[Result]:
        """The result of each, as it comes."""
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        made = [Copy(self._checkout) for _ in range(min(self._jobs, len(mutants)))]
        for copy in made:
            copies.put(copy)

        def work(mutant: Mutant) -> Result:
            copy = copies.get()
            try:
                return self._result(mutant, copy)
            finally:
                copies.put(copy)

        pool = ThreadPoolExecutor(max(1, len(made)))
        try:
            for future in as_completed([pool.submit(work, mutant) for mutant in mutants]):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self._commands.kill()
            pool.shutdown()
            for copy in made:
                copy.close()

    def _result(self, mutant: Mutant, copy: Copy) -> Result:
        source = self._checkout.sources[mutant.path]
        mutated = mutant.apply(source)
        assert mutated is not None
        groups = self._covering.groups(mutant.path, mutant.line)
        chosen = self._covering.choose(groups, self._seconds)
        outcome, by = ("survived" if chosen else "uncovered"), ""
        copy.write(mutant.path, mutated)
        try:
            for processes in (False, True):
                part = [n for n in chosen if self._covering.starts_processes(n) is processes]
                if part and outcome == "survived":
                    outcome, by = self._run(part, copy)
        finally:
            copy.restore(mutant.path)
        if outcome == "caught":
            outcome = self._confirmed(by, chosen, copy)
        count = sum(map(len, groups))
        changed = difference(source, mutated)
        return Result(mutant.name, outcome, changed, count, len(chosen), by[:300])

    def _run(self, tests: list[str], copy: Copy) -> tuple[str, str]:
        seconds = SETTLING_SECONDS + SLOWER * self._covering.seconds(tests)
        status, printed = self._pytest(tests, copy, seconds)
        if status == _WRONG_NAMES:
            # The mutant changes the parameters of tests, or a test file cannot be imported.
            files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
            status, printed = self._pytest(files, copy, seconds)
        if status is None:
            return "timeout", ""
        if status == _ALL_PASSED:
            return "survived", ""
        failures = _FAILED.findall(printed) or printed.strip().splitlines()[-1:]
        # Python itself ends with 1 where pytest cannot start; a signal has a negative status.
        if status in (_FAILURE, _NOT_COLLECTED, _WRONG_NAMES) or status < 0:
            return "caught", "".join(failures[:1])
        raise RuntimeError(f"pytest ended with status {status}:\n{printed[-3000:]}")

    def _confirmed(self, by: str, chosen: list[str], copy: Copy) -> str:
        """Runs the test that failed without the mutant, if it starts processes: it may be late."""
        name = max((n for n in chosen if by.partition(" ")[2].startswith(n)), key=len, default=None)
        if name is None or not self._covering.starts_processes(name):
            return "caught"
        seconds = SETTLING_SECONDS + SLOWER * self._covering.seconds([name])
        status, _ = self._pytest([name], copy, seconds)
        return "caught" if status == _ALL_PASSED else "unsteady"

    def _pytest(self, tests: list[str], copy: Copy, seconds: float) -> tuple[int | None, str]:
        names = copy.root.parent / "tests.txt"
        names.write_text("\n".join(tests))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["--tb=line", "-rfE", f"@{names}"]
        environment = copy.environment(OMP_NUM_THREADS="1", COLUMNS="400")
        return self._commands.run(command, copy.root, environment, seconds)
