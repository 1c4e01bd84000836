"""Flags of mixtures of experts."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_patches.flags.sizes import ModelSizes
from support.arguments import parse
from support.versions import BALANCED_BY_PASS

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"


def test_experts_take_equally_many_tokens() -> None:
    with pytest.raises(ValueError, match="different numbers of tokens"):
        parse(*EXPERTS.split(), "--distca", "--distca-scheduler", "wlb-llm")


@pytest.mark.parametrize("kind", BALANCED_BY_PASS)
def test_what_counts_a_router_s_passes_needs_whole_micro_batches(kind: str) -> None:
    """A nano-batch would be balanced by itself, and the loss would change without a word."""
    flags = [*EXPERTS.split(), "--moe-router-load-balancing-type", kind, "--distca"]
    with pytest.raises(ValueError, match=f"{kind}: .* Give --no-distca-ping-pong"):
        parse(*flags)
    parse(*flags, "--no-distca-ping-pong")
    parse(*flags[:-1])


def layer_parameters(args: Namespace) -> int:
    return ModelSizes.from_args(args).layer_parameters()


def test_a_token_uses_some_experts_and_a_checkpoint_has_all() -> None:
    dense = parse("--swiglu", "--ffn-hidden-size", "128")
    args = parse(*EXPERTS.split(), "--swiglu", "--ffn-hidden-size", "128", "--moe-layer-freq", "2")
    attention = layer_parameters(dense) - 64 * 3 * 128
    # Two layers of four have experts.
    assert layer_parameters(args) == attention + 64 * 3 * (128 + 2 * 32) // 2
    grown = ModelSizes.from_args(args).parameters - ModelSizes.from_args(dense).parameters
    assert grown == 2 * 64 * 3 * (4 * 32 - 128)
    shared = parse(*EXPERTS.split(), "--moe-shared-expert-intermediate-size", "16")
    plain = parse(*EXPERTS.split())
    assert layer_parameters(shared) - layer_parameters(plain) == 64 * 2 * 16
