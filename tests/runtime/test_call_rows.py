"""Kernel calls take the rows of their tasks, wherever these lie, in few copies."""

from __future__ import annotations

import numpy as np
import pytest

from distca.cost import rows as cost_rows
from distca.cost.rows import CallRowCounts
from distca.runtime.exchange import Gather, GatherBoth, Piece, Pieces, find_call_rows
from support.served_rows import taken_rows


@pytest.mark.parametrize("piece_rows", [1, 4, 512])
def test_rows_are_those_of_the_tasks(piece_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random spans of local and received rows, also of none, also repeated."""
    monkeypatch.setattr(cost_rows, "PIECE_ROWS", piece_rows)
    rng, kinds = np.random.default_rng(piece_rows), set()
    for _ in range(400):
        local, received = (int(rng.integers(0, 40)) for _ in range(2))
        served = [np.zeros(0, dtype=np.int64)]
        for _ in range(int(rng.integers(0, 30)) if local + received else 0):
            begin = int(rng.integers(0, local + received))
            served.append(np.arange(begin, min(begin + rng.integers(1, 20), local + received)))
        rows = np.concatenate(served)
        found = find_call_rows(rows, local)
        kinds.add(type(found))
        assert taken_rows(found, local, received).tolist() == rows.tolist()
    assert kinds == {Piece, Gather, GatherBoth} | ({Pieces} if piece_rows < 512 else set())


def test_what_is_copied_is_counted() -> None:
    """Indices and rows by `distca.cost.rows` are those of the runtime."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        local, longest = 3000, int(rng.choice([30, 2000]))
        begins = rng.integers(0, 6000, int(rng.integers(1, 30)))
        rows = np.concatenate(
            [np.arange(at, min(at + rng.integers(1, longest), 6000)) for at in begins]
        )
        received = rows >= local
        pieces = 1 + np.sum((np.diff(rows) != 1) | np.diff(received))
        counted = CallRowCounts(*(np.array([each]) for each in (len(rows), received.sum(), pieces)))
        found, overwritten, indices = find_call_rows(rows, local), 0, 0
        if isinstance(found, GatherBoth):
            overwritten = len(found.places)
            indices = 2 * len(found.most.rows) + len(found.others.rows) + overwritten
        elif isinstance(found, Gather):
            indices = len(found.rows)
        elif isinstance(found, Pieces):
            assert len(found.pieces) == pieces <= cost_rows.MOST_PIECES
            indices = len(found.served)
        assert counted.overwritten.tolist() == [overwritten]
        assert counted.indices.tolist() == [indices]
        assert counted.taken.tolist() == [0 if isinstance(found, Piece) else len(rows)]


def test_long_pieces_need_no_index() -> None:
    """Served rows that follow each other from one memory to the other are two pieces."""
    assert find_call_rows(np.arange(10, 90), 100) == Piece(False, slice(10, 90))
    assert find_call_rows(np.arange(100, 190), 100) == Piece(True, slice(0, 90))
    across = find_call_rows(np.arange(2000), 1000)
    assert isinstance(across, Pieces)
    assert across.pieces == (Piece(False, slice(0, 1000)), Piece(True, slice(0, 1000)))
    assert find_call_rows(np.arange(0), 5) == Piece(False, slice(0, 0))
