"""Draws mutants, those of the newest files first."""

from __future__ import annotations

import ast
import random
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_item import MutationSpec, WorkItem

Position = tuple[int, int]
"""Line, from 1, and column, from 0."""
_GROUPS = 10
_WRITTEN = re.compile(r"^author-time (\d+)$", re.MULTILINE)


def sample(root: Path, paths: Sequence[str], seed: int, evenly: bool = False) -> Iterator[WorkItem]:
    """Draws one mutant of each place, those of the newest tenth of the files first.

    A place is a piece of code that operators change. A sum has ten mutants and a `break` has one;
    the two count alike. Within a tenth of the files the order of places is random.

    Args:
        root: top folder of the working tree.
        paths: files to mutate, relative to `root`.
        seed: seed of the draw.
        evenly: whether the order is random among all files, however old they are.

    Yields:
        Mutants in an order that depends on nothing but the code and the seed; their names begin
        with their number.
    """
    newest = sorted(paths, key=lambda path: (-last_written(root, path), path))
    chance = random.Random(seed)
    number, groups = 0, 1 if evenly else _GROUPS
    for begin in range(groups):
        group = newest[begin * len(newest) // groups : (begin + 1) * len(newest) // groups]
        sources = {path: (root / path).read_text(encoding="utf-8") for path in sorted(group)}
        places = _places(root, sources)
        for place in chance.sample(sorted(places), len(places)):
            path, (line, _), _ = place
            for mutation in chance.sample(places[place], len(places[place])):
                if _is_program(sources[path], mutation):
                    yield WorkItem.single(f"{number:05} {path}:{line}", mutation)
                    number += 1
                    break


def last_written(root: Path, path: str) -> float:
    """Returns when the newest tenth of a file's lines was written, in seconds since 1970.

    A new name of the file, or a word in a comment, does not make it new. Lines that are not
    committed yet are of now; a file that is not is of the infinite future.
    """
    command = ["git", "blame", "-w", "-M", "--line-porcelain", "--", path]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    times = sorted(map(float, _WRITTEN.findall(done.stdout)))
    return times[len(times) * 9 // 10] if times else float("inf")


class _Found(list[WorkItem]):
    """Takes what `cosmic-ray init` finds; a database takes longer to be read back."""

    def add_work_items(self, items: Iterator[WorkItem]) -> None:
        self.extend(items)


def _places(
    root: Path, sources: dict[str, str]
) -> dict[tuple[str, Position, Position], list[MutationSpec]]:
    found = _Found()
    init([root / path for path in sources], found, {})
    idle = {path: list(without_effect(source)) for path, source in sources.items()}
    places = defaultdict(list)
    for item in found:
        (mutation,) = item.mutations
        path = str(mutation.module_path.relative_to(root))
        if not any(begin <= mutation.start_pos < end for begin, end in idle[path]):
            place = (path, mutation.start_pos, mutation.end_pos)
            places[place].append(attrs.evolve(mutation, module_path=path))
    return places


def _is_program(source: str, mutation: MutationSpec) -> bool:
    try:
        mutated = mutate_code(source, get_operator(mutation.operator_name)(), mutation.occurrence)
    except AttributeError:
        # cosmic-ray's replacer of exceptions knows no dotted names.
        return False
    try:
        return mutated is not None and ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def without_effect(source: str) -> Iterator[tuple[Position, Position]]:
    """Yields where code begins and ends that says nothing about what a program computes.

    These are annotations, type aliases, protocols, code for type checkers, messages of errors and
    of logs, and what only a program with a defect breaks: `assert`, `zip(strict=True)`,
    `frozen=True`.
    """
    for node in ast.walk(ast.parse(source)):
        for idle in _idle_parts(node):
            end = idle.end_lineno or idle.lineno, idle.end_col_offset or 0
            yield (idle.lineno, idle.col_offset), end


def _is_text(node: ast.expr) -> bool:
    """Whether an expression is text: a literal, or several that are joined."""
    match node:
        case ast.JoinedStr() | ast.Constant(value=str()):
            return True
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _is_text(left) or _is_text(right)
    return False


def _idle_parts(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    match node:
        case ast.AnnAssign(annotation=ast.Name("TypeAlias")):
            yield node
        case ast.arg(annotation=ast.expr() as idle) | ast.AnnAssign(annotation=idle):
            yield idle
        case ast.FunctionDef(returns=ast.expr() as idle):
            yield idle
        case ast.AsyncFunctionDef(returns=ast.expr() as idle):
            yield idle
        case ast.Assert() | ast.ClassDef(bases=[*_, ast.Name("Protocol")]):
            yield node
        case ast.Raise(exc=ast.Call(args=arguments)):
            yield from (each for each in arguments if _is_text(each))
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name("logger")))):
            yield node
        case ast.keyword(arg="strict" | "frozen", value=ast.Constant() as idle):
            yield idle
        case ast.Call(func=ast.Name("cast"), args=[idle, _]):
            yield idle
        case ast.If(test=test) if ast.unparse(test).endswith("TYPE_CHECKING"):
            yield node
        case ast.Assign(targets=[ast.Name("__all__")]):
            yield node
        case ast.Assign(targets=[ast.Name(name)], value=ast.BinOp() | ast.Subscript()):
            # Names of types are in CamelCase, those of constants in capitals.
            if name.lstrip("_")[:1].isupper() and not name.isupper():
                yield node
