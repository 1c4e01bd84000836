"""Compares the losses of two runs, iteration by iteration.

    python benchmarks/training/compare_losses.py run.log tests/golden/demo_losses.json

A run is a log with Megatron's lines, or a JSON file that `--save-golden` wrote.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from distca.whole_file import write_text

_LINE = re.compile(r"iteration +(\d+)/.*? lm loss: ([0-9.E+-]+|nan|inf) \|")


def read_losses(path: Path) -> dict[int, float]:
    """Reads `lm loss` by iteration.

    Raises:
        ValueError: the file is missing or holds no losses.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    text = path.read_text(errors="replace")
    if path.suffix == ".json":
        try:
            losses = {int(i): float(loss) for i, loss in json.loads(text)["lm loss"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a file of golden losses: {error}") from error
    else:
        losses = {int(i): float(loss) for i, loss in _LINE.findall(text)}
    if not losses:
        raise ValueError(f"{path} holds no lines with an lm loss")
    return losses


def differences(
    first: dict[int, float], second: dict[int, float], tolerance: float
) -> list[tuple[int, float, float, bool]]:
    """Iteration, both losses, and whether they agree, for iterations that both runs have.

    Raises:
        ValueError: the runs have no iteration in common.
    """
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ValueError("the runs have no iteration in common")
    return [(i, first[i], second[i], abs(first[i] / second[i] - 1) <= tolerance) for i in common]


def main(argv: list[str] | None = None) -> int:
    """Runs the command: 0 when the runs agree, 1 when not, 2 when they cannot be compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path, nargs="?")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="relative")
    parser.add_argument("--save-golden", type=Path, metavar="FILE", help="write the first's losses")
    parser.add_argument("--note", default="", help="kept in the golden file: how it was made")
    args = parser.parse_args(argv)
    try:
        first = read_losses(args.first)
        if args.save_golden is not None:
            golden = {"note": args.note, "lm loss": {str(i): loss for i, loss in first.items()}}
            write_text(args.save_golden, json.dumps(golden, indent=1) + "\n")
        if args.second is None:
            if args.save_golden is None:
                raise ValueError("give two runs, or one with --save-golden")
            return 0
        rows = differences(first, read_losses(args.second), args.tolerance)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{'iteration':>9} {'first':>13} {'second':>13} {'relative':>9}")
    for i, a, b, agrees in rows:
        print(f"{i:9} {a:13.6E} {b:13.6E} {a / b - 1:9.1e}{'' if agrees else '  differs'}")
    wrong = [row[0] for row in rows if not row[3]]
    if wrong:
        print(f"the runs differ from iteration {wrong[0]} on, by more than {args.tolerance:g}")
        return 1
    print(f"{len(rows)} iterations agree within {args.tolerance:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
