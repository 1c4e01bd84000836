"""Quantized weights on prefill ranks, by vLLM's own layers, answer as vLLM alone does."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: launch/test.sh --vllm")

from support.quantized_models import KINDS
from support.ranks import Ranks
from support.vllm_families import LAYOUTS, answering, compare

SHORT = ("compressed-tensors int-quantized", "awq")
"""Kinds of eight and of four bits."""


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_vllm_s_own(ranks: Ranks, kind: str, full: bool) -> None:
    if not full and kind not in SHORT:
        pytest.skip("runs with --full")
    with answering() as vllm:
        compare("LlamaForCausalLM", ranks, vllm, LAYOUTS if full else [(1, 2)], kind)
