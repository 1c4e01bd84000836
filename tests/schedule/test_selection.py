"""The paper's rules for a prefill's strategy, at the paper's sizes and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.serving.context_parallel import EmpiricalRule
from distca.cost.model_sizes import MODELS
from distca.cost.volume import AttentionShape
from distca.plan import Placement, SteppedPlan
from distca.schedule.serving import PaperRule, Strategy, shard_evenly

LLAMA = MODELS["llama-405b"].attention_shape()
# Nodes of 8 GPUs: 800 TFLOP/s and 50 GB/s each; 4 nodes.
PAPER = PaperRule(LLAMA, 4, 8 * 800e12, 8 * 50e9)


def test_thresholds_of_the_paper() -> None:
    assert PAPER.smaller_queries == 0.125
    assert PAPER.tokens_that_hide_keys == pytest.approx(4000)
    assert PAPER.tokens_that_hide_queries == pytest.approx(32000)
    # Eq. 5 alone, of 128,000 tokens.
    assert PAPER.pass_q_below(3200) == pytest.approx(3200 / 128000)
    # Of one GPU's heads and rates they are the same.
    of_gpu = PaperRule(MODELS["llama-405b"].attention_shape(8), 4, 800e12, 50e9)
    assert of_gpu.tokens_that_hide_keys == pytest.approx(4000)
    assert of_gpu.tokens_that_hide_queries == pytest.approx(32000)


@pytest.mark.parametrize(
    ("new", "algorithm_1", "algorithm_5"),
    [
        (1280, "pass-q", "pass-q"),
        (3199, "pass-q", "pass-q"),
        # The outputs' way back costs more than keys that are not hidden.
        (3300, "pass-q", "pass-kv"),
        (3999, "pass-q", "pass-kv"),
        # Kernels hide the keys.
        (4001, "pass-kv", "pass-kv"),
        (128000, "pass-kv", "pass-kv"),
    ],
)
def test_algorithms_of_the_paper(new: int, algorithm_1: str, algorithm_5: str) -> None:
    without = PaperRule(LLAMA, 4, 8 * 800e12, 8 * 50e9, all_to_all=False)
    assert without.of_tokens(new, 128000 - new) == algorithm_1
    assert PAPER.of_tokens(new, 128000 - new) == algorithm_5


def test_a_short_prompt_passes_keys_and_a_short_turn_queries() -> None:
    """Without cached tokens queries are larger, however few there are."""
    assert PAPER.of_tokens(100, 0) == "pass-kv"
    assert PAPER.of_tokens(100, 10000) == "pass-q"


def no_plan(strategy: Strategy) -> SteppedPlan:
    raise AssertionError("the rule goes by numbers of tokens")


def test_sequences_of_a_prefill_count_together() -> None:
    new = shard_evenly(np.array([900, 100]), np.array([1000, 200]), 2)
    held = Placement(*(np.array(x) for x in ([0, 1, 2], [0] * 3, [900, 100, 9000], [0, 1, 0])), 2)
    rule = PaperRule(AttentionShape(32, 4, 64), 2, 1e15, 1e9)
    # 200 of 1,200 tokens are new: a sixth. Sequence 2 is none of the prefill's.
    assert rule.smaller_queries == 0.25
    assert rule.choose(held, new, no_plan) == "pass-q"
    fewer = PaperRule(AttentionShape(32, 2, 64), 2, 1e15, 1e9)
    assert fewer.choose(held, new, no_plan) == "pass-kv"


def test_the_empirical_form_is_found_again() -> None:
    truth = EmpiricalRule(0.3, 0.1, -1.9)
    new = np.array([100.0, 400, 1600, 6400, 25600])
    cached = np.array([3000.0, 90000, 0, 20000, 1000])
    ratio = np.exp(0.3 * np.log(new) + 0.1 * np.log(new / (new + cached)) - 1.9)
    found = EmpiricalRule.fitted(new, cached, np.ones(5), ratio)
    assert (found.of_new, found.of_share, found.constant) == pytest.approx((0.3, 0.1, -1.9))
    for n, c, r in zip(new, cached, ratio, strict=True):
        expected = "pass-kv" if r > 1 else "pass-q"
        assert found.of_tokens(int(n), int(c)) == truth.of_tokens(int(n), int(c)) == expected


def test_the_published_coefficients_tell_no_rows_apart() -> None:
    """At 2.5, 5 and 10% of 128,000 tokens, where the paper measured both winners."""
    published = EmpiricalRule(-1.059, 1.145, 12.112)
    for base in (1.0, np.log(2), np.log(10)):
        scaled = EmpiricalRule(published.of_new / base, published.of_share / base, 12.112)
        assert len({scaled.of_tokens(new, 128000 - new) for new in (3200, 6400, 12800)}) == 1
