"""Mutants of code that orders a GPU's work, and of where its tensors lie."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

DROPPED = ("record", "record_stream", "synchronize", "wait", "wait_event", "wait_stream")
"""Methods whose calls, where they stand alone, are dropped."""
TURNED = "wait_stream"
_NO_STREAM = "__import__('contextlib').nullcontext()"
_NO_EVENT = "__import__('torch').cuda.Event()"
_OTHER_STREAM = "__import__('torch').cuda.Stream()"
_OTHER_GPU = "(lambda t: t.device('cuda', 1 - t.cuda.current_device()))(__import__('torch'))"
"""The other one of two."""


@dataclass(frozen=True)
class Mutant:
    """A changed file.

    Attributes:
        line: line that is changed, from 1.
        scope: names of the classes and functions around it, with dots between.
        what: what is changed.
        source: the whole file.
    """

    line: int
    scope: str
    what: str
    source: str


def mutants(source: str) -> Iterator[Mutant]:
    """Yields each mutant of a file, from its first line to its last."""
    for node, scope in _scoped(ast.parse(source), ""):
        for each, text, what in (*_unordered(node), *_elsewhere(node)):
            yield Mutant(each.lineno, scope, what, _with(source, each, text))


def _scoped(node: ast.AST, scope: str) -> Iterator[tuple[ast.AST, str]]:
    """Yields all nodes, each with its scope."""
    yield node, scope
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        scope = f"{scope}.{node.name}".removeprefix(".")
    for child in ast.iter_child_nodes(node):
        yield from _scoped(child, scope)


_Change = tuple[ast.stmt | ast.expr, str, str]
"""Node, the text that takes its place, and what is changed."""


def _unordered(node: ast.AST) -> Iterator[_Change]:
    """Changes after which one thing less is waited for."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name)) as call) if name in DROPPED:
            yield (node, "pass", f"no {name}")
            if name == TURNED:
                assert isinstance(call.func, ast.Attribute)
                waits, other = map(ast.unparse, (call.func.value, call.args[0]))
                yield (node, f"({other}).{name}({waits})", f"{name} turned round")
            if name == "record_stream":
                assert isinstance(call.func, ast.Attribute)
                tensor = ast.unparse(call.func.value)
                other = f"({tensor}).{name}({_OTHER_STREAM})"
                yield (node, other, f"{name} of another stream")
        case ast.withitem(context_expr=ast.Call(func=ast.Attribute(attr="stream")) as call):
            yield (call, _NO_STREAM, "no stream")
            yield (call, f"{ast.unparse(call.func)}({_OTHER_STREAM})", "another stream")
        case ast.Call(func=ast.Attribute(attr="query")):
            yield (node, "True", "no query")
        case ast.Call(func=ast.Attribute(attr="record_event")):
            yield (node, _NO_EVENT, "no record_event")


def _elsewhere(node: ast.AST) -> Iterator[_Change]:
    """Changes after which a tensor lies elsewhere."""
    match node:
        case ast.Call(keywords=words):
            for word in words:
                if word.arg == "device" and _names_a_device(word.value):
                    yield (word.value, "'cpu'", "on the host")
                if word.arg == "pin_memory":
                    yield (word.value, "False", "pageable")
    match node:
        case ast.Call(func=ast.Attribute(attr="to"), args=[where, *_]) if _names_a_device(where):
            yield (where, "'cpu'", "to the host")
            yield (where, _OTHER_GPU, "to another GPU")
        case ast.Call(func=ast.Attribute(attr="pin_memory", value=value)):
            yield (node, f"({ast.unparse(value)})", "pageable")


def _names_a_device(value: ast.expr) -> bool:
    return ast.unparse(value).rpartition(".")[2].lstrip("_") == "device"


def _with(source: str, node: ast.stmt | ast.expr, text: str) -> str:
    """Puts a text where a node is."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = source.splitlines(keepends=True)
    # Columns are of bytes.
    first, last = (lines[n - 1].encode() for n in (node.lineno, node.end_lineno))
    kept = first[: node.col_offset] + text.encode() + last[node.end_col_offset :]
    lines[node.lineno - 1 : node.end_lineno] = [kept.decode()]
    return "".join(lines)
