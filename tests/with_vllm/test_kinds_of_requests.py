"""Adapters, prompt embeddings, salts and several answers in a real vLLM: what ranks compute."""

from __future__ import annotations

import json
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: launch/test.sh --vllm")

from safetensors.torch import save_file

from support.prefills import free_address, in_background, prompt
from support.ranks import Ranks
from support.vllm_families import SECONDS, answering, connected, prefill, save

TOKENS = prompt(0, 150)
HIDDEN = 128
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plain", {}),
    ("adapter", {}),
    ("embeddings", {}),
    ("one salt", {"cache_salt": "one"}),
    ("another salt", {"cache_salt": "another"}),
    ("one salt again", {"cache_salt": "one"}),
    ("plain again", {}),
    ("three answers", {}),
)
"""One after the other; vLLM forgets its own blocks before each."""

OTHERS = ("adapter", "embeddings")
"""What vLLM computes itself."""

SEVERAL = {"n": 3, "temperature": 1.0, "seed": 0}
"""Answers to one prompt: it is asked for once."""


def save_adapter(folder: Path, layers: int) -> None:
    """Writes a LoRA adapter of queries, as PEFT does."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 64, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator, weights = torch.Generator().manual_seed(0), {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        for part, size in (("lora_A", (8, HIDDEN)), ("lora_B", (HIDDEN, 8))):
            weights[f"{name}.{part}.weight"] = torch.randn(size, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")


def answer(pipe: Connection, folder: str, adapter: str, address: str) -> None:
    """Answers the prompt in all ways. The caller says before each whether ranks must be there."""
    model, wait = connected(
        folder,
        address,
        dtype="float32",
        enable_lora=True,
        max_lora_rank=8,
        enable_prompt_embeds=True,
    )
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    embeddings = torch.randn((len(TOKENS), HIDDEN), generator=torch.Generator().manual_seed(1))
    while (with_ranks := pipe.recv()) is not None:
        if with_ranks:
            wait()
        answers = {}
        for name, salt in WAYS:
            model.reset_prefix_cache()
            asked: dict[str, Any] = {"prompt_token_ids": TOKENS} | salt
            if name == "embeddings":
                asked = {"prompt_embeds": embeddings}
            lora = LoRARequest("one", 1, adapter) if name == "adapter" else None
            drawn = SEVERAL if name == "three answers" else {"temperature": 0}
            sampling = SamplingParams(max_tokens=8, detokenize=False, **drawn)
            (one,) = model.generate([asked], sampling, use_tqdm=False, lora_request=lora)
            answers[name] = [list(each.token_ids) for each in one.outputs]
        pipe.send(answers)
    model.llm_engine.engine_core.shutdown()


def test_adapters_and_embeddings_stay_with_vllm_and_salts_share_nothing(
    ranks: Ranks, tmp_path: Path
) -> None:
    from distca.vllm.model import read_vllm_model

    folder, adapter, address = save("LlamaForCausalLM", tmp_path), tmp_path / "one", free_address()
    model = read_vllm_model(str(folder), torch.float32)
    save_adapter(adapter, len(model.windows))
    of_ranks = [name for name, _ in WAYS if name not in OTHERS]
    with answering(answer, str(folder), str(adapter), address) as vllm:
        vllm.send(False)
        alone = vllm.recv()
        run = partial(ranks.run, prefill, model, address, len(of_ranks))
        with in_background(partial(run, world_size=1, timeout=SECONDS)) as done:
            vllm.send(True)
            while not vllm.poll(1.0):
                assert not any(isinstance(each, BaseException) for each in done), done
            found = vllm.recv()
    assert found == alone
    plain, *others = alone["plain"], *(alone[name] for name in OTHERS)
    assert all(alone[name] == plain for name in of_ranks[:-1])
    assert plain not in others, "no test: the adapter, or the embeddings, change nothing"
    counts, wanted = done[0][0].counts, len(TOKENS) - 1
    assert counts.prompts == len(of_ranks)
    assert counts.tokens == len(of_ranks) * wanted
    # Those that come again find whole blocks of 16 tokens, and no others do.
    assert counts.computed == 3 * wanted + 3 * (wanted % 16)
