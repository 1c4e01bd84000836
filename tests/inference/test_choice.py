"""Tokens of many sequences are chosen at once, as each would be alone."""

from __future__ import annotations

import torch

from distca.inference import worker
from distca.inference.messages import AddRequest, Admitted
from distca.inference.sampling import NextLogits, Penalties, SamplingParams
from distca.inference.worker import choose_tokens
from distca.schedule.serving.request import Request


def choice_of(
    number: int,
    logits: list[float],
    sampling: SamplingParams = SamplingParams(),  # noqa: B008
    penalties: Penalties = Penalties(),  # noqa: B008
    logprobs: int | None = None,
) -> tuple[Admitted, list[float]]:
    asked = AddRequest(number, [1, 2], sampling, penalties, logprobs)
    request = Request(number, asked.tokens, sampling.max_tokens)
    request.tokens.append(0)
    return Admitted(asked, request), logits


CASES = [
    choice_of(3, [0.0, 2.0, 1.0]),
    choice_of(1, [0.0, torch.nan, 1.0]),
    # The answer has token 0.
    choice_of(4, [3.0, 2.0, 1.0], penalties=Penalties(presence=2.0)),
    choice_of(5, [0.0, 1.0, 0.5], SamplingParams(temperature=1.0, seed=8)),
    # Of equals the first.
    choice_of(7, [5.0, 5.0, 5.0]),
    choice_of(8, [1.0, 2.0, 7.0], logprobs=1),
    choice_of(9, [-torch.inf] * 3),
    choice_of(0, [-torch.inf, -1.0, -2.0]),
]
CHOICES = [choice for choice, _ in CASES]
NUMBERS = [each.asked.number for each in CHOICES]
LOGITS = NextLogits(NUMBERS, torch.tensor([logits for _, logits in CASES]))


def test_all_together_and_each_alone() -> None:
    found = choose_tokens(CHOICES, LOGITS)
    assert [each.number for each in found] == [3, 1, 4, 5, 7, 8, 9, 0]
    assert [each.token for each in found if each.number != 5] == [1, -1, 1, 0, 2, -1, 1]
    failed = {each.number: each.failed for each in found if each.failed is not None}
    assert failed.keys() == {1, 9}
    assert "the logits are NaN" in failed[1]
    assert "all minus infinity" in failed[9]
    assert [each.number for each in found if each.logprobs is not None] == [8]
    for together, each in zip(found, CHOICES, strict=True):
        assert choose_tokens([each], LOGITS) == [together]
    assert choose_tokens([], LOGITS) == []


def test_logits_of_all_are_not_copied() -> None:
    order, rows = LOGITS.together(NUMBERS)
    assert order == NUMBERS
    assert rows.data_ptr() == LOGITS[NUMBERS[0]].data_ptr()
    order, rows = LOGITS.together({4, 3})
    assert order == [3, 4]
    assert torch.equal(rows, torch.stack([LOGITS[3], LOGITS[4]]))


def test_the_likeliest_are_taken_in_one_go(monkeypatch) -> None:
    calls = []
    take = worker.take_likeliest
    monkeypatch.setattr(
        worker, "take_likeliest", lambda rows: calls.append(len(rows)) or take(rows)
    )
    choose_tokens(CHOICES, LOGITS)
    assert calls == [5]
