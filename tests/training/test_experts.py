"""Mixtures of experts with `--distca`, against plain Megatron on one process."""

from __future__ import annotations

import pytest

from support.models import StepsDone, train
from support.parity import RECOMPUTE, WHOLE, check_gradients

LENGTHS = [*(1, 300, 5, 1, 129, 588), *(200, 700, 124), 1024, *([128] * 8)]
EXPERTS = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-layer-freq [1]*2
    --moe-token-dispatcher-type alltoall
""".split()
# Documents stay in the micro-batch that they have in plain Megatron, where losses are averaged.
SEQUENTIAL = ["--distca", "--distca-placement", "sequential"]
BALANCED = ["--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.5"]
LOSSES = {
    "none": ["--moe-router-load-balancing-type", "none"],
    "balanced": [*BALANCED, "--moe-z-loss-coeff", "0.1"],
    # Without a loss of the router's: megatron-core 0.16 weighs them by the tensor-parallel size.
    "shared": [
        *("--moe-router-load-balancing-type", "none"),
        *("--moe-shared-expert-intermediate-size", "32", "--moe-router-score-function", "sigmoid"),
        "--moe-router-pre-softmax",
    ],
}
_REFERENCES: dict[str, StepsDone] = {}


def reference(ranks, losses: str) -> StepsDone:
    if losses not in _REFERENCES:
        flags = ["--seq-length", "1024", "--global-batch-size", "4", *EXPERTS, *LOSSES[losses]]
        flags += ["--attention-backend", "unfused"]
        _REFERENCES[losses] = ranks.run(train, flags, LENGTHS, 1, world_size=1)[0]
    return _REFERENCES[losses]


def check(found: list[StepsDone], expected: StepsDone, case: object) -> None:
    for rank in found:
        assert abs(rank.losses[0] / expected.losses[0] - 1) < 1e-5, case
        assert rank.bytes_counted == rank.bytes_planned, case
    check_gradients(found, expected, case)


DP2 = ["--seq-length", "512", "--global-batch-size", "8"]
EP2 = ["--expert-model-parallel-size", "2"]
# gloo gathers no tensors of unequal sizes, as those of an expert on several ranks are.
SHARDED = ["--sequence-parallel", "--expert-tensor-parallel-size", "1"]


@pytest.mark.parametrize(
    ("losses", "world_size", "flags"),
    [
        ("none", 4, ["--pipeline-model-parallel-size", "2", *RECOMPUTE]),
        ("balanced", 2, [WHOLE]),
        ("shared", 4, ["--tensor-model-parallel-size", "2", *SHARDED]),
    ],
)
def test_experts_of_two_ranks(ranks, losses: str, world_size: int, flags: list[str]) -> None:
    run = [*DP2, *EP2, *EXPERTS, *LOSSES[losses], *SEQUENTIAL, *flags]
    found = ranks.run(train, run, LENGTHS, 1, world_size=world_size)
    check(found, reference(ranks, losses), (losses, flags))
