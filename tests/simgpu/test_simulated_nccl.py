"""NCCL's rules on simulated GPUs: ranks ask for the same in the same order, or hear who waits."""

from __future__ import annotations

import sys
from pathlib import Path

from support.simgpu.machine import Machine, built_or_skip
from support.simgpu.order import Call, out_of_order

BOTH = (1, 2)


def reduce(group: str, size: int = 8, place: str = "here:1") -> Call:
    return Call(group, BOTH, "allreduce", 0, size, 0, place)


def send(peer: int, batch: int = 0) -> Call:
    return Call("a", BOTH, "send", peer, 8, batch, f"send:{peer}")


def receive(peer: int, batch: int = 0) -> Call:
    return Call("a", BOTH, "recv", peer, 8, batch, f"recv:{peer}")


def test_one_order_is_found_right() -> None:
    calls = [reduce("a"), reduce("b"), reduce("a", 16)]
    assert out_of_order({1: calls, 2: list(calls)}) == []


def test_communicators_in_another_order_are_found() -> None:
    [told] = out_of_order(
        {
            1: [reduce("a", place="first.py:1"), reduce("b")],
            2: [reduce("b", place="second.py:2"), reduce("a")],
        }
    )
    assert "first.py:1" in told
    assert "second.py:2" in told


def test_other_sizes_and_calls_that_are_missing_are_found() -> None:
    assert out_of_order({1: [reduce("a")], 2: [reduce("a", 16)]})
    [told] = out_of_order({1: [reduce("a"), reduce("a")], 2: [reduce("a")]})
    assert told.endswith("asks for nothing more")


def test_two_ranks_that_both_send_first_are_found_unless_grouped() -> None:
    assert out_of_order({1: [send(2), receive(2)], 2: [send(1), receive(1)]})
    assert not out_of_order({1: [send(2), receive(2)], 2: [receive(1), send(1)]})
    assert not out_of_order({1: [send(2, 7), receive(2, 7)], 2: [send(1, 9), receive(1, 9)]})
    assert not out_of_order({1: [send(2, 7), receive(2, 7)], 2: [send(1), receive(1)]})


def test_calls_that_ranks_do_not_share_have_no_order() -> None:
    alone = Call("c", (1, 3), "allreduce", 0, 8, 0, "there:1")
    assert out_of_order({1: [alone, reduce("a")], 2: [reduce("a")], 3: [alone]}) == []


def test_a_deadlock_is_an_error_with_the_places_of_both_sides(tmp_path: Path) -> None:
    built_or_skip()
    command = [sys.executable, "-m", "support.simgpu.stuck"]
    Machine(2).run_ranks([[*command, str(rank), str(tmp_path)] for rank in range(2)], 120)
    for rank in range(2):
        told = (tmp_path / f"rank {rank}").read_text()
        assert "rank 0 waits for allreduce" in told, told
        assert "rank 1 waits for allreduce" in told, told
        lines = Path("tests/support/simgpu/stuck.py").read_text().splitlines()
        waits = [n for n, line in enumerate(lines, 1) if "dist.all_reduce" in line]
        assert all(f"stuck.py:{line}" in told for line in waits), told
