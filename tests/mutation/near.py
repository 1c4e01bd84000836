"""Which tests are near code: they lie as it does, and their imports lead to it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

_PATHS = ("", "tests/")
"""Where modules lie."""


def nearness(test: str, path: str) -> int:
    """Returns how many folders a test file and a file share: `tests/plan` and `distca/plan`."""
    near = Path(test.partition("::")[0]).parts[1:-1]
    for folders in (Path(path).parts[:-1], Path(path).parts[1:-1]):
        shared = [mine == its for mine, its in zip(near, folders, strict=False)]
        if shared and shared[0]:
            return shared.index(False) if False in shared else len(shared)
    return 0


def near_tests(
    root: Path, test_files: Sequence[str], code: Collection[str], files: Collection[str]
) -> list[str]:
    """Returns the test files that are near some code.

    They lie in folders named as its folders are, and their imports lead to it, wherever in a file
    those are.

    Args:
        root: top folder of the working tree.
        test_files: files of tests, relative to `root`.
        code: files of code, likewise.
        files: files whose imports are followed, likewise.
    """
    known, wanted = frozenset(files), frozenset(code)

    @functools.cache
    def imports(path: str) -> frozenset[str]:
        source = (root / path).read_text(encoding="utf-8")
        return frozenset(_imported(source, known))

    def leads(name: str) -> bool:
        seen, left = {name}, [name]
        while left and not seen & wanted:
            new = imports(left.pop()) - seen
            seen |= new
            left += sorted(new)
        return bool(seen & wanted)

    there = [name for name in test_files if any(nearness(name, path) for path in code)]
    return [name for name in there if leads(name)]


def _imported(source: str, known: Collection[str]) -> Iterator[str]:
    """Yields the files that a source imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for place in names:
            begin = place.replace(".", "/")
            paths = (f"{above}{begin}{end}" for above in _PATHS for end in (".py", "/__init__.py"))
            yield from (path for path in paths if path in known)
