"""`--distca-head-parallel-size` against plain Megatron on one process."""

from __future__ import annotations

import pytest

from support.models import StepsDone, train
from support.parity import RECOMPUTE, WHOLE
from support.pipelines import SIZES, check

MICRO_BATCHES, WINDOW = 4, 1024
DOCUMENTS = [1, 300, 5, 1, 129, 588, 200, 700, 124, WINDOW, *([12] * 85), 4]
LATENT = """
    --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16
    --qk-pos-emb-head-dim 8 --v-head-dim 12
""".split()
FOUR_HEADS = ["--num-layers", "4"]
SINKS = [*SIZES, "--softmax-type", "learnable"]
WINDOWED = [*SIZES, "--window-size", "100,0"]
MODELS = {
    "two groups": SIZES,
    "four heads": FOUR_HEADS,
    "sinks": SINKS,
    "windows": WINDOWED,
    "latents": [*FOUR_HEADS, *LATENT],
}


def run(ranks, flags: list[str], world_size: int) -> list[StepsDone]:
    return ranks.run(train, flags, DOCUMENTS, 1, world_size=world_size)


@pytest.fixture(scope="module")
def plain(ranks) -> dict[str, StepsDone]:
    """megatron-core's dense attention, of each model."""
    flags = ["--seq-length", str(WINDOW), "--global-batch-size", str(MICRO_BATCHES)]
    flags += ["--attention-backend", "unfused"]
    return {name: run(ranks, [*flags, *model], 1)[0] for name, model in MODELS.items()}


def flags_of(size: int, heads: int, *more: str) -> list[str]:
    """Returns flags of data-parallel ranks that share each window; `heads` of them share heads."""
    flags = ["--seq-length", str(WINDOW // size), "--distca", *more]
    flags += ["--global-batch-size", str(MICRO_BATCHES * size)]
    return [*flags, "--distca-head-parallel-size", str(heads)]


PP2 = "--pipeline-model-parallel-size 2".split()
VIRTUAL = "--num-layers-per-virtual-pipeline-stage 1".split()
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel".split()
KEEP = "--distca-backward keep".split()
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather".split()
CHAIN = "--distca-chain 2 --seq-length 256 --global-batch-size 16".split()
CASES = {
    "DP4": ("two groups", flags_of(4, 2)),
    "all heads apart": ("four heads", flags_of(4, 4)),
    "sinks": ("sinks", flags_of(4, 2, WHOLE)),
    "windows": ("windows", flags_of(4, 2, *KEEP)),
    "latents": ("latents", flags_of(4, 2)),
    "TP2-SP": ("four heads", flags_of(2, 2, *TP2)),
    "PP2": ("two groups", flags_of(2, 2, *PP2)),
    "PP2-VPP2": ("two groups", flags_of(2, 2, *PP2, *VIRTUAL, WHOLE)),
    "chain": ("two groups", [*flags_of(2, 2, *PP2), *CHAIN]),
    "greedy": ("two groups", flags_of(4, 2, "--distca-scheduler", "greedy")),
    "recomputed": ("two groups", flags_of(4, 2, *RECOMPUTE, *OVERLAP)),
    "pools": ("two groups", flags_of(4, 2, "--distca-pool-size", "2")),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_bytes(ranks, plain: dict[str, StepsDone], case: str) -> None:
    model, flags = CASES[case]
    check(run(ranks, [*flags, *MODELS[model]], 4), plain[model], case)
