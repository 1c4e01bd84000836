"""Families of models on prefill ranks by vLLM's own classes answer as vLLM alone does."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: launch/test.sh --vllm")

from distca.prefill.facts import model_facts
from support.prefills import free_address, front_alone
from support.ranks import Ranks
from support.vllm_families import LAYOUTS, LENGTHS, SMALL, answering, compare, save

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


def test_failed_loads_of_layers_with_windows_are_computed_by_vllm(
    vllm: Connection, tmp_path: Path
) -> None:
    """vLLM keeps such layers in groups with blocks of their own."""
    from distca.vllm.model import read_vllm_model

    folder, address = save("Gemma3ForCausalLM", tmp_path), free_address()
    vllm.send((folder, address, torch.float32, ()))
    vllm.send(False)
    alone = vllm.recv()
    assert alone.groups > 1
    model = read_vllm_model(str(folder), torch.float32)
    facts = model_facts(model.config, str(folder), "float32", model.frequencies, model.quantization)
    with front_alone(address, facts, len(model.windows), model.kv_heads) as (_, asked):
        vllm.send(True)
        answers = vllm.recv()
        assert answers.tokens == alone.tokens
        # vLLM may compute other prompts together than it does alone.
        for ours, theirs in zip(answers.logprobs, alone.logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
    vllm.send(None)
    assert sorted(asked) == [length - 1 for length in LENGTHS]
