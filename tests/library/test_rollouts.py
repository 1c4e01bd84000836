"""Rollouts that share tokens: computed once on several ranks, as one by one in one process."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from distca.library import Document, Mask, Rollout, Tree, share_prefixes
from distca.library.nodes import Nodes
from distca.library.plans import PlanDocuments
from distca.library.share import as_documents, digest, split_packed
from distca.schedule import ScheduleConfig
from support.rollout_loops import (
    MIXES,
    Trained,
    place_beyond_memory,
    place_both,
    rollouts_of,
    star,
    train_on_trees,
    train_one_by_one,
)

pytest.importorskip("transformers")

PLAN = PlanDocuments("tiles", ScheduleConfig(block=16), (Mask(),), 2)


@cache
def alone(family: str, mix: str, kind: str = "weighted") -> Trained:
    return train_one_by_one(family, mix, kind)


def check(found: list[Trained], expected: Trained, one_mask: bool = True) -> None:
    for rank in found:
        assert rank.bytes_counted or not one_mask
        assert rank.losses == pytest.approx(expected.losses, rel=3e-6, abs=3e-6)
        for mine, theirs in zip(rank.gradients, expected.gradients, strict=True):
            apart = {
                name: float((mine[name] - each).norm() / each.norm().clamp_min(1e-12))
                for name, each in theirs.items()
            }
            assert max(apart.values()) < 1e-5, apart
        for mine, theirs in zip(rank.log_probabilities, expected.log_probabilities, strict=True):
            for each, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(each, other, atol=2e-5, rtol=0)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_trees_are_rollouts_one_by_one(ranks: Any, mix: str, world_size: int) -> None:
    found = ranks.run(train_on_trees, "llama", mix, world_size=world_size, timeout=400)
    check(found, alone("llama", mix))
    for step, rows in enumerate(zip(*(rank.rows for rank in found), strict=True)):
        assert max(rows) - min(rows) <= 1
        one_by_one = sum(len(each.tokens) for each in rollouts_of(mix, step))
        assert sum(rows) < one_by_one / 1.3


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_windows_count_tokens_along_the_path(ranks: Any, family: str) -> None:
    found = ranks.run(train_on_trees, family, "turns", world_size=2, timeout=400)
    check(found, alone(family, "turns"), one_mask=family == "mistral")


@pytest.mark.parametrize(
    ("mix", "kind"), [("star", "clipped"), ("turns", "clipped"), ("pairs", "dpo")]
)
def test_losses_of_each_rollout(ranks: Any, mix: str, kind: str) -> None:
    """A clipped ratio with each one's advantage, and preference pairs."""
    found = ranks.run(train_on_trees, "llama", mix, kind, world_size=2, timeout=400)
    check(found, alone("llama", mix, kind))


def test_recomputed_layers_and_rollouts_of_each_rank(ranks: Any) -> None:
    arguments = "llama", "pairs", "weighted", True, True
    found = ranks.run(train_on_trees, *arguments, world_size=2, timeout=400)
    check(found, alone("llama", "pairs"))


@pytest.mark.parametrize(
    ("family", "mix", "kind"),
    [
        ("llama", "odd", "weighted"),
        ("llama", "long prompt", "weighted"),
        ("gemma2", "star", "clipped"),
    ],
)
def test_logits_of_predictions_alone(ranks: Any, family: str, mix: str, kind: str) -> None:
    """Loss and gradients are the same. A rank whose tokens are all of a prompt has no logits."""
    arguments = family, mix, kind, False, False, True
    found = ranks.run(train_on_trees, *arguments, world_size=3, timeout=400)
    check(found, alone(family, mix, kind), one_mask=family == "llama")
    logits, rows = (np.array([getattr(rank, n) for rank in found]) for n in ("logits", "rows"))
    assert logits.sum() < rows.sum()
    assert (logits == 0).any() == (mix == "long prompt")


