"""A checkpoint with weights that the model lacks is refused, and so is one that lacks weights."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from support.forks import forking

MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 2 "
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--max-position-embeddings 128 --tokenizer-type NullTokenizer --vocab-size 127 "
    "--num-experts 2 --moe-router-topk 2"
).split()
SHARED = ["--moe-shared-expert-intermediate-size", "16"]


def loaded(folder: Path, saved: list[str], wanted: list[str]) -> str:
    """Saves a model and loads it as another; returns the error, empty if there is none."""
    from megatron_patches.convert.model import build_model, parse_model
    from megatron_patches.parts import load_weights, save_weights
    from support.ranks import forget_megatron

    args = parse_model(MODEL + saved, bf16=False)
    save_weights(build_model(args), args, folder)
    forget_megatron()
    args = parse_model(MODEL + wanted, bf16=False)
    model = build_model(args)
    try:
        load_weights(model, args, folder)
    except ValueError as error:
        return str(error)
    finally:
        forget_megatron()
    return ""


@pytest.mark.parametrize(
    ("saved", "wanted", "message"),
    [
        (SHARED, SHARED, ""),
        (SHARED, [], "decoder.layers.mlp.shared_experts.linear_fc1.weight, "),
        ([], SHARED, "shared_experts.linear_fc1.weight from model not in state dict"),
    ],
    ids=["same", "dropped", "missing"],
)
def test_weights_that_only_one_has(
    tmp_path: Path, saved: list[str], wanted: list[str], message: str
) -> None:
    """A process of its own, since saving starts children, which `ranks` may not have."""
    with ProcessPoolExecutor(1, forking()) as pool:
        found = pool.submit(loaded, tmp_path, saved, wanted).result(timeout=600)
    assert message in found
    assert bool(message) == bool(found)
    assert len(found.splitlines()) <= 1
