"""The page names the proved classes of vLLM, those by which the code refuses others."""

from __future__ import annotations

import ast
import re

from distca.vllm.plugin import TESTED
from support.quantized_models import KINDS
from support.vllm_families import PAGE, ROOT, SMALL


def proved(name: str) -> list[str]:
    """Names that the code has as proved."""
    source = ast.parse((ROOT / "distca" / "vllm" / "families.py").read_text())
    (found,) = (
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    return list(found)


def named(begin: str, end: str) -> list[str]:
    """Code names between two phrases of the page, across line breaks."""
    text = " ".join(PAGE.read_text().split())
    return re.findall(r"`([^`]+)`", text[text.index(begin) : text.index(end)])


def test_the_page_names_every_class_that_ranks_run() -> None:
    assert proved("PROVED") == list(SMALL)
    assert named("We tested these vLLM classes", "Each ran in float32") == list(SMALL)


def test_the_page_names_every_kind_of_quantized_weights_that_ranks_run() -> None:
    assert proved("QUANTIZED") == list(KINDS)
    assert named("for these quantized weights", "Refused: other") == list(KINDS)


def test_the_page_names_the_versions_of_vllm_that_were_tested() -> None:
    text = " ".join(PAGE.read_text().split())
    said = text[text.index("This was run with") : text.index("No GPU")]
    assert sorted(re.findall(r"\d+\.\d+\.\d+", said)) == sorted(TESTED)