def test_documents_and_trees_in_one_batch(ranks: Any) -> None:
    rollouts = star_of(5)
    for found in ranks.run(place_both, world_size=3):
        assert "several next tokens" in found.message
        assert [len(each) for each in found.documents] == [50, *tree_sizes(rollouts), 70]
        for number, each in enumerate(rollouts):
            assert each.weights is not None
            weights = torch.cat([torch.zeros(1), each.weights[1:]])
            # What a document before a tree predicts is not the tree's first token.
            expected = torch.where(weights != 0, each.tokens, 0)
            torch.testing.assert_close(found.predicted[number], expected)
        assert found.rows < found.one_by_one
        assert found.counted == (found.rows, found.one_by_one + 50 + 70)


def test_numbers_begin_where_they_are_told() -> None:
    rollouts = star_of(1)
    trees = share_prefixes(rollouts, 16, first=30)
    assert sorted(n for tree in trees for n in tree.rollouts) == [*range(30, 30 + len(rollouts))]


def test_turns_of_a_conversation_are_one_document_of_plans() -> None:
    """Wherever answers branch off: the child with most rollouts below goes on with its parent."""
    made = torch.Generator().manual_seed(3)
    history, rollouts = torch.randint(9, (40,), generator=made), []
    for _ in range(30):
        for _ in range(2):
            answer = torch.randint(9, (20,), generator=made)
            rollouts.append(Rollout(torch.cat([history, answer])))
        history = torch.cat([history, answer, torch.randint(9, (20,), generator=made)])
    (tree,) = share_prefixes(rollouts, 16)
    paths = Nodes((tree,)).in_plans
    assert len(tree.nodes) > 59
    assert len(paths.lengths) == 31
    assert set(paths.parents.tolist()) == {-1, 0}


def test_packed_sequences_become_rollouts() -> None:
    rollouts = star_of(2)
    sizes = [len(each.tokens) for each in rollouts]
    edges = torch.tensor([0, *sizes]).cumsum(0).int()
    tokens = torch.cat([each.tokens for each in rollouts])[None].int()
    weights = torch.cat([each.weights for each in rollouts if each.weights is not None])
    for mine, other in zip(split_packed(tokens, edges, weights), rollouts, strict=True):
        assert mine.tokens.dtype == torch.int64
        assert torch.equal(mine.tokens, other.tokens)
        assert mine.weights is not None
        assert other.weights is not None
        assert torch.equal(mine.weights, other.weights)
    assert split_packed(tokens, edges)[0].weights is None
    with pytest.raises(ValueError, match=f"the number of tokens, {sum(sizes)}"):
        split_packed(tokens, edges[:-1])
    with pytest.raises(ValueError, match="a sequence has no tokens"):
        split_packed(tokens, torch.cat([edges[:1], edges]))


def star_of(seed: int) -> list[Rollout]:
    return star(torch.Generator().manual_seed(seed))


def tree_sizes(rollouts: list[Rollout]) -> list[int]:
    return [each.tokens for each in share_prefixes(rollouts, 16)]


@pytest.mark.parametrize("least", [1, 2, 3, 8, 1000])
def test_prefixes_are_found(least: int, full: bool) -> None:
    """Every rollout is a path, no token is held twice that may be shared, weights add up."""
    for seed in range(2000 if full else 100):
        random = Random(seed)
        base = [random.randrange(3) for _ in range(30)]
        rollouts = [
            Rollout(torch.tensor([*base[: random.randint(0, 30)], random.randrange(3)]))
            for _ in range(random.randint(1, 12))
        ]
        trees = share_prefixes(rollouts, least)
        assert sorted(n for tree in trees for n in tree.rollouts) == [*range(len(rollouts))]
        for tree in trees:
            parents = set(tree.parents)
            for node in parents - {-1}:
                assert len(tree.nodes[node]) >= least
            for rollout, end in zip(tree.rollouts, tree.ends, strict=True):
                path = torch.cat([tree.nodes[node] for node in tree.path(end)])
                assert path.tolist() == rollouts[rollout].tokens.tolist()
        weights = sum(float(each.sum()) for tree in trees for each in tree.last_weights)
        assert weights == sum(len(each.tokens) - 1 for each in rollouts)
        held = sum(tree.tokens for tree in trees)
        if least == 1:
            prefixes = {tuple(r.tokens[:n].tolist()) for r in rollouts for n in range(1, 32)}
            assert held == len(prefixes)
        else:
            assert held <= weights + len(rollouts)


