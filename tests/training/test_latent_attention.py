"""Multi-latent attention with `--distca`, against megatron-core's layers on one process.

Latents travel where all servers have the layer's weights, unless the flags say otherwise.
"""

from __future__ import annotations

import pytest

from support.models import StepsDone, train, train_all
from support.parity import RECOMPUTE, WHOLE
from support.pipelines import LAYOUTS, WINDOW, check, documents

MICRO_BATCHES, CHAIN = 3, 3
LATENT = """
    --num-layers 4 --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16
    --qk-pos-emb-head-dim 8 --v-head-dim 12 --qk-layernorm --rotary-scaling-factor 4
    --mscale-all-dim 0.7
""".split()
PLAIN = ["--seq-length", str(WINDOW), "--global-batch-size", str(MICRO_BATCHES)]
HALVES = ["--seq-length", str(WINDOW // 2), "--global-batch-size", str(2 * MICRO_BATCHES)]
# Documents are longer than a micro-batch.
CHAINED = ["--seq-length", str(WINDOW // 2 // CHAIN), "--distca", "--distca-chain", str(CHAIN)]
CHAINED += ["--global-batch-size", str(2 * CHAIN * MICRO_BATCHES)]
VIRTUAL = LAYOUTS["PP2-VPP2"][1].split()
SPLIT = ["--distca", "--tensor-model-parallel-size", "2"]
PP2 = ["--distca", "--pipeline-model-parallel-size", "2"]


def run(ranks, flags: list[str], world_size: int) -> list[StepsDone]:
    return ranks.run(train, flags, documents(MICRO_BATCHES), 1, world_size=world_size)


@pytest.fixture(scope="module")
def plain(ranks) -> StepsDone:
    """megatron-core's dense attention."""
    return run(ranks, [*PLAIN, *LATENT, "--attention-backend", "unfused"], 1)[0]


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, PLAIN),
        (2, [*HALVES, "--distca", "--distca-backward", "keep"]),
        (2, [*HALVES, "--distca", WHOLE, *RECOMPUTE, "--distca-backward", "keep"]),
        (3, [*HALVES, "--distca", "--distca-servers", "dedicated:1"]),
        (4, [*PLAIN, *SPLIT, "--sequence-parallel", *VIRTUAL]),
        (2, [*CHAINED, *RECOMPUTE]),
        (4, [*CHAINED, *VIRTUAL, WHOLE]),
        (4, [*HALVES, *PP2, "--no-distca-pool-stages", "--distca-chain", "3"]),
        (4, [*HALVES, *SPLIT, "--sequence-parallel"]),
        (4, [*HALVES, *SPLIT, "--overlap-grad-reduce"]),
    ],
    ids=[
        *("packed documents", "kept inputs", "recomputed", "dedicated", "TP2-SP-PP2-VPP2", "chain"),
        *("chain, PP2-VPP2", "stages apart", "TP2-SP", "TP2"),
    ],
)
def test_losses_gradients_and_bytes(
    ranks, plain: StepsDone, world_size: int, flags: list[str]
) -> None:
    found = run(ranks, [*flags, *LATENT], world_size)
    check(found, plain, flags)


def test_queries_without_latents(ranks) -> None:
    """Only latents of keys have norms, with whatever megatron-core does to such queries."""
    at = LATENT.index("--q-lora-rank")
    given = LATENT[:at] + LATENT[at + 2 :]
    expected = run(ranks, [*PLAIN, *given, "--attention-backend", "unfused"], 1)[0]
    flags = [*HALVES, *SPLIT, "--sequence-parallel", *given]
    check(run(ranks, flags, 4), expected, flags)


def test_latents_are_fewer_bytes(ranks, plain: StepsDone) -> None:
    flags = [*HALVES, *LATENT, "--distca", *RECOMPUTE]
    runs = [[*flags, "--distca-latent-rows", rows] for rows in ("auto", "off")]
    by_rank = ranks.run(train_all, runs, documents(MICRO_BATCHES), 1, world_size=2)
    sent = []
    for case, *found in zip(runs, *by_rank, strict=True):
        check(found, plain, case)
        sent.append(sum(sum(rank.bytes_counted.values()) for rank in found))
    # Sizes of a key and value and of a latent differ by six, and few queries move.
    assert sent[0] < sent[1] / 4
