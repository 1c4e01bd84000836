"""The commands of the recorder: `make`, `compare` and `since`."""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recording.compare import compare
from recording.inference_mixes import INFERENCE_MIXES
from recording.mixes import TRAINING_MIXES

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "recording"
"""Recordings of commits; git ignores the folder."""

MIXES = (*TRAINING_MIXES, *INFERENCE_MIXES)
SECONDS_OF_A_MIX = 300
DIFFERENT, IDENTICAL = 1, 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        The status to exit with: 1 where recordings differ.
    """
    parser = argparse.ArgumentParser(
        prog="python tests/recording",
        description="Records what runs do: of training bits of losses and gradients, of inference "
        "tokens and bits of logits, of both plans, bytes, buffers and the order of events.",
    )
    commands = parser.add_subparsers(required=True)

    make_parser = commands.add_parser("make", help="record this checkout")
    make_parser.add_argument("output", type=Path, nargs="?", help="a .json.gz file")
    make_parser.add_argument("--list", action="store_true", help="only say which mixes there are")
    make_parser.set_defaults(run=lambda given: _make(given.output, given.mixes, given.list))

    compare_parser = commands.add_parser("compare", help="say how two recordings differ")
    compare_parser.add_argument("was", type=Path)
    compare_parser.add_argument("now", type=Path)
    compare_parser.set_defaults(
        run=lambda given: _report(_of_mixes(load(given.was), given.mixes),
                                  _of_mixes(load(given.now), given.mixes))
    )  # fmt: skip

    since_parser = commands.add_parser("since", help="compare this checkout with a commit")
    since_parser.add_argument("commit", nargs="?", default="HEAD")
    since_parser.set_defaults(run=lambda given: _since(given.commit, given.mixes))

    names = [mix.name for mix in MIXES]
    for each in (make_parser, compare_parser, since_parser):
        each.add_argument("--mixes", nargs="+", metavar="NAME", help="only these; see make --list")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.mixes or ()) - set(names))
    if unknown:
        parser.error(f"no mix {unknown[0]!r}: choose from\n  " + "\n  ".join(names))
    status: int = given.run(given)
    return status


def _make(output: Path | None, chosen: list[str] | None, only_list: bool) -> int:
    if only_list:
        print("\n".join(mix.name for mix in MIXES))
    elif output is None:
        raise SystemExit("say where to: python tests/recording make FILE.json.gz")
    else:
        save(make(chosen), output)
    return 0


def make(chosen: Sequence[str] | None = None) -> dict[str, Any]:
    """Records this checkout.

    Args:
        chosen: names of mixes; None: all.
    """
    import distca

    if not Path(distca.__file__).is_relative_to(ROOT):
        raise SystemExit(f"distca is imported from {distca.__file__}, not from {ROOT}")
    from support.ranks import Ranks

    # Of the processes that are started: sums of several threads have no order, and Megatron warns
    # of all that is not installed.
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    wanted = [mix for mix in MIXES if chosen is None or mix.name in chosen]
    ranks, mixes = Ranks(), {}
    try:
        for mix in (bar := tqdm(wanted, unit="mix", file=sys.stderr)):
            bar.set_description(mix.name)
            with tempfile.TemporaryDirectory() as folder:
                call = mix.call(Path(folder))
                size = mix.world_size
                mixes[mix.name] = ranks.run(*call, world_size=size, timeout=SECONDS_OF_A_MIX)
    finally:
        ranks.close()
    return {"versions": versions(), "mixes": mixes}


def versions() -> dict[str, str]:
    """What bits depend on beside this project."""
    packages = ("torch", "megatron-core", "numpy")
    processor = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "processor": next(iter(processor), platform.machine()),
    }


def save(recording: dict[str, Any], path: Path) -> None:
    """Writes a recording."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(recording, indent=0).encode()
    # Without a time, so that equal recordings are equal files.
    path.write_bytes(gzip.compress(text, mtime=0))


def load(path: Path) -> dict[str, Any]:
    """Reads a recording."""
    recording: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return recording


def _of_mixes(recording: dict[str, Any], chosen: Sequence[str] | None) -> dict[str, Any]:
    if chosen is None:
        return recording
    mixes = {name: ranks for name, ranks in recording["mixes"].items() if name in chosen}
    return {**recording, "mixes": mixes}


def _report(was: dict[str, Any], now: dict[str, Any]) -> int:
    was, now = (json.loads(json.dumps(each)) for each in (was, now))
    warnings, lines = compare(was, now)
    for warning in warnings:
        print(warning, file=sys.stderr)
    if lines:
        print("\n".join(lines))
        return DIFFERENT
    ranks = sum(len(mix) for mix in now["mixes"].values())
    print(f"identical: {len(now['mixes'])} mixes, {ranks} ranks")
    return IDENTICAL


def _since(commit: str, chosen: Sequence[str] | None) -> int:
    was = of_commit(commit, chosen)
    return _report(_of_mixes(was, chosen), make(chosen))


def of_commit(commit: str, chosen: Sequence[str] | None) -> dict[str, Any]:
    """The recording of a commit, made by its own recorder where it is not kept.

    Raises:
        SystemExit: there is no such commit, or it has no recorder.
    """
    found = _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}", check=False)
    if not found:
        raise SystemExit(f"git knows no commit {commit!r}")
    kept = KEPT / f"{found}.json.gz"
    have: dict[str, Any] = {"versions": versions(), "mixes": {}}
    if kept.exists() and load(kept)["versions"] == versions():
        have = load(kept)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "commit"
        _git("worktree", "add", "--detach", str(tree), found)
        try:
            recorder = [sys.executable, "tests/recording", "make"]
            if not (tree / "tests" / "recording" / "__main__.py").exists():
                raise SystemExit(f"{commit} has no tests/recording: give a later commit")
            listed = subprocess.run(
                [*recorder, "--list"], cwd=tree, check=True, capture_output=True, text=True
            )
            there = listed.stdout.splitlines()
            missing = [
                name
                for name in there
                if name not in have["mixes"] and (chosen is None or name in chosen)
            ]
            if missing:
                made = Path(folder) / "made.json.gz"
                print(f"recording {commit}", file=sys.stderr)
                subprocess.run([*recorder, str(made), "--mixes", *missing], cwd=tree, check=True)
                have["mixes"] |= load(made)["mixes"]
                save(have, kept)
        finally:
            _git("worktree", "remove", "--force", str(tree))
    return have


def _git(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, check=check, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()
