"""vLLM whose processes share each layer gets its heads from prefill ranks, which may, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: launch/test.sh --vllm")

from support.byte_tokenizer import chat_tokenizer
from support.ports import free_port
from support.prefills import free_address, prompt
from support.vllm_families import SMALL, save
from support.vllm_server import MIN_TOKENS, POSITIONS, prefill, vllm_serve, wait_for_vllm

LAYOUTS = {
    "2 processes": ("--context-parallel-size", "1", "--tensor-parallel-size", "2"),
    "2 ranks of 2": ("--tensor-parallel-size", "2", "--transfer", "tcp"),
    "2 ranks": (),
}
OF_FAMILIES = {
    "LlamaForCausalLM": LAYOUTS,
    # Groups of blocks, and latents that each worker has whole.
    "Gemma3ForCausalLM": ("2 ranks of 2", "2 ranks"),
    "DeepseekV2ForCausalLM": ("2 ranks of 2", "2 ranks"),
}
"""How ranks share each family, while two processes of vLLM do."""


@pytest.mark.full
@pytest.mark.parametrize("family", OF_FAMILIES)
def test_two_processes_of_vllm_answer_as_without_ranks(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path, max_position_embeddings=POSITIONS)
    address = free_address()
    chat_tokenizer().save_pretrained(folder)
    port = free_port()
    lengths = (MIN_TOKENS + 1, 300, 1500, 40, 2100)
    bodies = [
        {
            "model": "model",
            "max_tokens": 8,
            "temperature": 0,
            "seed": 0,
            "prompt": [token % 256 for token in prompt(number, length)],
        }
        for number, length in enumerate(lengths)
    ]
    operators = json.dumps({"custom_ops": list(SMALL[family].operators)})
    flags = ("--tensor-parallel-size", "2", "--compilation-config", operators)
    with vllm_serve(folder, address, port, tmp_path / "vllm.log", *flags) as server:
        expected = server.answers(bodies)
        assert len(set(expected)) > len(bodies) // 2
        wanted = sum(length - 1 for length in lengths if length > MIN_TOKENS)
        for name in OF_FAMILIES[family]:
            log = tmp_path / f"{name}.log"
            with prefill(folder, address, log, "--lease", "90", *LAYOUTS[name]):
                wait_for_vllm(log, workers=2)
                server.reset()
                before = server.metrics()["loaded_tokens_total"]
                assert server.answers(bodies) == expected, name
                assert server.metrics()["loaded_tokens_total"] - before == wanted, name
