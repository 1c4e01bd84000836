"""Runs random mutants and lists those that no test notices: launch/test.sh --mutants 50."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import re
import signal
import sys
from pathlib import Path

from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import WorkResult
from tqdm import tqdm

from mutation.copies import PACKAGES, files_of
from mutation.covering import Covering
from mutation.explained import read_explained, report
from mutation.near import near_tests
from mutation.running import run
from mutation.sampling import sample


def main(arguments: list[str] | None = None, root: Path = Path(__file__).parents[2]) -> int:
    """Runs the command.

    Args:
        arguments: arguments of the command line.
        root: top folder of the working tree that is mutated.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    root = root.resolve()
    files = files_of(root)
    code = [name for name in files if name.endswith(".py") and name.split("/")[0] in PACKAGES]
    if options.code:
        among = tuple(f"{folder.rstrip('/')}/" for folder in options.code)
        code = [name for name in code if f"{name}/".startswith(among)]
    every = [name for name in files if re.fullmatch(r"tests/(.+/)?test_[^/]*\.py", name)]
    test_files = options.tests or every
    if options.mutants < 0:
        parser.error(f"--mutants {options.mutants} is negative")
    if not code:
        parser.error(f"--code: {', '.join(options.code)}: no code there, from the top folder")
    if unknown := sorted({*test_files} - {*every}):
        parser.error(f"--tests: {', '.join(unknown)}: no files of tests, from the top folder")
    if options.near:
        test_files = near_tests(root, test_files, code, files)
    folder = root / "build" / "mutation"
    folder.mkdir(parents=True, exist_ok=True)
    # A mutant that some tests do not notice may be noticed by others.
    asked = options.tests, options.near
    digest = hashlib.sha256(f"{options.seed} {options.evenly} {asked}".encode())
    for name in code:
        digest.update(f"{name}\n".encode() + (root / name).read_bytes())
    session = folder / f"{digest.hexdigest()[:16]}.sqlite"
    with use_db(session) as database:
        if (known := database.num_work_items) < options.mutants:
            drawn = sample(root, code, options.seed, options.evenly)
            database.add_work_items(itertools.islice(drawn, known, options.mutants))
        items = sorted(database.work_items, key=lambda item: item.job_id)[: options.mutants]
        results = dict(database.results)
        todo = [item for item in items if _is_left(results.get(item.job_id), options.again)]
        if todo or not items:
            covering = Covering(root, folder / "lines", test_files, options.jobs)
            running = run(todo, root, covering.tests, options.seconds, options.jobs)
            for item, result in tqdm(running, total=len(todo), unit="mutant", file=sys.stderr):
                database.set_result(item.job_id, result)
        print("\n".join(report(database.completed_work_items, read_explained())))
    print(f"all results: {session}")
    return 0


def _is_left(result: WorkResult | None, again: bool) -> bool:
    return result is None or (again and not result.is_killed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launch/test.sh", description=__doc__)
    parser.add_argument(
        "--mutants",
        type=int,
        required=True,
        metavar="N",
        help="number of mutants; 0: only record which tests run which lines",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    parser.add_argument(
        "--evenly",
        action="store_true",
        help="draw from all files alike (default: from the newest first)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=240,
        help="of tests per mutant, as recorded without mutants (default: 240)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="mutants at a time (default: number of cores)",
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        metavar="FILE",
        help="test files to ask (default: all of them)",
    )
    parser.add_argument(
        "--near",
        action="store_true",
        help="ask only test files that lie as the code does that is mutated, and import it",
    )
    parser.add_argument(
        "--code",
        nargs="+",
        metavar="PATH",
        help="folders or files whose code is mutated (default: all)",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="run survivors again, as after a test was added",
    )
    return parser


if __name__ == "__main__":
    # Unwinds, so that what runs is ended.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
