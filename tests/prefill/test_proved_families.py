"""The table of proved classes of vLLM is the one that the code refuses others by."""

from __future__ import annotations

import ast

from support.quantized_models import KINDS
from support.vllm_families import PAGE, ROOT, SMALL, quantized_table, table


def proved(name: str) -> list[str]:
    """Names that the code has as proved."""
    source = ast.parse((ROOT / "distca" / "vllm" / "families.py").read_text())
    (found,) = (
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    return list(found)


def test_the_table_has_every_class_that_ranks_run() -> None:
    assert proved("PROVED") == list(SMALL)
    assert PAGE.read_text().count(f"\n\n{table()}\n\n") == 1


def test_the_table_has_every_kind_of_quantized_weights_that_ranks_run() -> None:
    assert proved("QUANTIZED") == list(KINDS)
    assert PAGE.read_text().count(f"\n\n{quantized_table()}\n\n") == 1
