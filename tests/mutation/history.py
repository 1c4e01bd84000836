"""When each file's behaviour changed last, by git."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from mutation.sampling import may_change_behaviour

_COMMIT, _ADDED = "commit ", "0" * 40


def last_changes(root: Path, sources: dict[str, str]) -> dict[str, float]:
    """Returns when each file's last substantive change was made, in seconds since 1970.

    That is the author's date of the last commit, back from HEAD, that adds the file or changes
    what it does: comments, docstrings, annotations, messages, formatting and new names of the file
    do not count. What was changed since HEAD was changed just now: infinity.

    Args:
        root: top folder of a working tree of git.
        sources: the text of each file, by its path relative to `root`.
    """
    if not _has_commits(root):
        return dict.fromkeys(sources, float("inf"))
    new = _git(root, "diff", "--name-only", "--no-renames", "--diff-filter=A", "HEAD")
    others = _git(root, "ls-files", "--others", "--exclude-standard")
    changed = _git(root, "diff", "--name-only", "--no-renames", "--diff-filter=M", "HEAD")
    just_now = {*new.splitlines(), *others.splitlines()}
    just_now |= {
        path
        for path in changed.splitlines()
        if path in sources and _differ(_git(root, "show", f"HEAD:{path}"), sources[path])
    }
    found = dict.fromkeys(just_now & sources.keys(), float("inf"))
    # Names of files whose change is not found yet, as they were called at the time.
    names = {path: path for path in sources if path not in found}
    for seconds, before, after, name, old_name in _commits(root) if names else ():
        if name not in names:
            continue
        path = names.pop(name)
        if before == _ADDED or _differ(_text(root, before), _text(root, after)):
            found[path] = seconds
        else:
            names[old_name] = path
        if not names:
            break
    # A shallow clone does not know; what it has not seen is older than what it has.
    return {path: found.get(path, 0.0) for path in sources}


def newest_first(changed: dict[str, float], groups: int) -> list[list[str]]:
    """Returns files in so many groups of about as many, those of the last changes first."""
    order = sorted(changed, key=lambda path: (-changed[path], path))
    edges = [len(order) * number // groups for number in range(groups + 1)]
    return [order[begin:end] for begin, end in pairwise(edges) if begin < end]


def _differ(before: str, after: str) -> bool:
    return before != after and may_change_behaviour(before, after)


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-c", "core.quotePath=off", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout


def _text(root: Path, blob: str) -> str:
    return _git(root, "cat-file", "blob", blob)


def _has_commits(root: Path) -> bool:
    command = ["git", "rev-parse", "--quiet", "--verify", "HEAD"]
    return not subprocess.run(command, cwd=root, capture_output=True, check=False).returncode


def _commits(root: Path) -> Iterator[tuple[float, str, str, str, str]]:
    """Changes of Python files, the last commit's first: date, both blobs, new and old name."""
    seconds = 0.0
    command = ["log", f"--format={_COMMIT}%at", "--raw", "--no-abbrev", "-M", "--", "*.py"]
    for line in filter(None, _git(root, *command).splitlines()):
        if line.startswith(_COMMIT):
            seconds = float(line.removeprefix(_COMMIT))
            continue
        entry, *paths = line.split("\t")
        _, _, before, after, _ = entry.split()
        yield seconds, before, after, paths[-1], paths[0]
