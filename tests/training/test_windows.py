"""Windows on some layers only, against plain Megatron on one process with a dense mask for each.

Megatron scales queries and keys by layer here, which changes no score: runs do with and without it.
"""

from __future__ import annotations

import pytest

from support.models import StepsDone, train
from support.parity import RECOMPUTE, WHOLE
from support.pipelines import SIZES, WINDOW, check, documents, flags_of

SCALING = "--apply-query-key-layer-scaling"
WINDOWS = ["--window-size", "100,0", "--window-attn-skip-freq"]
MICRO_BATCHES = 3
PLAIN = [*SIZES, "--seq-length", str(WINDOW), "--global-batch-size", str(MICRO_BATCHES)]


@pytest.fixture(scope="module")
def plain(ranks) -> StepsDone:
    flags = [*PLAIN, *WINDOWS, "2", SCALING, "--attention-backend", "unfused"]
    return ranks.run(train, flags, documents(MICRO_BATCHES), 1, world_size=1)[0]


@pytest.mark.parametrize(
    ("layout", "pattern", "more"),
    [
        ("PP2", "[1,0,1,0]", RECOMPUTE),
        ("TP2-SP-PP2", "2", [WHOLE, SCALING]),
        ("PP2 + 1", "2", ["--distca-scheduler", "greedy"]),
    ],
)
def test_losses_gradients_and_bytes(
    ranks, plain: StepsDone, layout: str, pattern: str, more: list[str]
) -> None:
    world_size, flags = flags_of(layout, MICRO_BATCHES)
    run = [*flags, *WINDOWS, pattern, *more]
    found = ranks.run(train, run, documents(MICRO_BATCHES), 1, world_size=world_size)
    check(found, plain, layout)


def test_without_a_pipeline(ranks, plain: StepsDone) -> None:
    """Any pattern; keys that are sent ahead, inputs that servers keep, and plain packed documents.

    Chains and ping-pong: queries see keys of a window in what came before.
    """
    ranks_of = ["--seq-length", str(WINDOW // 2), "--global-batch-size", str(2 * MICRO_BATCHES)]
    at_home = ["--distca-scheduler", "per-document-cp", "--distca-context-parallel-size", "2"]
    for more in (["--distca-backward", "keep"], at_home, ["--distca-chain", str(MICRO_BATCHES)]):
        run = [*SIZES, *ranks_of, *WINDOWS, "2", "--distca", *more]
        found = ranks.run(train, run, documents(MICRO_BATCHES), 1, world_size=2)
        check(found, plain, more)
    flags = [*PLAIN, *WINDOWS, "2", SCALING]
    packed = ranks.run(train, flags, documents(MICRO_BATCHES), 1, world_size=1)
    check(packed, plain, "packed")
    other = ranks.run(train, PLAIN, documents(MICRO_BATCHES), 1, world_size=1)
    assert abs(other[0].losses[0] / plain.losses[0] - 1) > 1e-5
