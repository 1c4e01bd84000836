"""Mutants of code that orders a GPU's work: waits that are dropped or turned round."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

DROPPED = ("record_stream", "synchronize", "wait", "wait_event", "wait_stream")
"""Methods whose calls, where they stand alone, are dropped."""
TURNED = "wait_stream"
ASKED = "query"


@dataclass(frozen=True)
class Mutant:
    """A changed file.

    Attributes:
        line: line that is changed, from 1.
        what: what is changed.
        source: the whole file.
    """

    line: int
    what: str
    source: str


def mutants(source: str) -> Iterator[Mutant]:
    """Yields each mutant of a file, in the order of its lines."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name)) as call) if name in DROPPED:
                yield _with(source, node, "pass", f"no {name}")
                if name == TURNED:
                    assert isinstance(call.func, ast.Attribute)
                    waits, other = map(ast.unparse, (call.func.value, call.args[0]))
                    yield _with(source, node, f"({other}).{name}({waits})", f"{name} turned round")
            case ast.withitem(context_expr=ast.Call(func=ast.Attribute(attr="stream")) as call):
                yield _with(source, call, "__import__('contextlib').nullcontext()", "no stream")
            case ast.Call(func=ast.Attribute(attr=name)) if name == ASKED:
                yield _with(source, node, "True", f"no {name}")


def _with(source: str, node: ast.stmt | ast.expr, text: str, what: str) -> Mutant:
    """Puts a text where a node is."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = source.splitlines(keepends=True)
    first, last = lines[node.lineno - 1], lines[node.end_lineno - 1]
    kept = first[: node.col_offset] + text + last[node.end_col_offset :]
    lines[node.lineno - 1 : node.end_lineno] = [kept]
    return Mutant(node.lineno, what, "".join(lines))
