"""Conversations as trees: what a stream reads of them, against the conversations one by one."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.documents.conversations import Conversations
from distca.plan.span import Int64s
from distca.schedule import DocumentTrees
from megatron_patches.batches.blends import Blend
from megatron_patches.batches.shared_conversations import SharedConversations
from megatron_patches.batches.stream import TokenStream

Lines = list[tuple[list[int], list[bool], float]]
Predictions = dict[tuple[tuple[int, ...], int], float]


def conversations(lines: Lines) -> Conversations:
    lengths = [len(tokens) for tokens, _, _ in lines]
    return Conversations(
        "t.jsonl",
        np.arange(1, len(lines) + 1),
        np.concatenate([[0], np.cumsum(lengths)]),
        np.concatenate([np.array(tokens, dtype=np.int32) for tokens, _, _ in lines]),
        np.concatenate([np.array(counts, dtype=bool) for _, counts, _ in lines]),
        np.array([weight for _, _, weight in lines]),
    )


@st.composite
def some_lines(draw: st.DrawFn) -> Lines:
    """Conversations of few different tokens. Most begin as an earlier one does."""
    lines: Lines = []
    for _ in range(draw(st.integers(1, 8))):
        tokens: list[int] = []
        if lines and draw(st.integers(0, 3)):
            earlier, _, _ = draw(st.sampled_from(lines))
            tokens = earlier[: draw(st.integers(0, len(earlier)))]
        tokens = tokens + draw(st.lists(st.integers(0, 2), min_size=not tokens, max_size=6))
        counts = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
        lines.append((tokens, counts, draw(st.sampled_from([0.0, 0.25, 1.0, 2.5]))))
    return lines


def one_by_one(lines: Lines) -> tuple[Predictions, int]:
    """The weight with which each token is predicted from each sequence before it, and how many
    predictions count."""
    found: Predictions = defaultdict(float)
    targets = 0
    for tokens, counts, weight in lines:
        for at in range(1, len(tokens)):
            if counts[at] and weight:
                found[tuple(tokens[:at]), tokens[at]] += weight
                targets += 1
    return found, targets


def path(trees: DocumentTrees, node: int, place: int, tokens: Int64s) -> tuple[int, ...]:
    """The tokens of a node's path up to a place of its document."""
    parent = int(trees.numbered_parents[node])
    first = int(trees.offsets[node])
    own = tuple(tokens[first : min(place + 1, first + int(trees.own_lengths[node]))].tolist())
    return own if parent < 0 else path(trees, parent, place, tokens) + own


def of_stream(source: SharedConversations, whole: int) -> tuple[Predictions, int]:
    """The same, as a stream reads it, with what the nodes say that tokens see."""
    blend = Blend(("t.jsonl",), None, None)
    stream = TokenStream.open(
        blend,
        "train",
        seed=0,
        num_tokens=None,
        max_document_length=whole,
        whole=True,
        open_source=lambda name: source,
    )
    assert stream.shares_tokens
    tokens, labels, weights = stream.read(0, stream.tokens)
    trees = stream.trees(0, stream.tokens)
    lengths = stream.document_lengths(0, stream.tokens)
    own = np.bincount(trees.document, weights=trees.own_lengths, minlength=len(lengths))
    assert own.tolist() == lengths.tolist()
    found: Predictions = defaultdict(float)
    starts = np.cumsum(lengths) - lengths
    for node, (document, offset) in enumerate(zip(trees.document, trees.offsets, strict=True)):
        start = int(starts[document])
        of_document = tokens[start : start + int(lengths[document])]
        for place in range(int(offset), int(offset + trees.own_lengths[node])):
            weight = float(weights[start + place])
            if weight:
                before = path(trees, node, place, of_document)
                assert len(before) == trees.prefix[node] + place - offset + 1
                found[before, int(labels[start + place])] += weight
    halves = np.array_split(np.arange(stream.tokens), 2)
    return found, sum(stream.targets(each) for each in halves if len(each))


@settings(max_examples=400)
@given(some_lines(), st.integers(1, 4), st.integers(0, 40))
def test_each_prediction_is_there_as_often_as_one_by_one(lines, least: int, more: int) -> None:
    most = max(len(tokens) for tokens, _, _ in lines) + more
    source = SharedConversations(conversations(lines), most, least)
    assert source.lengths.max() <= most
    assert of_stream(source, most) == one_by_one(lines)


def test_what_is_shared_is_held_once() -> None:
    prompt, answers = list(range(200)), [list(range(k, k + 50)) for k in (300, 400, 500)]
    lines = [(prompt + each, [False] * 200 + [True] * 50, 1.0) for each in answers]
    source = SharedConversations(conversations(lines), 1000)
    # The last token of the prompt is there for each answer.
    assert source.lengths.tolist() == [199 + 3 * 51]
    assert [each.tolist() for each in source.tree(0)] == [[199, 51, 51, 51], [-1, 0, 0, 0]]
    assert source.saved == pytest.approx(750 / 352)
    assert source.place(0) == "t.jsonl, line 1: a conversation"
    # Two have room.
    two = SharedConversations(conversations(lines), 310)
    assert two.lengths.tolist() == [199 + 2 * 51, 250]
    assert two.place(1) == "t.jsonl, line 3: a conversation"


def test_fewer_tokens_than_a_block_are_not_shared() -> None:
    lines = [([1] * 100 + [k] * 10, [True] * 110, 1.0) for k in (2, 3)]
    assert SharedConversations(conversations(lines), 1000).lengths.tolist() == [110, 110]
