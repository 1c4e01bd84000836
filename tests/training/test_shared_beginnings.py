"""Fine-tuning on conversations that share tokens, against plain Megatron on each of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.chats import message, save_tokenizer
from support.whole_runs import whole_run

FLAGS = """
    --sft --tokenizer-type SFTTokenizer --sft-tokenizer-prompt-format default
    --make-vocab-size-divisible-by 262 --train-iters 3 --eval-iters 0 --split 1,0,0
    --optimizer sgd --sgd-momentum 0 --lr 0.05
""".split()
# A window has room for each conversation once, and not for another one, so that each micro-batch
# has all of them, whatever their order.
PLAIN = "--seq-length 3072 --attention-backend unfused --global-batch-size 2"
SHARED = "--distca --distca-share-prefixes"
DP1 = f"{SHARED} --seq-length 1792 --global-batch-size 2"
DP2 = f"{SHARED} --seq-length 896 --global-batch-size 4"
# Prompts are longer than the 256 tokens of a rank in a nano-batch.
DP4 = f"{SHARED} --seq-length 512 --global-batch-size 8"
WHOLE = "--no-distca-ping-pong"
EXPERTS = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-layer-freq [1]*2
    --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall
    --window-size 100,0
"""
LATENTS = """
    --num-layers 4 --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16
    --qk-pos-emb-head-dim 8 --v-head-dim 12 --qk-layernorm
"""
PIPELINE = "--pipeline-model-parallel-size 2"
CHUNKS = f"--num-layers 4 {PIPELINE} --num-layers-per-virtual-pipeline-stage 1"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
# Flags of the model, ranks of plain Megatron that begin with the same weights, and ranks and flags
# of a run that shares.
RUNS = {
    "DP2": ("", 1, 2, f"{DP2} {WHOLE}"),
    "experts with a window, inputs kept": (EXPERTS, 1, 2, f"{DP2} --distca-backward keep {WHOLE}"),
    "latents, PP2": (f"{LATENTS} {PIPELINE}", 2, 2, f"{DP1} {WHOLE}"),
    "TP2-SP-DP2": (TENSOR, 2, 4, f"{DP2} {WHOLE}"),
    "ping-pong, a window, DP4": ("--window-size 100,0", 1, 4, DP4),
    "ping-pong, TP2-SP-DP2": (TENSOR, 2, 4, DP2),
    "ping-pong, virtual stages": (CHUNKS, 2, 2, DP1),
}
PROMPTS = (150, 200)
"""Characters of the prompts' texts: other tokens come with a message's role."""


def conversations() -> list[dict[str, Any]]:
    """Answers to two prompts, some of which go on, and a conversation that shares nothing."""
    lines: list[dict[str, Any]] = []
    for number, length in enumerate(PROMPTS):
        asked = [message("system", "s" * length), message("user", f"question {number} " * 8)]
        answers = {"completions": ["yes " * 20, "no " * 25], "weights": [0.5, 2]}
        lines.append({"prompt": asked, **answers})
        first = [*asked, message("assistant", "so " * 40), message("user", "why? " * 10)]
        for answer in ("since " * 20, "never " * 3) if number == 0 else ():
            lines.append({"messages": [*first, message("assistant", answer)]})
    alone = [message("user", "alone " * 45), message("assistant", "quite " * 20)]
    return [*lines, {"messages": alone}]


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    folder: Path = tmp_path_factory.mktemp("shared")
    tokenizer = save_tokenizer(folder / "tokenizer")
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in conversations()))
    return [*FLAGS, "--tokenizer-model", tokenizer, "--data-path", str(file)]


@pytest.mark.parametrize("name", RUNS)
def test_losses_equal_those_of_plain_megatron_one_by_one(ranks, flags, name: str) -> None:
    model, plain_ranks, size, shared = RUNS[name]
    flags = [*flags, *model.split()]
    plain = ranks.run(whole_run, [*flags, *PLAIN.split()], world_size=plain_ranks)
    # Each step depends on the gradients of those before it.
    assert len(set(plain[0].losses.values())) == len(set(plain[0].norms.values())) == 3
    for rank in ranks.run(whole_run, [*flags, *shared.split()], world_size=size):
        assert rank.losses == pytest.approx(plain[0].losses, rel=3e-6)
        assert rank.norms == pytest.approx(plain[0].norms, rel=3e-6)
        assert rank.threads_left == []
