"""Values of Megatron-LM's flags that are no plain numbers or names."""

from __future__ import annotations

import argparse
import ast
from typing import Any


def window_size(text: str) -> tuple[int, int]:
    """Parses Megatron's `--window-size`: `L,R` or `(L,R)`."""
    try:
        left, right = (int(part) for part in text.strip("() ").split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give two numbers, such as 512,0") from error
    if left < -1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: the first number is how many earlier tokens a query sees, or -1 for all"
        )
    return left, right


def layer_pattern(text: str) -> int | list[int]:
    """Parses Megatron's patterns of layers: a number, or a list such as `[0]*1+[1]*11`."""

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(int(number)):
                return number
            case ast.List(elements):
                return [value(each) for each in elements]
            case ast.BinOp(left, ast.Add() | ast.Mult() as operation, right):
                a, b = value(left), value(right)
                return a + b if isinstance(operation, ast.Add) else a * b
            case _:
                raise ValueError

    try:
        found = value(ast.parse(text, mode="eval").body)
        kinds = [found] if isinstance(found, int) else [each in (0, 1) for each in found]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        kinds = []
    if not kinds or not all(kinds):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give N for every Nth layer, or a list such as '[0]*1+[1]*11'"
        )
    return found  # type: ignore[no-any-return]
