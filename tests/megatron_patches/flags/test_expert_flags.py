"""Flags of mixtures of experts."""

from __future__ import annotations

import argparse

import pytest

from megatron_patches.flags.megatron_table import layer_pattern
from megatron_patches.flags.sizes import layer_parameters, matrix_parameters
from support.arguments import parse

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"


@pytest.mark.parametrize(
    ("text", "pattern"),
    [("2", 2), ("[1]*4", [1] * 4), ("([0]*1+[1]*2)*2", [0, 1, 1, 0, 1, 1]), ("[0,1]", [0, 1])],
)
def test_patterns_of_layers(text: str, pattern: int | list[int]) -> None:
    assert layer_pattern(text) == pattern


@pytest.mark.parametrize("text", ["", "[2]", "[1]*x", "__import__('os')", "[1]-[0]", "[1"])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="every Nth layer"):
        layer_pattern(text)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--expert-model-parallel-size 2", "needs --num-experts"),
        (f"{EXPERTS} --expert-model-parallel-size 3", "must divide the 4 processes"),
        ("--num-experts 3 --expert-model-parallel-size 2", "does not divide --num-experts 3"),
        ("--num-experts 4 --moe-router-topk 5", "must lie in 1 .. --num-experts 4"),
        (f"{EXPERTS} --moe-layer-freq [1]*3", "an entry for each of --num-layers 4"),
        (f"{EXPERTS} --tensor-model-parallel-size 2", "needs --sequence-parallel"),
        (f"{EXPERTS} --moe-aux-loss-coeff 1 2", "equally many values"),
        (f"{EXPERTS} --moe-grouped-gemm", "needs GPUs and Transformer Engine"),
        (f"{EXPERTS} --distca --distca-scheduler wlb-llm", "different numbers of tokens"),
    ],
)
def test_what_cannot_work_is_refused(flags: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(*flags.split())


def test_a_token_uses_some_experts_and_a_checkpoint_has_all() -> None:
    dense = parse("--swiglu", "--ffn-hidden-size", "128")
    args = parse(*EXPERTS.split(), "--swiglu", "--ffn-hidden-size", "128", "--moe-layer-freq", "2")
    attention = layer_parameters(dense) - 64 * 3 * 128
    # Two layers of four have experts.
    assert layer_parameters(args) == attention + 64 * 3 * (128 + 2 * 32) // 2
    grown = matrix_parameters(args) - matrix_parameters(dense)
    assert grown == 2 * 64 * 3 * (4 * 32 - 128)
    shared = parse(*EXPERTS.split(), "--moe-shared-expert-intermediate-size", "16")
    plain = parse(*EXPERTS.split())
    assert layer_parameters(shared) - layer_parameters(plain) == 64 * 2 * 16
