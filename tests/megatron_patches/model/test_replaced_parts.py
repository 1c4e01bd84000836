"""What of Megatron's model is ours, as the table of replaced names lists it."""

from __future__ import annotations

import importlib

import pytest

from support.replaced_parts import replaced_parts
from support.versions import PREDICTS_TOKENS

CASES = {
    "graphs": (
        "--distca-ping-pong",
        {
            "SelfAttention.core_attention",
            "GPTModel.rotary_pos_emb",
            "TransformerBlock.forward",
            "TransformerLayer.forward",
        },
    ),
    "experts": (
        "--no-distca-ping-pong --num-experts 4 --moe-aux-loss-coeff 0.1 "
        "--moe-router-load-balancing-type aux_loss",
        {
            "SelfAttention.core_attention",
            "GPTModel.rotary_pos_emb",
            "TopKRouter._apply_aux_loss",
            "TopKRouter._apply_seq_aux_loss",
            "TopKRouter.attach_and_log_load_balancing_loss",
        },
    ),
    "latents": (
        "--no-distca-ping-pong --multi-latent-attention --qk-pos-emb-head-dim 8 "
        "--distca-latent-rows on",
        {
            "MLASelfAttention.core_attention",
            "MLASelfAttention.rotary_pos_emb",
            "ColumnParallelLinear.forward",
        },
    ),
    "queries without latents": (
        "--no-distca-ping-pong --multi-latent-attention --qk-pos-emb-head-dim 8 --qk-layernorm",
        {"TransformerLayer.self_attention", "ColumnParallelLinear.forward"},
    ),
    "token prediction": (
        "--distca-ping-pong --mtp-num-layers 1",
        {
            "SelfAttention.core_attention",
            "GPTModel.rotary_pos_emb",
            "TransformerBlock.forward",
            "TransformerLayer.forward",
            "MultiTokenPredictionLayer._get_embeddings",
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_replaced_is_in_the_table(ranks, case: str) -> None:
    from megatron_patches.hooks import INSTANCES

    flags, expected = CASES[case]
    if "--mtp" in flags and not PREDICTS_TOKENS:
        pytest.skip("not covered in this version")
    sizes = "--distca --seq-length 256 --global-batch-size 2 --max-position-embeddings 256"
    given = [*sizes.split(), *flags.split()]
    (found,) = ranks.run(replaced_parts, given, case == "graphs", world_size=1)
    assert found <= set(INSTANCES)
    assert {name.split(":")[1] for name in found} == expected


def test_each_row_is_of_a_class_and_in_a_case() -> None:
    from megatron_patches.hooks import INSTANCES

    for name in INSTANCES:
        module, _, path = name.partition(":")
        assert hasattr(importlib.import_module(module), path.split(".")[0])
    assert {name.split(":")[1] for name in INSTANCES} == set().union(
        *(expected for _, expected in CASES.values())
    )
