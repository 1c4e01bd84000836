"""Random mutants: which, in which order, and what each changes."""

from __future__ import annotations

import ast
import difflib
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator


@dataclass(frozen=True, order=True)
class Mutant:
    """One change of one operator at one place.

    Attributes:
        path: path of the file, relative to the checkout.
        line: where the change begins, from 1.
        column: in that line, from 0.
        operator: the name that cosmic-ray gives it.
        occurrence: which of the operator's changes to the file it is, from 0.
    """

    path: str
    line: int
    column: int
    operator: str
    occurrence: int

    @property
    def name(self) -> str:
        """Tells it from all others of the same code."""
        return f"{self.path}:{self.line}:{self.column} {self.operator} {self.occurrence}"

    def apply(self, source: str) -> str | None:
        """The file's text with the change; None if there is none."""
        mutated: str | None = mutate_code(source, _operators()[self.operator], self.occurrence)
        return mutated


class Sample:
    """All mutants that may change behaviour, in random order.

    Places of one group of files come after another's, and within it in uniformly random order, and
    of each place a uniformly random mutant; only after every place has had its turn, each gets a
    second one. A sum has ten mutants and a break has one, but the two count alike. A longer sample
    begins with the shorter one.

    Args:
        sources: the text of each file.
        seed: seed of the order.
        groups: all files, in groups.
    """

    def __init__(self, sources: dict[str, str], seed: int, groups: Sequence[Sequence[str]]) -> None:
        self._sources = sources
        self._places: list[list[Mutant]] = []
        chance = random.Random(seed)
        for group in groups:
            places = [place for path in sorted(group) for place in _places(path, sources[path])]
            chance.shuffle(places)
            self._places += places
        for mutants in self._places:
            chance.shuffle(mutants)

    @property
    def places(self) -> int:
        """How many places have mutants, those that cannot change behaviour among them."""
        return len(self._places)

    def __iter__(self) -> Iterator[Mutant]:
        turns = [_behaving(mutants, self._sources) for mutants in self._places]
        while turns:
            left = []
            for turn in turns:
                mutant = next(turn, None)
                if mutant is not None:
                    yield mutant
                    left.append(turn)
            turns = left


def sample(
    sources: dict[str, str],
    seed: int,
    number: int,
    grouped: Callable[[], Sequence[Sequence[str]]],
    kept: Path,
) -> tuple[list[Mutant], int]:
    """The first mutants of a sample, and of how many places.

    Args:
        sources: the text of each file.
        seed: seed of the order.
        number: how many.
        grouped: says the groups of files, if they are not kept.
        kept: a file where they are kept: finding them takes a while.
    """
    known = json.loads(kept.read_text()) if kept.exists() else {}
    if len(known.get("mutants", ())) < number or "groups" not in known:
        # A sample goes on as it began, though what was new is old by now.
        groups = known["groups"] if "groups" in known else grouped()
        whole = Sample(sources, seed, groups)
        found = [astuple(mutant) for mutant in itertools.islice(whole, number)]
        known = {"mutants": found, "places": whole.places, "groups": groups}
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(known))
    return [Mutant(*mutant) for mutant in known["mutants"][:number]], known["places"]


def difference(before: str, after: str) -> list[str]:
    """The lines that differ, with - and + in front."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return [line for line in list(lines)[2:] if not line.startswith("@@")]


def may_change_behaviour(before: str, after: str) -> bool:
    """Whether two programs differ in more than annotations, docstrings and messages."""
    try:
        return _behaviour(before) != _behaviour(after)
    except SyntaxError:
        return False


@cache
def _operators() -> dict[str, Operator]:
    """Cosmic-ray's operators, but for those that need arguments."""
    classes = {
        name: cosmic_ray.plugins.get_operator(name)
        for name in sorted(cosmic_ray.plugins.operator_names())
    }
    return {
        name: operator()
        for name, operator in classes.items()
        if name.startswith("core/") and not operator.arguments()
    }


def _places(path: str, source: str) -> list[list[Mutant]]:
    """The mutants of each place of a file."""
    places: dict[tuple[tuple[int, int], tuple[int, int]], list[Mutant]] = {}
    # The order of nodes is that in which `mutate_code` counts occurrences.
    nodes = list(ast_nodes(get_ast(source)))
    for name, operator in _operators().items():
        occurrence = 0
        for node in nodes:
            for start, end in operator.mutation_positions(node):
                mutant = Mutant(path, *start, name, occurrence)
                places.setdefault((start, end), []).append(mutant)
                occurrence += 1
    return [places[place] for place in sorted(places)]


def _behaving(mutants: list[Mutant], sources: dict[str, str]) -> Iterator[Mutant]:
    for mutant in mutants:
        source = sources[mutant.path]
        mutated = mutant.apply(source)
        if mutated is not None and may_change_behaviour(source, mutated):
            yield mutant


@cache
def _behaviour(source: str) -> str:
    return ast.dump(_Behaviour().visit(ast.parse(source)))


class _Behaviour(ast.NodeTransformer):
    """Drops what cannot change what a program does."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if isinstance(node.annotation, ast.Name) and node.annotation.id == "TypeAlias":
            return None
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self._without_docstring(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self._without_docstring(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._without_docstring(node)

    def visit_Module(self, node: ast.Module) -> ast.AST:
        node.body = [statement for statement in node.body if not _is_alias(statement)]
        return self._without_docstring(node)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        if ast.unparse(node.test).removeprefix("not ").endswith("TYPE_CHECKING"):
            return None
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        return None if ast.unparse(node.targets[0]) == "__all__" else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if ast.unparse(node.func).removeprefix("typing.") == "cast":
            node.args[:1] = [ast.Constant(None)]
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call):
            node.exc.args = [
                ast.Constant("") if isinstance(argument, ast.JoinedStr) else argument
                for argument in node.exc.args
            ]
        return self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        node.msg = None
        return self.generic_visit(node)

    def _without_docstring(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        node.body = [  # type: ignore[attr-defined]
            statement
            for statement in node.body  # type: ignore[attr-defined]
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        ]
        return node


def _is_alias(statement: ast.stmt) -> bool:
    """Whether it names a type: a union of types, or a type with arguments in brackets."""
    if not isinstance(statement, ast.Assign):
        return False
    (target, *_), value = statement.targets, statement.value
    named_as_type = isinstance(target, ast.Name) and target.id.lstrip("_")[:1].isupper()
    shouted = isinstance(target, ast.Name) and target.id.isupper()
    return named_as_type and not shouted and isinstance(value, (ast.BinOp, ast.Subscript))
