"""Levels of proximity, and the shares of rows that each keeps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from distca.cost.link import Links
from distca.schedule.serving.csps import Levels, Sparsity, kept_count


def test_levels_are_by_node_and_rack() -> None:
    levels = Levels(Links(ranks_per_node=2, nodes_per_rack=2), 8)
    every = np.arange(8)
    assert levels.of(every, np.zeros_like(every)).tolist() == [0, 1, 2, 2, 3, 3, 3, 3]
    assert levels.of(np.full(8, 5), every).tolist() == [3, 3, 3, 3, 1, 0, 2, 2]
    assert (levels.count, Levels(Links(2), 8).count, Levels(Links(8), 8).count) == (4, 3, 2)
    assert Levels(Links(8), 1).count == 1
    with pytest.raises(ValueError, match="racks of 3 nodes of 2 ranks don't cover 8 ranks: give"):
        Levels(Links(ranks_per_node=2, nodes_per_rack=3), 8)


def test_other_racks_may_be_slower() -> None:
    links = Links(2, 100.0, 10.0, nodes_per_rack=2, rack_gb_per_s=5.0)
    pairs = [links.seconds_per_byte(0, other) for other in (1, 2, 4)]
    assert pairs == pytest.approx([1e-11, 1e-10, 2e-10])
    for wrong in ({"nodes_per_rack": 0}, {"rack_gb_per_s": 0.0}):
        with pytest.raises(ValueError, match=r"at least one node|must be positive"):
            Links(**wrong)  # type: ignore[arg-type]


def test_far_levels_keep_half_as_much_each() -> None:
    sparsity = Sparsity.of_drop_ratio(0.2, layers=4, kv_heads=2)
    assert sparsity.keys[1] == sparsity.keys[2] == ((1.0, 0.8, 0.4, 0.2),) * 2
    assert [sparsity.drops_in(layer) for layer in range(4)] == [False, True, True, False]
    assert sparsity.queries == Sparsity.nothing_dropped(4, 2).queries
    one = Sparsity.nothing_dropped(layers=1, kv_heads=3, levels=2)
    assert (one.layers, one.kv_heads, one.levels, one.drops) == (1, 3, 2, False)
    # The formula itself drops half of level 2 at p = 0.
    assert Sparsity.of_drop_ratio(0.0, 4, 2) == Sparsity.nothing_dropped(4, 2)
    for layers in (1, 2):
        assert Sparsity.of_drop_ratio(0.5, layers, 2) == Sparsity.nothing_dropped(layers, 2)
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="give 0 to below 1"):
            Sparsity.of_drop_ratio(wrong, 4, 2)


def test_counts_are_rounded_up() -> None:
    rows = np.array([0, 1, 3, 10, 30])
    assert kept_count(np.array(0.1), rows).tolist() == [0, 1, 1, 1, 3]
    assert kept_count(np.array(1.0), rows).tolist() == rows.tolist()
    assert kept_count(np.array([[0.8], [0.4]]), np.array([7])).tolist() == [[6], [3]]


def test_files_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "sparsity.json"
    sparsity = Sparsity.of_drop_ratio(0.3, 5, 2, 3, drop_of_queries=0.1)
    sparsity.save(path)
    assert Sparsity.load(path) == sparsity
    saved = json.loads(path.read_text())
    del saved["queries"]
    path.write_text(json.dumps({**saved, "measured_on": "a corpus"}))
    assert Sparsity.load(path) == Sparsity.of_drop_ratio(0.3, 5, 2, 3)
    sparsity.check_fits(5, 2)
    with pytest.raises(ValueError, match="of 5 layers of 2 key-value heads, but the model has 6 "):
        sparsity.check_fits(6, 2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([[[1, 1]], [[1]], [[1, 1]]], "lists of as many layers"),
        ([[[1, 1]], [], [[1, 1]]], "lists of as many layers"),
        ([], "lists of as many layers"),
        ([[[1] * 5]], "1 to 4 levels"),
        ([[[1, 1]], [[0.5, 1]], [[1, 1]]], "level 0, a rank's own keys, keeps all"),
        ([[[1, 0.5]], [[1, 0.5]], [[1, 1]]], "the first and the last layer keep all keys"),
        ([[[1, 1]], [[1, 0]], [[1, 1]]], "above 0 and at most 1"),
        ([[[1, 1]], [[1, 1.5]], [[1, 1]]], "above 0 and at most 1"),
        ([[[1, 1]], [[1, "x"]], [[1, 1]]], "could not convert"),
        ([[[1, 1]], [[1, float("nan")]], [[1, 1]]], "no finite number"),
        ([1], "not iterable"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path: Path, keys: object, message: str) -> None:
    path = tmp_path / "sparsity.json"
    path.write_text(json.dumps({"format": 1, "keys": keys}))
    with pytest.raises(ValueError, match=rf"no usable sparsity \(.*{message}"):
        Sparsity.load(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "sparsity.json"
    with pytest.raises(ValueError, match="does not exist: give a file of ratios"):
        Sparsity.load(path)
    for text in ("", "[]", '{"format": 2}', '{"format": 1}', "\0"):
        path.write_text(text)
        with pytest.raises(ValueError, match="no usable sparsity"):
            Sparsity.load(path)


def test_heads_are_shared_by_tensor_parallel_ranks() -> None:
    """Each head's ratios are its own; what is simulated is the part that others wait for."""
    heads = ((1.0, 0.5), (1.0, 0.9), (1.0, 0.7), (1.0, 0.6))
    all_kept = ((1.0, 1.0),) * 4
    keys = (all_kept, heads, heads[2:] + heads[:2], all_kept)
    sparsity = Sparsity(keys, (all_kept, heads[::-1], all_kept, all_kept))
    assert sparsity.repeated(2) == sparsity.repeated(4) == sparsity
    assert sparsity.repeated(8).keys[1] == tuple(each for each in heads for _ in range(2))
    busiest = sparsity.of_busiest(2)
    assert busiest.keys[1] == busiest.keys[2] == heads[:2]
    assert busiest.queries[1] == heads[:1:-1]
    assert sparsity.of_busiest(4).keys[1] == (heads[1],)
    assert sparsity.of_busiest(1) == sparsity
