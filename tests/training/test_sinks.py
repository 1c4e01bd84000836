"""Softmax with a sink, off by one or learned, against megatron-core's own on one process."""

from __future__ import annotations

import pytest

from support.models import StepsDone, train
from support.parity import WHOLE
from support.pipelines import SIZES, WINDOW, check, documents, flags_of

MICRO_BATCHES = 3
PLAIN = [*SIZES, "--seq-length", str(WINDOW), "--global-batch-size", str(MICRO_BATCHES)]
HALVES = [*SIZES, "--seq-length", str(WINDOW // 2), "--global-batch-size", str(2 * MICRO_BATCHES)]
AT_HOME = "--distca-scheduler per-document-cp --distca-context-parallel-size 2".split()


def run(ranks, flags: list[str], world_size: int) -> list[StepsDone]:
    return ranks.run(train, flags, documents(MICRO_BATCHES), 1, world_size=world_size)


@pytest.fixture(scope="module")
def plain(ranks) -> dict[str, StepsDone]:
    """Megatron's dense attention with each kind of softmax."""
    return {
        kind: run(ranks, [*PLAIN, "--softmax-type", kind, "--attention-backend", "unfused"], 1)[0]
        for kind in ("off-by-one", "learnable")
    }


@pytest.mark.parametrize(
    ("kind", "world_size", "flags"),
    [
        ("learnable", 4, [*flags_of("TP2-SP-PP2", MICRO_BATCHES)[1], WHOLE]),
        ("learnable", 2, [*HALVES, "--distca", *AT_HOME]),
        ("off-by-one", 2, [*HALVES, "--distca", "--distca-backward", "keep"]),
        ("learnable", 1, PLAIN),
    ],
    ids=["TP2-SP-PP2", "keys move", "kept inputs", "packed documents"],
)
def test_losses_gradients_and_bytes(
    ranks, plain: dict[str, StepsDone], kind: str, world_size: int, flags: list[str]
) -> None:
    found = run(ranks, [*flags, "--softmax-type", kind], world_size)
    check(found, plain[kind], flags)
    sinks = [name for name in found[0].gradients if name.endswith("softmax_offset")]
    assert bool(sinks) == (kind == "learnable")
