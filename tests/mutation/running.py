"""Runs mutants against the nearest tests of their lines."""

from __future__ import annotations

import queue
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path

import attrs
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkItem, WorkResult

from mutation.copies import Copy, copied, files_of
from mutation.covering import Asked

_SETTLING_SECONDS = 60.0
"""What starting pytest may take on a busy machine."""
_SLOWER = 4.0
"""How many times as long as without a mutant tests may take before they count as hanging."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


def run(
    items: Sequence[WorkItem],
    root: Path,
    tests: Callable[[str, int], list[Asked]],
    seconds: float,
    jobs: int,
) -> Iterator[tuple[WorkItem, WorkResult]]:
    """Runs mutants, several at a time, each in a scratch copy of the working tree.

    Args:
        items: one mutant each.
        root: top folder of the working tree.
        tests: returns the tests of a line of a file, the nearest first.
        seconds: of tests per mutant, as they were recorded.
        jobs: number of copies.

    Yields:
        Each mutant with its result, as it comes.
    """
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()

    def work(item: WorkItem) -> WorkResult:
        (mutation,) = item.mutations
        copy = free.get()
        try:
            found = tests(str(mutation.module_path), mutation.start_pos[0])
            return _run(item, found, seconds, copy)
        finally:
            copy.end_processes()
            free.put(copy)

    with ExitStack() as stack:
        files = files_of(root)
        copies = [stack.enter_context(copied(root, files)) for _ in items[:jobs]]
        for copy in copies:
            free.put(copy)
        pool = stack.enter_context(ThreadPoolExecutor(max(1, len(copies))))
        running = {pool.submit(work, item): item for item in items}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.end_processes()


def choose(found: Sequence[Asked], seconds: float) -> list[Asked]:
    """Returns tests that take at most so many seconds, the nearest first, and at least one."""
    chosen: list[Asked] = []
    for asked in found:
        if not chosen or sum(each.seconds for each in chosen) + asked.seconds <= seconds:
            chosen.append(asked)
    return chosen


def _run(item: WorkItem, found: list[Asked], seconds: float, copy: Copy) -> WorkResult:
    (mutation,) = item.mutations
    chosen = choose(found, seconds)
    there = attrs.evolve(mutation, module_path=copy.root / mutation.module_path)
    command = pytest_command(chosen, copy) if chosen else ["true"]
    limit = _SETTLING_SECONDS + _SLOWER * sum(asked.seconds for asked in chosen)
    result = mutate_and_test([there], shlex.join(_apart(command, copy)), limit)
    if result.worker_outcome != WorkerOutcome.NORMAL:
        raise RuntimeError(f"{item.job_id}: {result.output}")
    diff = str(result.diff).replace(f"{copy.root}/", "")
    if not chosen:
        why = "no test runs this line"
    elif result.test_outcome == TestOutcome.SURVIVED:
        why = f"tests of {len(chosen)} of {len(found)} files that run this line passed:\n"
        why += "\n".join(name for asked in chosen for name in asked.names)
    elif result.output and (late := _fails_without(result.output, chosen, copy, limit)):
        return WorkResult(
            WorkerOutcome.NORMAL,
            f"only {late} failed, and it fails without the mutant as well",
            TestOutcome.SURVIVED,
            diff,
        )
    else:
        why = result.output
    return attrs.evolve(result, output=why, diff=diff)


def pytest_command(chosen: Sequence[Asked], copy: Copy) -> list[str]:
    """Returns the command that runs tests until one fails."""
    failing = [f"--deselect={name}" for asked in chosen for name in asked.failing]
    names = [name for asked in chosen for name in asked.names]
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-rfE"]
    return copy.command("-m", "pytest", *options, *failing, *names)


def _apart(command: list[str], copy: Copy) -> list[str]:
    """Keeps cosmic-ray's pipe, which it reads to the end, from processes that outlive pytest."""
    script = f'{shlex.join(command)} >"$0" 2>&1; status=$?; cat "$0"; exit $status'
    return ["bash", "-c", script, str(copy.root.parent / "printed")]


def _fails_without(printed: str, chosen: Sequence[Asked], copy: Copy, limit: float) -> str | None:
    """Runs the test that failed without the mutant: on a busy machine it may have been late."""
    failed = _FAILED.search(printed)
    if failed is None:
        return None
    file = failed[1].partition("::")[0]
    if any(each.names[0].partition("::")[0] == file and each.is_quick for each in chosen):
        return None
    again = pytest_command([Asked((failed[1],), (), 0.0)], copy)
    try:
        done = subprocess.run(again, stdout=subprocess.DEVNULL, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return failed[1]
    return failed[1] if done.returncode else None