def test_trees_beyond_a_rank_s_memory_are_named(ranks: Any) -> None:
    for messages in ranks.run(place_beyond_memory, world_size=2):
        assert messages[0] == ""
        assert "which has 4,000,000 bytes. the tree of rollout 5 needs most: ker" in messages[1]
        assert "for its 40 branches" in messages[1]


def test_mistakes_are_refused() -> None:
    tokens, ones = torch.arange(4), torch.ones(4)
    for make, message in (
        (lambda: Rollout(tokens[:0]), "no tokens"),
        (lambda: Rollout(tokens.float()), "int64"),
        (lambda: Rollout([1, 2]), "a list: give a tensor"),  # type: ignore[arg-type]
        (lambda: Rollout(tokens, ones[:2]), "4 tokens, but 2 weights"),
        (lambda: Rollout(tokens, ones.double()), "float32"),
        (lambda: Rollout(tokens, ones * torch.nan), "not finite"),
        (lambda: Rollout(-tokens), "negative token"),
        (lambda: share_prefixes([tokens]), "a Tensor is no rollout"),
        (lambda: share_prefixes([Rollout(tokens)], 0), "at least 1"),
        (lambda: PLAN([]), "no documents"),
        (lambda: PLAN([share_prefixes([Rollout(tokens)])]), "a tuple is given"),
        (lambda: PLAN(share_prefixes([Rollout(tokens)])[0]), "a Tree is given"),
        (
            lambda: PLAN([*share_prefixes([Rollout(tokens)]) * 2]),
            "number 0 in one .* or give the rollouts",
        ),
        (lambda: replace(PLAN, scheduler="greedy")(share_prefixes([Rollout(tokens)])), "tiles"),
        (lambda: Nodes(as_documents([Rollout(tokens, 3e38 * ones)] * 3)).predictions, "infinity"),
        (lambda: Tree((tokens, tokens), (-1, 1), (0,), (1,), (ones,)), "earlier node"),
        (lambda: Tree((tokens, tokens), (-1, -1), (0,), (1,), (ones,)), "earlier node"),
        (lambda: Tree((tokens[:0],), (-1,), (0,), (0,), (ones,)), "has no tokens"),
        (lambda: Tree((tokens,), (-1,), (0,), (1,), (ones,)), "not there"),
        (lambda: Tree((tokens,), (-1,), (0,), (0,), (ones,)), "first token"),
    ):
        with pytest.raises(ValueError, match=message):
            make()  # type: ignore[no-untyped-call]


def test_what_is_compared_between_ranks() -> None:
    """Other numbers, weights or ends are other documents; so is a document with such tokens."""
    rollouts = star_of(2)
    usual = digest(share_prefixes(rollouts, 16))
    assert digest(share_prefixes(star_of(2), 16)) == usual
    first, *others = rollouts
    assert first.weights is not None
    more = Rollout(first.tokens, 2 * first.weights)
    for other in (rollouts[::-1], [more, *others], others):
        assert digest(share_prefixes(other, 16)) != usual
    assert digest(share_prefixes(rollouts, 16, first=5)) != usual
    alone = [Rollout(torch.arange(5))]
    assert digest(as_documents(alone)) != digest(as_documents([torch.arange(5)]))


def test_they_are_sent_to_other_processes_as_arrays() -> None:
    """A tensor takes an open file on the way from a data loader's worker."""
    given = [*star_of(3), Document(torch.arange(9), torch.arange(1, 10))]
    planned = PLAN(given)
    written = pickle.dumps(planned)
    assert b"torch._utils" not in written
    read = pickle.loads(written)
    assert digest(read.documents) == digest(planned.documents)


def test_losses_ignore_tokens_that_nobody_trains() -> None:
    rollouts = star_of(4)
    nodes = Nodes(as_documents(rollouts))
    responses = sum(int((each.weights != 0).sum()) for each in rollouts if each.weights is not None)
    assert nodes.num_trained == responses == len(nodes.predictions[0])
