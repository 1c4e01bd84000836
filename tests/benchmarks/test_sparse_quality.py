"""Needles by distance, and perplexity: what the benchmark of dropped keys' quality computes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.claims import span, stored_json
from benchmarks.pages import RESULTS
from benchmarks.serving import sparse_quality
from benchmarks.serving.recall_model import make_model
from benchmarks.serving.sparse_quality import (
    ASKED,
    PER_NODE,
    RANKS,
    READ,
    TOKENS,
    levels_of,
    measure,
    recalled_share,
    with_needle_at,
)
from distca.cost.link import Links
from distca.inference.models import read_model
from distca.inference.sparsity_calibration import NEEDLE
from distca.runtime.serving.importance import OBSERVERS
from distca.schedule.serving.csps import Levels

LEVELS = Levels(Links(PER_NODE), RANKS)


@pytest.mark.parametrize("distance", [0, 1, 300, 984])
def test_needles_are_as_far_as_they_should_be(distance: int) -> None:
    prompt = [n % 97 for n in range(1000)]
    tokens = with_needle_at(prompt, distance, 3)
    assert len(tokens) == len(prompt)
    needle, end = tokens[-NEEDLE:], len(tokens) - NEEDLE - distance
    assert tokens[end - NEEDLE : end] == needle
    assert len({*needle}) == NEEDLE
    assert [*tokens[: end - NEEDLE], *tokens[end:-NEEDLE]] == prompt[: len(prompt) - 2 * NEEDLE]


def test_a_needle_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="985 tokens back does not fit into 984 tokens"):
        with_needle_at([1] * 1000, 985, 3)


def test_a_needle_alone_has_its_tokens_nowhere_else() -> None:
    prompt = [n % 97 for n in range(1000)]
    usual, alone = (with_needle_at(prompt, 300, 3, each) for each in (False, True))
    needle, place = alone[-NEEDLE:], slice(1000 - 2 * NEEDLE - 300, 1000 - NEEDLE - 300)
    assert (alone[place], usual[-NEEDLE:]) == (needle, needle)
    rest = alone[: place.start] + alone[place.stop : -NEEDLE]
    before = usual[: place.start] + usual[place.stop : -NEEDLE]
    assert not {*rest} & {*needle}
    assert len(rest) == len(before)
    assert all(a == b or b in needle for a, b in zip(rest, before, strict=True))
    assert {*before} & {*needle}


def test_where_needles_lie_on_their_ranks() -> None:
    """Those at 592 and 640 are in one piece of a rank, among its last 64 queries and before."""
    new = LEVELS.shard(np.array([0]), np.array([TOKENS]))
    pieces = {}
    for distance in (592, 640, 960):
        start = TOKENS - 2 * NEEDLE - distance
        (piece,) = np.flatnonzero((new.start <= start) & (start + NEEDLE <= new.end))
        of_rank = np.flatnonzero(new.rank == new.rank[piece])
        last = max(of_rank, key=lambda each: new.end[each])
        pieces[distance] = (int(piece), bool(piece == last and start >= new.end[piece] - OBSERVERS))
    assert pieces[592][0] == pieces[640][0]
    assert [among for _, among in pieces.values()] == [True, False, False]
    assert pieces[960][0] != pieces[640][0]


def test_distances_are_named_by_the_ranks_of_needle_and_question() -> None:
    """A node has 256 of 1,024 tokens; of its two ranks one has the first and the last 64."""
    named = levels_of((0, 40, 60, 170, 200, 300, 900), LEVELS)
    near = ["same rank"] * 2 + ["same node"] * 2 + ["same rank"]
    assert named == [*near, "other node", "other node"]


def test_tokens_are_recalled_that_are_likeliest() -> None:
    tokens = [7, *range(ASKED)]
    logits = torch.nn.functional.one_hot(torch.tensor([*tokens[1:], 0]), 10).float()
    assert recalled_share(logits, tokens) == 1
    logits[1] = -logits[1]
    assert recalled_share(logits, tokens) == pytest.approx(1 - 1 / ASKED)


def test_nothing_dropped_is_the_models_own_perplexity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(sparse_quality, "DROPS", (0.0, 0.8))
    monkeypatch.setattr(sparse_quality, "DISTANCES", (320,))
    plain = make_model().eval()
    plain.save_pretrained(tmp_path)
    text = [(n * n + 3 * n) % 251 for n in range(640)]
    dense, sparse = measure(read_model(str(tmp_path), torch.float32), LEVELS, [text])
    with torch.no_grad():
        logits = plain(torch.tensor([text])).logits[0, -READ - 1 : -1].double()
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(text[-READ:]))
    assert dense.perplexity == pytest.approx(math.exp(float(loss)), rel=1e-5)
    assert (dense.between_nodes, dense.between_ranks) == (1.0, 1.0)
    assert sparse.between_nodes < sparse.between_ranks < 0.7
    assert sparse.perplexity != pytest.approx(dense.perplexity, rel=1e-4)
    # Its circuit finds codes before any training, if their keys are there.
    assert dense.recalled[320] >= sparse.recalled[320]
    assert dense.alone[320] >= dense.recalled[320]


def test_the_index_says_what_the_stored_figures_say() -> None:
    dense, *sparse = stored_json("serving/sparse_quality")
    (a_fifth,) = (each for each in sparse if each["drop"] == 0.2)
    far = [distance for distance in dense["recalled"] if int(distance) > 256]
    before, after = (
        span([each["recalled"][distance] for distance in far], ".0%") for each in (dense, a_fifth)
    )
    longer = a_fifth["perplexity"] / dense["perplexity"]
    assert (
        f"With `--sparsity 0.2` perplexity is {longer:.3f} times as high, and it recalls {after} "
        f"of needles on other nodes ({before} if nothing is dropped): [sparse_quality.md]"
    ) in (RESULTS.parent / "README.md").read_text()
