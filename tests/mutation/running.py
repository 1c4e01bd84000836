"""Runs mutants against the nearest tests of their lines."""

from __future__ import annotations

import difflib
import queue
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
from pathlib import Path

from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkItem, WorkResult

from mutation.copies import copied, files_of
from mutation.covering import Asked
from mutation.warm import Warm

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
    free: queue.SimpleQueue[tuple[Path, Warm]] = queue.SimpleQueue()

    def work(item: WorkItem) -> WorkResult:
        (mutation,) = item.mutations
        copy, warm = free.get()
        try:
            found = tests(str(mutation.module_path), mutation.start_pos[0])
            return _run(item, found, seconds, copy, warm)
        finally:
            free.put((copy, warm))

    with ExitStack() as stack:
        files = files_of(root)
        copies = [stack.enter_context(copied(root, files)) for _ in items[:jobs]]
        for copy in copies:
            free.put((copy.root, stack.enter_context(closing(Warm(copy)))))
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


def _run(item: WorkItem, found: list[Asked], seconds: float, copy: Path, warm: Warm) -> WorkResult:
    (mutation,) = item.mutations
    chosen = choose(found, seconds)
    limit = _SETTLING_SECONDS + _SLOWER * sum(asked.seconds for asked in chosen)
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    there, code, printed = copy / mutation.module_path, 0, ""
    with use_mutation(there, operator, mutation.occurrence) as (before, after):
        if after is None:
            raise RuntimeError(f"{item.job_id}: there is no such place")
        if chosen:
            code, printed = warm.run(pytest_arguments(chosen), limit)
    outcome = TestOutcome.SURVIVED
    if not chosen:
        why = "no test runs this line"
    elif code == 0:
        why = f"tests of {len(chosen)} of {len(found)} files that run this line passed:\n"
        why += "\n".join(name for asked in chosen for name in asked.names)
    elif code is None:
        why, outcome = "timeout", TestOutcome.KILLED
    elif late := _fails_without(printed, chosen, warm, limit):
        why = f"only {late} failed, and it fails without the mutant as well"
    else:
        why, outcome = printed, TestOutcome.KILLED
    diff = _diff(str(mutation.module_path), before, after)
    return WorkResult(WorkerOutcome.NORMAL, why, outcome, diff)


def _diff(path: str, before: str, after: str) -> str:
    sources = before.splitlines(), after.splitlines()
    return "\n".join(difflib.unified_diff(*sources, f"a/{path}", f"b/{path}", lineterm=""))


def pytest_arguments(chosen: Sequence[Asked]) -> list[str]:
    """Returns the arguments with which pytest runs tests until one fails."""
    failing = [f"--deselect={name}" for asked in chosen for name in asked.failing]
    names = [name for asked in chosen for name in asked.names]
    return ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-rfE", *failing, *names]


def _fails_without(printed: str, chosen: Sequence[Asked], warm: Warm, limit: float) -> str | None:
    """Runs the test that failed without the mutant: on a busy machine it may have been late."""
    # Lines that the code logs before the summary may have the same form.
    _, _, summary = printed.rpartition("short test summary info")
    failed = _FAILED.search(summary)
    if failed is None:
        return None
    file = failed[1].partition("::")[0]
    if any(each.names[0].partition("::")[0] == file and each.is_quick for each in chosen):
        return None
    code, _ = warm.run(pytest_arguments([Asked((failed[1],), (), 0.0)]), limit)
    return None if code == 0 else failed[1]
