"""Multi-latent attention with `--distca`, against megatron-core's layers on one process."""

from __future__ import annotations

import pytest

from support.models import StepsDone, train
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
TP2 = [*PLAIN, "--distca", "--tensor-model-parallel-size", "2"]


def run(ranks, flags: list[str], world_size: int) -> list[StepsDone]:
    return ranks.run(train, flags, documents(MICRO_BATCHES), 1, world_size=world_size)


@pytest.fixture(scope="module")
def plain(ranks) -> StepsDone:
    """megatron-core's dense attention."""
    return run(ranks, [*PLAIN, *LATENT, "--attention-backend", "local"], 1)[0]


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, PLAIN),
        (2, [*HALVES, "--distca", "--distca-backward", "keep", "--distca-head-groups", "2"]),
        (2, [*HALVES, "--distca", WHOLE, *RECOMPUTE]),
        (3, [*HALVES, "--distca", "--distca-servers", "dedicated:1"]),
        (4, [*TP2, "--sequence-parallel", *VIRTUAL]),
        (2, TP2),
        (2, [*CHAINED, *RECOMPUTE]),
        (4, [*CHAINED, *VIRTUAL, WHOLE]),
    ],
    ids=[
        *("packed documents", "kept inputs", "recomputed", "dedicated", "TP2-SP-PP2-VPP2", "TP2"),
        *("chain", "chain, PP2-VPP2"),
    ],
)
def test_losses_gradients_and_bytes(
    ranks, plain: StepsDone, world_size: int, flags: list[str]
) -> None:
    found = run(ranks, [*flags, *LATENT], world_size)
    check(found, plain, flags)
