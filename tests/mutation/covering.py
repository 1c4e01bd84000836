"""Which tests run a line of the code, and which of them a mutant of that line is held against."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mutation.recorded import Record, TestRecord


@dataclass(frozen=True)
class _Statement:
    """The innermost statement around a line, without the statements in its body.

    Attributes:
        lines: lines of it, or of its head.
        at_import: whether it runs when its module is imported, in no test's time.
        near: lines of the file that run with it later: the body of the function that it heads.
        names: that it defines.
    """

    lines: range
    at_import: bool
    near: range
    names: frozenset[str]


class Covering:
    """Finds the tests of lines.

    Args:
        record: record of a run without mutants.
        sources: the text of each file.
    """

    def __init__(self, record: Record, sources: dict[str, str]) -> None:
        self._record, self._sources = record, sources
        self._modules = {path: ast.parse(source) for path, source in sources.items()}
        # Which test of a process imports a module is chance.
        at_import = {
            path: {
                number
                for number in range(1, len(source.splitlines()) + 1)
                if _statement(self._modules[path], number).at_import
            }
            for path, source in sources.items()
        }
        self._tests: dict[tuple[str, int], set[str]] = defaultdict(set)
        for name, test in record.tests.items():
            shared = [record.fixtures[f] for f in test.fixtures if f in record.fixtures]
            for lines in (test.lines, *(fixture.lines for fixture in shared)):
                for path, numbers in lines.items() if test.passed else ():
                    for number in set(numbers) - at_import.get(path, set()):
                        self._tests[path, number].add(name)

    def groups(self, path: str, line: int) -> list[list[str]]:
        """The tests of a line, the likeliest to notice a change first.

        A line that runs in a test has that test. What runs at import only has the tests that run a
        line where a name that it defines is mentioned, then all of its file, or else of the files
        that import it.
        """
        statement = _statement(self._modules[path], line)
        if not statement.at_import:
            found = self._of(path, [line]) or self._of(path, statement.lines)
            return [sorted(found)] if found else []
        near = self._of(path, statement.near) | self._mentioning(path, statement)
        whole = self._of(path, range(1, len(self._sources[path].splitlines()) + 1))
        if not near and not whole:
            whole = set().union(*map(self._of_file, self._importers(path)))
        return [sorted(group) for group in (near, whole - near) if group]

    def _of(self, path: str, lines: Iterable[int]) -> set[str]:
        return set().union(*(self._tests.get((path, line), set()) for line in lines))

    def _of_file(self, path: str) -> set[str]:
        return self._of(path, range(1, len(self._sources[path].splitlines()) + 1))

    def _mentioning(self, path: str, statement: _Statement) -> set[str]:
        if not statement.names:
            return set()
        names = re.compile(rf"\b({'|'.join(map(re.escape, statement.names))})\b")
        found: set[str] = set()
        for other, source in self._sources.items():
            for number, text in enumerate(source.splitlines(), 1):
                if names.search(text) and not (other == path and number in statement.lines):
                    found |= self._of(other, [number])
        return found

    def _importers(self, path: str) -> list[str]:
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        package, _, name = module.rpartition(".")
        importing = re.compile(
            rf"(from|import) {re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b"
        )
        return [other for other, source in self._sources.items() if importing.search(source)]

    def choose(self, groups: list[list[str]], seconds: float) -> list[str]:
        """Tests that fit in so many seconds, from as many test files as possible.

        They come in the order in which to run them: those of this process before those that start
        others, a file's tests together, quick files first. At least one is chosen, if there is one.
        """
        tests = self._record.tests
        chosen: list[str] = []
        fixtures: set[str] = set()
        spent = 0.0
        for group in groups:
            for name in _round_robin(group, tests):
                more = [f for f in tests[name].fixtures if f not in fixtures]
                cost = tests[name].seconds + sum(
                    self._record.fixtures[f].seconds for f in more if f in self._record.fixtures
                )
                if not chosen or spent + cost <= seconds:
                    chosen.append(name)
                    fixtures.update(more)
                    spent += cost
        return [
            name
            for processes in (False, True)
            for name in self._ordered([n for n in chosen if self.starts_processes(n) is processes])
        ]

    def seconds(self, names: Iterable[str]) -> float:
        """How long tests took together, with their fixtures."""
        names = list(names)
        fixtures = {f for name in names for f in self._record.tests[name].fixtures}
        return sum(self._record.tests[name].seconds for name in names) + sum(
            self._record.fixtures[f].seconds for f in fixtures if f in self._record.fixtures
        )

    def starts_processes(self, name: str) -> bool:
        """Whether a test, or a fixture of it, runs code in other processes."""
        test = self._record.tests[name]
        shared = [self._record.fixtures[f] for f in test.fixtures if f in self._record.fixtures]
        return test.processes or any(fixture.processes for fixture in shared)

    def _ordered(self, names: list[str]) -> list[str]:
        files: dict[str, list[str]] = defaultdict(list)
        for name in names:
            files[_file(name)].append(name)
        ordered = sorted(files, key=lambda file: (self.seconds(files[file]), file))
        cost = lambda name: (self._record.tests[name].seconds, name)  # noqa: E731
        return [name for file in ordered for name in sorted(files[file], key=cost)]


def _round_robin(names: list[str], tests: dict[str, TestRecord]) -> list[str]:
    """One test of each file, then another one of each, the cheapest first."""
    by_cost = sorted(names, key=lambda name: (tests[name].seconds, name))
    turns: dict[str, int] = defaultdict(int)
    numbered = []
    for name in by_cost:
        numbered.append((turns[_file(name)], len(numbered), name))
        turns[_file(name)] += 1
    return [name for _, _, name in sorted(numbered)]


def _file(name: str) -> str:
    return name.partition("::")[0]


def _statement(module: ast.Module, line: int) -> _Statement:
    """The innermost statement at a line."""
    body: list[ast.stmt] = module.body
    at_import, found = True, range(line, line + 1)
    near, names = range(0), frozenset[str]()
    while True:
        here = [s for s in body if _first(s) <= line <= (s.end_lineno or s.lineno)]
        if not here:
            return _Statement(found, at_import, near, names)
        (statement, *_) = here
        inside = list(_inside(statement))
        head_end = min((_first(s) for s in inside), default=(statement.end_lineno or 0) + 1)
        found = range(_first(statement), max(head_end, _first(statement) + 1))
        defines = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if defines and line in found:
            near = range(head_end, (statement.end_lineno or head_end) + 1)
            return _Statement(found, at_import, near, frozenset({statement.name}))
        names = frozenset(_names(statement))
        at_import &= not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        body = inside


def _first(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)])


def _inside(statement: ast.stmt) -> Iterable[ast.stmt]:
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from child.body


def _names(statement: ast.stmt) -> Iterable[str]:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        targets = [statement.target]
    for target in targets:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node, ast.Attribute):
                yield node.attr


def covering_of(record: Record, root: Path, paths: Iterable[str]) -> Covering:
    """The tests of some files of a checkout."""
    return Covering(record, {path: (root / path).read_text(encoding="utf-8") for path in paths})
