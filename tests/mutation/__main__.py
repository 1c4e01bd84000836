"""Runs random mutants and lists those that no test notices: launch/test.sh --mutants 50."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from mutation.checkout import Checkout
from mutation.covering import covering_of
from mutation.history import last_changes, newest_first
from mutation.mapping import Map
from mutation.processes import Commands
from mutation.running import Result, Results, Runner
from mutation.sampling import Mutant, sample

GROUPS = 10
"""Groups of files, by the age of their behaviour: the newest group is sampled first."""


def main(
    arguments: list[str] | None = None,
    checkout: Checkout | None = None,
) -> int:
    """Runs the command.

    Args:
        arguments: arguments of the command line.
        checkout: what is mutated. Default: that of this file.
    """
    checkout = checkout or Checkout(Path(__file__).resolve().parents[2])
    options = _parser().parse_args(arguments)
    folder = checkout.root / "build" / "mutation"
    commands = Commands()
    sampled = folder / f"{checkout.digest_of_code()}-seed{options.seed}.sample"
    mutants, places = sample(
        checkout.sources,
        options.seed,
        options.mutants,
        lambda: newest_first(last_changes(checkout.root, checkout.sources), GROUPS),
        sampled,
    )
    # A mutant that some tests do not notice may be noticed by others.
    some = "-".join(["", *(re.sub(r"\W+", "_", name) for name in options.tests or ())])
    path = sampled.with_name(f"{sampled.stem}{some[:150]}.jsonl")
    results = Results(path)
    todo = [mutant for mutant in mutants if _is_left(results.get(mutant), options.again)]
    if todo or not mutants:
        tests = options.tests or checkout.test_files
        record = Map(checkout, folder, commands).record(tests)
        covering = covering_of(record, checkout.root, checkout.mutable)
        runner = Runner(checkout, covering, commands, options.seconds, options.jobs)
        with tqdm(total=len(mutants), initial=len(mutants) - len(todo), unit="mutant") as bar:
            for result in runner.run(todo):
                results.add(result)
                if not result.caught:
                    bar.write(f"{result.outcome}: {result.name}", file=sys.stderr)
                bar.update()
    done = {m: result for m in mutants if (result := results.get(m)) is not None}
    print(_report(done, places, path.relative_to(checkout.root)))
    caught = 100 * sum(result.caught for result in done.values()) / max(1, len(done))
    return int(options.at_least is not None and caught < options.at_least)


def _is_left(result: Result | None, again: bool) -> bool:
    return result is None or (again and not result.caught)


def _report(done: dict[Mutant, Result], places: int, path: Path) -> str:
    counts = Counter(result.outcome for result in done.values())
    caught = counts["caught"] + counts["timeout"]
    lines = []
    for mutant, result in sorted(done.items()):
        if not result.caught:
            ran = f"{result.tests} of {result.covering} covering tests ran"
            lines.append(f"{mutant.path}:{mutant.line}  {mutant.operator}  {result.outcome}, {ran}")
            lines += [f"    {line}" for line in result.difference]
    covered = len(done) - counts["uncovered"]
    lines.append(
        f"{len(done)} mutants of {places} places: {caught} caught ({_percent(caught, len(done))}; "
        f"{counts['timeout']} of them as tests hung), {counts['survived']} survived, "
        f"{counts['unsteady']} only by a test that fails without them, too, "
        f"{counts['uncovered']} covered by no test. Of those that tests cover, "
        f"{_percent(caught, covered)} were caught. Each result: {path}"
    )
    return "\n".join(lines)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.0f}%"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launch/test.sh", description=__doc__)
    parser.add_argument(
        "--mutants",
        type=int,
        required=True,
        metavar="N",
        help="how many; 0: only map tests to lines",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample. Default: 0")
    parser.add_argument(
        "--seconds",
        type=float,
        default=240,
        help="of tests per mutant, as recorded without mutants. Default: 240",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="mutants at a time. Default: as many as this machine has cores",
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        metavar="PATH",
        help="test files, or pytest's names of tests, to which to limit all. Default: all files",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="run those anew that were not caught, as after a test was added",
    )
    parser.add_argument(
        "--at-least",
        type=float,
        metavar="PERCENT",
        help="exit with 1 if fewer are caught",
    )
    return parser


def _exit(number: int, frame: object) -> None:
    """Unwinds, so that what runs is ended."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit)
    sys.exit(main())
