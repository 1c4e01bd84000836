"""Models of transformers where a rank has no tokens: it computes a row that counts for nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.few_tokens import GIVEN, train_alone, train_few_tokens

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("family", "checkpointing", "compiled"),
    [("llama", True, False), ("llama", False, True), ("gpt_oss", False, False)],
)
def test_ranks_without_tokens_train(
    ranks: Any, family: str, checkpointing: bool, compiled: bool
) -> None:
    expected = train_alone(family)
    given = family, checkpointing, compiled
    of_ranks = ranks.run(train_few_tokens, *given, world_size=3, timeout=200)
    for found in of_ranks:
        for (loss, gradients, _), (known, of_known) in zip(found, expected, strict=True):
            assert loss == pytest.approx(known, rel=1e-6)
            torch.testing.assert_close(gradients, of_known, atol=1e-6, rtol=1e-5)
    tokens = [sorted(rank[n][2][0] for rank in of_ranks) for n in range(len(GIVEN))]
    assert tokens == [[0, 0, 1], [0, 1, 1], [0, 1, 1]]
    # `gather` takes the rows that the model has, and leaves the one that is no token out.
    assert [[rank[n][2][1] for rank in of_ranks] for n in range(len(GIVEN))] == [
        [1] * 3,
        [2] * 3,
        [2] * 3,
    ]
