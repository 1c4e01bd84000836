"""Mistakes with rollouts: each is refused with what to do, on all ranks, before wrong numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from distca.library import Document, Rollout, Tree, share_prefixes
from distca.library.share import as_documents, split_packed
from support.library_loops import VOCABULARY
from support.refused_rollouts import (
    beyond_memory,
    beyond_vocabulary,
    mistakes_of_one_rank,
    with_other_attention,
)

pytest.importorskip("transformers")


def test_models_with_another_attention_refuse_batches(ranks: Any) -> None:
    """A model that is made of the policy's config changes the policy's attention, too."""
    for found in ranks.run(with_other_attention, world_size=2):
        assert found.pop("policy") == "no error"
        assert found.pop("has a shape") == "False"
        assert "attention_mask of inputs_of is no tensor, and has no" in found.pop("shape")
        assert "values are given for" in found.pop("logits of tokens")
        assert "trained, but the logits are of 5 tokens" in found.pop("vocabulary")
        for name in ("whole values", "rows of values"):
            assert "give floating-point numbers of one dimension" in found.pop(name)
        assert len(found) == 10
        for name, message in found.items():
            assert 'attn_implementation="distca"' in message, (name, message)


TOKENS, ONES, EDGES = torch.arange(4), torch.ones(3), torch.tensor([0, 2, 4])
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "ignored token": (lambda: tree(torch.tensor([1, -100, 5, 6])), "node 0 has a negative token"),
    "negative token": (lambda: tree(torch.tensor([1, -2, 5, 6])), "node 0 has a negative token"),
    "rollout -3": (
        lambda: tree(TOKENS, number=-3),
        "is -3: give a whole number",
    ),
    "rollout 1.5": (lambda: tree(TOKENS, number=1.5), "number is 1.5: give a whole number"),
    "weight nan": (
        lambda: tree(TOKENS, ONES * torch.nan),
        "rollout 0 has a weight that is not",
    ),
    "gradients": (lambda: Rollout(TOKENS, torch.ones(4).requires_grad_()), "give weights.detach"),
    "of a tree": (lambda: tree(TOKENS, ONES.clone().requires_grad_()), "give weights.detach"),
    "no rollouts": (lambda: share_prefixes(None), "a NoneType is given: give a list of rollouts"),  # type: ignore[arg-type]
    "a rollout": (lambda: share_prefixes(Rollout(TOKENS)), "a Rollout is given: give a list"),  # type: ignore[arg-type]
    "least text": (lambda: share_prefixes([], "5"), "least is '5': give a whole number"),  # type: ignore[arg-type]
    "least None": (lambda: share_prefixes([], None), "least is None: give a whole number"),  # type: ignore[arg-type]
    "least nan": (lambda: share_prefixes([], math.nan), "least is nan: give a whole number"),  # type: ignore[arg-type]
    "first text": (lambda: share_prefixes([], 1, "a"), "first is 'a': give a whole number"),  # type: ignore[arg-type]
    "first 1.5": (lambda: share_prefixes([], 1, 1.5), "first is 1.5: give a whole number"),  # type: ignore[arg-type]
    "first too large": (lambda: share_prefixes([Rollout(TOKENS)], 1, 2**63 - 1), "at most 9,223"),
    "no documents": (lambda: as_documents(None), "a NoneType is given: give a list of documents"),  # type: ignore[arg-type]
    "few weights": (lambda: split_packed(TOKENS, EDGES, ONES), "3 weights are given for 4 tokens"),
    "weight list": (lambda: split_packed(TOKENS, EDGES, [1.0] * 4), "weights are a list: give a t"),  # type: ignore[arg-type]
    "packed floats": (lambda: split_packed(TOKENS + 0.7, EDGES), "tokens are torch.float32: give"),
    "float edges": (lambda: split_packed(TOKENS, EDGES / 1), "cu_seqlens are torch.float32: give"),
    "packed list": (lambda: split_packed([1, 2], EDGES), "tokens are a list: give a tensor of int"),  # type: ignore[arg-type]
    "edge list": (lambda: split_packed(TOKENS, [0, 4]), "cu_seqlens are a list: give a tensor of"),  # type: ignore[arg-type]
    "no tokens": (lambda: Document(None), "tokens are a NoneType: give a tensor"),  # type: ignore[arg-type]
}


def tree(tokens: torch.Tensor, weights: torch.Tensor = ONES, number: Any = 0) -> Tree:
    return Tree((tokens,), (-1,), (number,), (0,), (weights,))


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_value_are_refused(name: str) -> None:
    mistake, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        mistake()


def test_whole_numbers_of_numpy_and_generators_are_taken() -> None:
    rollouts = [Rollout(torch.tensor([1, 2, n])) for n in range(3)]
    (found,) = share_prefixes((each for each in rollouts), np.int64(2), np.int64(5))  # type: ignore[arg-type]
    assert found.rollouts == (5, 6, 7)
    assert len(as_documents(TOKENS + n for n in range(3))) == 3  # type: ignore[arg-type]


def test_little_memory_refuses_all_micro_batches_alike(ranks: Any) -> None:
    for found in ranks.run(beyond_memory, world_size=2):
        for name in ("a document", "equal rollouts", "rollouts that share nothing"):
            message = found.pop(name)
            assert re.search(r"needs [\d,]+ bytes of .*, which has 1,000 bytes\.", message), message
            assert " branches" not in message
        for name, message in found.items():
            assert f"memory_bytes is {name!r}" in message or f"memory_bytes is {name}:" in message


OF_ONE_RANK = {
    "empty": "there are no documents",
    "None": "a NoneType is given: give a list of documents",
    "infinity": "add up to infinity",
    "shared None": "rank 1: a NoneType is given: give a list of documents",
    "shared, None inside": "rank 1: a document's tokens are a NoneType: give a tensor",
    "empty after trees": "there are no documents",
}


def test_what_one_rank_cannot_place_is_refused_on_all(ranks: Any) -> None:
    """Otherwise the others wait until their timeout."""
    first, second = ranks.run(mistakes_of_one_rank, world_size=2, timeout=60)
    for name, message in OF_ONE_RANK.items():
        assert message in second[name]
        other = message if name.startswith("shared") else "rank 1 cannot place its documents, and"
        assert other in first[name]
    assert first["after all"] == second["after all"] == "no error"


def test_tokens_beyond_the_vocabulary_are_refused(ranks: Any) -> None:
    """A GPU ends with an assertion of the embedding otherwise."""
    for good, last, *wrong in ranks.run(beyond_vocabulary, world_size=1):
        assert good == last == "no error"
        for number, message in zip((VOCABULARY, VOCABULARY, -9, VOCABULARY), wrong, strict=True):
            assert f"token {number} is not one of the model's {VOCABULARY}: use its" in message
