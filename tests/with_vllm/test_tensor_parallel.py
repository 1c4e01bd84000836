"""vLLM whose processes share each layer gets its heads from prefill ranks, which may, too."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: launch/test.sh --vllm")

from support.byte_tokenizer import chat_tokenizer
from support.ports import free_port
from support.prefills import Reader, free_address, prompt
from support.small_models import save_small_model
from support.vllm_server import MIN_TOKENS, POSITIONS, prefill, vllm_serve, wait_for_vllm

LAYOUTS = {
    "2 processes": ("--context-parallel-size", "1", "--tensor-parallel-size", "2"),
    "2 ranks of 2": ("--tensor-parallel-size", "2", "--transfer", "tcp"),
    "2 ranks": (),
}


@pytest.mark.full
def test_two_processes_of_vllm_answer_as_without_ranks(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": POSITIONS}
    folder, address = save_small_model("llama", tmp_path, **sizes), free_address()
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
    flags = ("--tensor-parallel-size", "2")
    with vllm_serve(folder, address, port, tmp_path / "vllm.log", *flags) as server:
        expected = server.answers(bodies)
        assert len(set(expected)) > len(bodies) // 2
        wanted = sum(length - 1 for length in lengths if length > MIN_TOKENS)
        for name, of_ranks in LAYOUTS.items():
            log = tmp_path / f"{name}.log"
            with prefill(folder, address, log, "--lease", "30", *of_ranks):
                reader = Reader(folder, address, engine="test")
                assert reader.client.connect(600.0)
                wait_for_vllm(log, workers=2)
                server.reset()
                assert server.answers(bodies) == expected, name
                # They say it a few times in a lease.
                reader.until(lambda client=reader.client: client.state.tokens == wanted)
                reader.client.close()
