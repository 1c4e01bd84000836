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
    values_of_another_kind,
    with_other_attention,
)

pytest.importorskip("transformers")


def test_models_with_another_attention_refuse_batches(ranks: Any) -> None:
    """A model that is made of the policy's config changes the policy's attention, too."""
    for found in ranks.run(with_other_attention, world_size=2):
        assert found.pop("policy") == "no error"
        assert found.pop("has values") == "False"
        for name, what in (
            ("values", "has no sum"),
            ("slice", "cannot"),
            ("sum", "is no argument"),
        ):
            assert f"attention_mask of inputs_of is no tensor, and {what}" in found.pop(name)
        assert "values are given for" in found.pop("logits of tokens")
        assert "trained, but the logits are of 5 tokens" in found.pop("vocabulary")
        for name in ("whole values", "rows of values"):
            assert "give floating-point numbers of one dimension" in found.pop(name)
        assert "values are a list: give a tensor, one row for each of" in found.pop(
            "list of values"
        )
        for name in ("one value", "one value to sum"):
            assert "values are torch.float32 []: give a tensor, one row for" in found.pop(name)
        assert "logits are a list: give the model's" in found.pop("list of logits")
        assert "logits are torch.int64 [" in found.pop("whole logits")
        assert "give the model's, floating-point numbers [rows, vocab" in found.pop(
            "rows of logits"
        )
        assert len(found) == 10
        for name, message in found.items():
            assert 'attn_implementation="distca"' in message, (name, message)


TOKENS, ONES, EDGES = torch.arange(4), torch.ones(3), torch.tensor([0, 2, 4])
NESTED = torch.nested.nested_tensor([TOKENS[:1], TOKENS[1:]], layout=torch.jagged)
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
    "packed rows": (
        lambda: split_packed(TOKENS.reshape(2, 2), EDGES),
        "tokens are [2, 2]: give al",
    ),
    "packed nested": (lambda: split_packed(NESTED, EDGES), "nested tensor: give its values() and"),
    "packed sparse": (
        lambda: split_packed(TOKENS.to_sparse(), EDGES),
        "sparse tensor: give a dense",
    ),
    "weight rows": (
        lambda: split_packed(TOKENS, EDGES, torch.ones(2, 2)),
        "weights are [2, 2]: give all",
    ),
    "complex weights": (
        lambda: split_packed(TOKENS, EDGES, torch.ones(4, dtype=torch.complex64)),
        "weights are torch.complex64: give real numbers",
    ),
    "tiny weights": (
        lambda: split_packed(TOKENS, EDGES, torch.tensor([0, 1, 1e-300, 0], dtype=torch.float64)),
        "a weight is not 0, but would be in float32",
    ),
    "sparse": (lambda: Rollout(TOKENS.to_sparse()), "are a nested or sparse tensor: give a dense"),
    "nested": (lambda: Rollout(NESTED), "are a nested or sparse tensor: give a dense"),
    "sparse weights": (
        lambda: Rollout(TOKENS, torch.ones(4).to_sparse()),
        "or sparse tensor: give",
    ),
    "no tokens": (lambda: Document(None), "tokens are a NoneType: give a tensor"),  # type: ignore[arg-type]
}


def tree(tokens: torch.Tensor, weights: torch.Tensor = ONES, number: Any = 0) -> Tree:
    return Tree((tokens,), (-1,), (number,), (0,), (weights,))


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_value_are_refused(name: str) -> None:
    mistake, message = MISTAKES[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        mistake()


OF_TREES: dict[str, tuple[dict[str, Any], str]] = {
    "float parent": ({"parents": (-1, 0.0)}, "the parent of node 1 is 0.0: give a whole number"),
    "bool parent": ({"parents": (-1, False)}, "the parent of node 1 is False: give a whole number"),
    "float end": ({"ends": (1.0, 1)}, "the last node of rollout 0 is 1.0: give a whole number"),
    "end text": ({"ends": ("a", 1)}, "the last node of rollout 0 is 'a': give a whole number"),
    "end": ({"ends": (0, 2)}, "rollout 1 ends with node 2, which is not there"),
    "two-way 0": ({"two_way": 0}, "a tree's two_way are a int: give a tuple"),
    "two-way half": ({"two_way": (0.5,)}, "a two-way node is 0.5: give a whole number"),
    "two-way True": ({"two_way": (True,)}, "a two-way node is True: give a whole number"),
    "two-way twice": ({"two_way": (0, 0)}, "two-way node 0 twice: give each number once"),
    "two-way 2": ({"two_way": (2,)}, "node 2 is two-way, but is not there"),
    "no nodes": ({"nodes": None}, "a tree's nodes are a NoneType: give a tuple"),
    "nodes of rows": (
        {"nodes": torch.ones(2, 4).long()},
        "a tree's nodes are a Tensor: give a tup",
    ),
    "rollout twice": ({"rollouts": (0, 0)}, "a tree has rollout 0 twice: give each number once"),
}


GOOD_TREE: dict[str, Any] = {
    "nodes": (TOKENS, TOKENS),
    "parents": (-1, 0),
    "rollouts": (0, 1),
    "ends": (0, 1),
    "last_weights": (ONES * 0, ONES),
}


@pytest.mark.parametrize("name", OF_TREES)
def test_trees_of_other_values_are_refused(name: str) -> None:
    given, message = OF_TREES[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        Tree(**GOOD_TREE | given)


def test_a_tree_keeps_what_a_list_had() -> None:
    """A list may change after it was checked."""
    parents = [-1, 0]
    made = Tree(**GOOD_TREE | {"parents": parents})
    parents[1] = 7
    assert made.parents == (-1, 0)


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


def test_values_of_another_kind_on_one_rank_are_refused_on_all(ranks: Any) -> None:
    first, second = ranks.run(values_of_another_kind, world_size=2)
    float32, bfloat16 = "torch.float32 [rows]", "torch.bfloat16 [rows]"
    expected = {
        "rollouts": f"rank 1 gives gather_rollouts values of {bfloat16}, but rank 0 of {float32}",
        "whole numbers": "rank 1 gives gather_rollouts values of torch.int32 [rows], but rank 0 of",
        "sums": f"rank 1 gives sum_rollouts values of {bfloat16}, but rank 0 of {float32}: give",
        "documents": "values of torch.bfloat16 [rows, 3], but rank 0 of torch.float32 [rows, 3]: g",
        "columns": "gather values of torch.float32 [rows, 2], but rank 0 of torch.float32 [rows, 3",
        "dimensions": "values of torch.float32 [rows], but rank 0 of torch.float32 [rows, 3]: give",
    }
    for name, message in expected.items():
        assert message in first[name]
        assert first.pop(name) == second.pop(name)
    for name in ("fewer", "fewer sums", "fewer rows"):
        assert "values that cannot be used, and says why" in first.pop(name)
        assert "values are given for" in second.pop(name)
    assert first == second == {"after all": "no error"}
