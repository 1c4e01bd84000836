"""The choice of tokens, number by number."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from distca.inference.sampling import (
    Penalties,
    SamplingParams,
    TokenLogprobs,
    UnusableLogitsError,
)


@pytest.mark.parametrize(
    ("penalties", "expected"),
    [
        # Tokens 0 to 3 were seen: above 0 they are divided, below multiplied.
        (Penalties(repetition=2.0), [0.25, -1.0, 1.5, -6.0, 0.75, -0.75]),
        # The answer has token 2 once, and token 3 twice.
        (Penalties(presence=0.5), [0.5, -0.5, 2.5, -3.5, 0.75, -0.75]),
        (Penalties(frequency=0.5), [0.5, -0.5, 2.5, -4.0, 0.75, -0.75]),
        (Penalties(presence=1.0, frequency=0.25), [0.5, -0.5, 1.75, -4.5, 0.75, -0.75]),
        (Penalties(bias=((1, 2.0), (4, -1.0))), [0.5, 1.5, 3.0, -3.0, -0.25, -0.75]),
        (Penalties(fewest=4, stops=frozenset({0, 5})), [-math.inf, -0.5, 3, -3, 0.75, -math.inf]),
        (Penalties(fewest=3, stops=frozenset({0, 5})), [0.5, -0.5, 3.0, -3.0, 0.75, -0.75]),
    ],
)
def test_penalties_change_logits_as_they_say(penalties: Penalties, expected: list[float]) -> None:
    logits = torch.tensor([0.5, -0.5, 3.0, -3.0, 0.75, -0.75])
    before = logits.clone()
    found = penalties.apply(logits, [0, 1, 1], [2, 3, 3])
    assert found.tolist() == expected
    assert torch.equal(logits, before)


def test_an_answer_without_tokens_is_not_penalised_for_them() -> None:
    logits = torch.tensor([1.0, 2.0])
    penalties = Penalties(presence=1.0, frequency=1.0)
    assert penalties.apply(logits, [0, 1], []).tolist() == [1.0, 2.0]
    assert Penalties().apply(logits, [0], [1]) is logits


PROBABILITIES = [0.4, 0.3, 0.15, 0.1, 0.05]


@pytest.mark.parametrize(
    ("sampling", "drawn"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
        # The token that reaches the sum counts, and one that comes behind it does not.
        ({"top_p": 0.35}, {0}),
        ({"top_p": 0.65}, {0, 1}),
        ({"top_p": 0.75}, {0, 1, 2}),
        # Of the three likeliest, the first two have 0.82.
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),
        ({"top_k": 3, "top_p": 0.85}, {0, 1, 2}),
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"min_p": 0.5}, {0, 1}),
        # Twice as hot, probabilities are closer to each other: 0.4 to 0.1 becomes 2 to 1.
        ({"min_p": 0.45, "temperature": 2.0}, {0, 1, 2, 3}),
    ],
)
def test_tokens_are_drawn_from_those_that_are_left(sampling: dict, drawn: set[int]) -> None:
    """In any order of the vocabulary."""
    order = [3, 0, 4, 1, 2]
    logits = torch.tensor(PROBABILITIES).log()[order] + 7.0
    params = SamplingParams(**{"temperature": 1.0, "seed": 3} | sampling)
    counts = Counter(order[params.choose(logits, 0, position)] for position in range(400))
    assert {*counts} == drawn
    if not sampling:
        for token, probability in enumerate(PROBABILITIES):
            assert counts[token] == pytest.approx(400 * probability, abs=30)


def test_a_draw_depends_on_seed_sequence_and_position_alone() -> None:
    logits = torch.zeros(50)

    def drawn(seed: int, sequence: int) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed)
        return [params.choose(logits, sequence, position) for position in range(8)]

    assert drawn(0, 0) == drawn(0, 0)
    assert len({tuple(drawn(*each)) for each in ((0, 0), (1, 0), (0, 1))}) == 3
    assert len({*drawn(0, 0)}) > 1


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ([1.0, math.nan], "NaN"),
        ([1.0, math.inf], "infinite"),
        ([-math.inf, -math.inf], "all minus infinity"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_by_which_nothing_can_be_chosen_are_named(
    values: list[float], what: str, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature)
    with pytest.raises(UnusableLogitsError, match=f"the logits are {what}"):
        params.choose(torch.tensor(values), 0, 0)
    assert params.choose(torch.tensor([-math.inf, 0.0]), 0, 0) == 1


def test_log_probabilities_are_those_of_the_likeliest() -> None:
    logits = torch.tensor(PROBABILITIES).log() + 2.0
    found = TokenLogprobs.of(logits, 3, 2)
    assert found.token == pytest.approx(math.log(0.1), abs=1e-6)
    assert [token for token, _ in found.top] == [0, 1]
    assert [value for _, value in found.top] == pytest.approx([math.log(0.4), math.log(0.3)])
    assert len(TokenLogprobs.of(logits, 0, 9).top) == 5
    assert TokenLogprobs.of(logits, 0, 0).top == ()
    with pytest.raises(UnusableLogitsError, match="NaN"):
        TokenLogprobs.of(torch.tensor([1.0, math.nan]), 0, 1)
    # One that was masked is as unlikely as can be.
    assert TokenLogprobs.of(torch.tensor([0.0, -math.inf]), 1, 1).token == -math.inf


def test_stops_are_a_set() -> None:
    with pytest.raises(ValueError, match="stops is 5: give a set of tokens"):
        SamplingParams(stops=5)  # type: ignore[arg-type]
