"""The table of proved classes of vLLM is the one that the code refuses others by."""

from __future__ import annotations

import ast

from support.vllm_families import PAGE, ROOT, SMALL, table


def test_the_table_has_every_class_that_ranks_run() -> None:
    source = ast.parse((ROOT / "distca" / "vllm" / "families.py").read_text())
    (proved,) = (
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PROVED"
    )
    assert list(proved) == list(SMALL)
    assert PAGE.read_text().count(f"\n\n{table()}\n\n") == 1
