"""Mixtures of experts with `--distca`, against plain Megatron on one process."""

from __future__ import annotations

import pytest

from support.models import StepsDone, train, train_all
from support.parity import RECOMPUTE, WHOLE, check_gradients
from support.versions import BALANCED_BY_PASS

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
# DeepSeek-V3's balancing: the bias of an expert is moved after each step.
BIASED = """
    --moe-router-load-balancing-type none --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.5
""".split()
UNMOVED = ["--moe-router-bias-update-rate", "0"]
BY_PASS = {"global_aux_loss": "0.5", "quantile_balancing": "0"}
"""Coefficients of the losses of what counts passes."""
LOSSES |= {"biased": BIASED}
_REFERENCES: dict[str, StepsDone] = {}


def reference(ranks, losses: str, steps: int = 1) -> StepsDone:
    if losses not in _REFERENCES:
        flags = ["--seq-length", "1024", "--global-batch-size", "4", *EXPERTS, *LOSSES[losses]]
        flags += ["--attention-backend", "unfused"]
        _REFERENCES[losses] = ranks.run(train, flags, LENGTHS * steps, steps, world_size=1)[0]
    return _REFERENCES[losses]


def check(found: list[StepsDone], expected: StepsDone, case: object) -> None:
    for rank in found:
        assert rank.losses == pytest.approx(expected.losses, rel=1e-5), case
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


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [(2, ["--distca-pool-size", "2", WHOLE]), (4, ["--distca-pool-size", "4"])],
)
def test_experts_of_one_pool_with_micro_batches_of_any_size(
    ranks, world_size: int, flags: list[str]
) -> None:
    """Documents are longer than the window of a micro-batch."""
    run = ["--seq-length", "128", "--global-batch-size", "32", *EP2, *EXPERTS, *LOSSES["none"]]
    run += ["--distca", "--distca-max-document-length", "1024", *flags]
    found = ranks.run(train, run, LENGTHS, 1, world_size=world_size)
    check(found, reference(ranks, "none"), flags)


def test_a_loss_of_routers_in_one_pool(ranks) -> None:
    """It is that of a micro-batch's tokens on all ranks, wherever they are."""
    run = ["--seq-length", "2048", "--global-batch-size", "2", *EXPERTS, *LOSSES["balanced"]]
    spread = [["--distca", "--distca-pool-size", "2", WHOLE], [*SEQUENTIAL, WHOLE]]
    runs = [[*run, *EP2, *each] for each in spread]
    (pooled, beside), *_ = ranks.run(train_all, runs, LENGTHS, 1, world_size=2)
    assert pooled.losses == pytest.approx(beside.losses, rel=1e-6)
    assert pooled.grad_norms == pytest.approx(beside.grad_norms, rel=1e-5)


@pytest.mark.parametrize("nano_batches", ["--distca-ping-pong", "--no-distca-ping-pong"])
def test_a_bias_of_experts_follows_the_tokens_of_all_ranks(ranks, nano_batches: str) -> None:
    """The second step is routed by the bias that the first one moved."""
    run = [*DP2, *EP2, *EXPERTS, *BIASED, *SEQUENTIAL, nano_batches]
    found = ranks.run(train, run, LENGTHS * 2, 2, world_size=2)
    expected = reference(ranks, "biased", steps=2)
    check(found, expected, nano_batches)
    # Else a bias that never moves would show nothing.
    unmoved = ranks.run(train, [*run, *UNMOVED], LENGTHS * 2, 2, world_size=2)
    assert unmoved[0].losses[1] != pytest.approx(expected.losses[1], rel=1e-4)


@pytest.mark.parametrize("kind", BALANCED_BY_PASS)
def test_what_counts_passes_is_as_in_plain_megatron_of_as_many_ranks(ranks, kind: str) -> None:
    """With documents that no rank cuts: what a rank counts depends on its tokens."""
    run = [*DP2, *EXPERTS, "--moe-router-load-balancing-type", kind]
    run += ["--moe-aux-loss-coeff", BY_PASS[kind]]
    runs = [[*run, "--attention-backend", "unfused"], [*run, *SEQUENTIAL, "--no-distca-ping-pong"]]
    (plain, found), *_ = ranks.run(train_all, runs, [256, 128, 128] * 32, 2, world_size=2)
    assert found.losses == pytest.approx(plain.losses, rel=1e-6)
    assert found.grad_norms == pytest.approx(plain.grad_norms, rel=1e-5)
