"""Families of models on prefill ranks by vLLM's own classes answer as vLLM alone does."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: launch/test.sh --vllm")

from support.ranks import Ranks
from support.vllm_families import LAYOUTS, SMALL, answering, compare

SHORT = {
    "Gemma3ForCausalLM": [(2, 2)],
    "GptOssForCausalLM": [(2, 1)],
    "Qwen3MoeForCausalLM": [(1, 2)],
    "DeepseekV2ForCausalLM": [(2, 1)],
}
"""Windows, sinks, experts, and latents: ranks, and processes of each."""


@pytest.fixture(scope="module")
def vllm() -> Iterator[Connection]:
    """A process in which vLLM answers."""
    with answering() as pipe:
        yield pipe


@pytest.mark.parametrize("name", SMALL)
def test_answers_are_vllm_s_own(ranks: Ranks, vllm: Connection, name: str, full: bool) -> None:
    if not full and name not in SHORT:
        pytest.skip("runs with --full")
    compare(name, ranks, vllm, LAYOUTS if full else SHORT[name])
