"""Least memory of a run: a lower bound of what its rank holds."""

from __future__ import annotations

import os

import pytest
import torch

from megatron_patches.flags.memory import LeastMemory, check_memory, least_memory, machine_memory
from support.arguments import parse

LAYERS, VOCABULARY = 4 * 12 * 64 * 64, 1024 * 64
TOKENS = 256


def needs(flags: str) -> LeastMemory:
    return least_memory(parse(*flags.split()))


def test_what_one_rank_holds() -> None:
    """In float32 with Adam's moments; tied embeddings, and logits of the padded vocabulary."""
    weights = 4 * (LAYERS + VOCABULARY)
    kept = TOKENS * (8 + 4 * (4 * 64 + 1024))
    assert needs("") == LeastMemory(weights, weights, 2 * weights, kept)


@pytest.mark.parametrize(
    ("flags", "weights", "optimizer"),
    [
        ("--bf16", 2, 12),
        ("--optimizer sgd", 4, 0),
        # Of four replicas; the distributed optimizer keeps float32 weights.
        ("--use-distributed-optimizer", 4, 3),
        ("--bf16 --use-distributed-optimizer", 2, 3),
    ],
)
def test_bytes_of_a_parameter(flags: str, weights: int, optimizer: int) -> None:
    found = needs(flags)
    parameters = LAYERS + VOCABULARY
    assert (found.weights, found.optimizer) == (weights * parameters, optimizer * parameters)
    assert found.gradients == found.weights


def test_ranks_share_the_model() -> None:
    one = needs("")
    for flags in (
        "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64",
        "--pipeline-model-parallel-size 2",
    ):
        assert needs(flags).weights * 2 == one.weights
        assert needs(flags).activations < one.activations
    fewer = needs("--tensor-model-parallel-size 2 --sequence-parallel")
    assert fewer.activations < needs("--tensor-model-parallel-size 2").activations
    experts = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
    alone, shared = (needs(f"{experts} {more}") for more in ("", "--expert-model-parallel-size 4"))
    assert alone.weights - shared.weights == 4 * 3 * 4 * 2 * 64 * 32


def test_recomputed_layers_and_evaluation_keep_less() -> None:
    one = needs("")
    again = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert one.activations - needs(again).activations == TOKENS * 3 * 64 * 4
    evaluated = needs("--skip-train")
    assert (evaluated.gradients, evaluated.optimizer) == (0, 0)
    assert evaluated.weights == one.weights


def test_a_run_is_refused_from_one_byte_on() -> None:
    args = parse()
    total = least_memory(args).total
    check_memory(args, total)
    with pytest.raises(ValueError, match=r"weights .*, gradients .*, optimizer .*, activations .*"):
        check_memory(args, total - 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_processes_share_a_machine_s_memory() -> None:
    all_of_it = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine_memory({}) == all_of_it
    assert machine_memory({"LOCAL_WORLD_SIZE": "6"}, servers=2) == all_of_it // 4
    assert machine_memory({"LOCAL_WORLD_SIZE": "2"}, servers=2) == all_of_it
