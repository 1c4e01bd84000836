"""The order of events as a value, and what follows it."""

from __future__ import annotations

import itertools

import pytest

from distca.runtime import EventCursor
from distca.schedule.program import Event, LayerGroup, Program, layer_groups, tick_program

SHORT = {"dispatch": "d", "compute": "c", "combine": "m", "prefetch": "a"}


def shown(program: Program) -> str:
    """Events as letters: step, ping (p) or pong (q), layer; capital letters go back."""
    words = [f"{SHORT[step]}{'pq'[nano]}{layer}" for _, step, nano, layer in program]
    back = [event.direction == "backward" for event in program]
    return " ".join(word.upper() if b else word for word, b in zip(words, back, strict=True))


def whole(layers: int) -> list[LayerGroup]:
    return [LayerGroup(range(layers), recomputed=False)]


@pytest.mark.parametrize(
    ("at_home", "there", "back"),
    [
        (
            False,
            "dp0 dq0 cp0 cq0 mp0 dp1 mq0 dq1 cp1 cq1 mp1 mq1",
            "DQ1 DP1 CQ1 CP1 MQ1 DQ0 MP1 DP0 CQ0 CP0 MQ0 MP0",
        ),
        (
            True,
            "dp0 dq0 cp0 mp0 dp1 cq0 mq0 dq1 cp1 mp1 cq1 mq1 AQ1 AP1",
            "DQ1 CQ1 AQ0 DP1 CP1 AP0 MQ1 DQ0 CQ0 MP1 DP0 CP0 MQ0 MP0",
        ),
    ],
    ids=["outputs return", "queries at home"],
)
def test_two_nano_batches_through_two_layers(at_home: bool, there: str, back: str) -> None:
    assert shown(tick_program("forward", whole(2), 2, at_home)) == there
    assert shown(tick_program("backward", whole(2), 2, at_home)) == back


def test_a_whole_micro_batch() -> None:
    for at_home in (False, True):
        assert shown(tick_program("forward", whole(2), 1, at_home)) == "dp0 cp0 mp0 dp1 cp1 mp1"
    assert shown(tick_program("backward", whole(2), 1, False)) == "DP1 CP1 MP1 DP0 CP0 MP0"
    # Nothing hides what the last layer would send ahead; its kernels hide that of the next.
    assert shown(tick_program("backward", whole(2), 1, True)) == "DP1 CP1 AP0 MP1 DP0 CP0 MP0"


def test_nothing_is_sent_ahead_for_a_pass_that_does_not_come() -> None:
    program = tick_program("forward", whole(3), 2, at_home=True, goes_back=False)
    assert {event.direction for event in program} == {"forward"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((None, None, None), "B3 B2 B1 B0"),
        (("selective", None, None), "B3 B2 B1 B0"),
        (("full", "uniform", 2), "f2 f3 B3 B2 f0 f1 B1 B0"),
        (("full", "uniform", 3), "f3 B3 f0 f1 f2 B2 B1 B0"),
        (("full", "block", 1), "B3 B2 B1 f0 B0"),
        (("full", "block", 9), "f3 B3 f2 B2 f1 B1 f0 B0"),
    ],
)
def test_recomputed_layers_run_before_they_go_back(
    flags: tuple[str | None, str | None, int | None], expected: str
) -> None:
    groups = layer_groups(4, *flags)
    program = tick_program("backward", groups, 1, at_home=False)
    computed = [event for event in program if event.step == "compute"]
    found = [f"{'B' if d == 'backward' else 'f'}{layer}" for d, _, _, layer in computed]
    assert " ".join(found) == expected
    forward = tick_program("forward", groups, 1, at_home=False)
    assert [event.layer for event in forward if event.step == "compute"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "flags", [(None, None, None), ("full", "uniform", 2), ("full", "block", 3)]
)
@pytest.mark.parametrize("at_home", [False, True])
@pytest.mark.parametrize("nano_batches", [1, 2])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_every_program_can_be_run(
    layers: int,
    nano_batches: int,
    at_home: bool,
    flags: tuple[str | None, str | None, int | None],
) -> None:
    """Each call starts, computes and finishes once, in this order, one layer of a nano-batch at a
    time; what is sent ahead is so once, before the start that it is for, when the channel is free.
    """
    groups = layer_groups(layers, *flags)
    there = tick_program("forward", groups, nano_batches, at_home)
    program = there + tick_program("backward", groups, nano_batches, at_home)
    for nano in range(nano_batches):
        mine = [event for event in program if event.nano_batch == nano]
        steps = [event for event in mine if event.step != "prefetch"]
        for start, compute, finish in zip(*[iter(steps)] * 3, strict=True):
            assert [e.step for e in (start, compute, finish)] == ["dispatch", "compute", "combine"]
            assert len({(e.direction, e.layer) for e in (start, compute, finish)}) == 1
        backward = [e.layer for e in steps if e[:2] == ("backward", "dispatch")]
        assert backward == list(reversed(range(layers)))
        for number, event in enumerate(mine):
            if event.step == "prefetch":
                # The rows of the dispatch before have been read, and the next one is its own.
                before = [e for e in mine[:number] if e.step in ("dispatch", "compute")]
                assert before[-1].step == "compute"
                after = next(e for e in mine[number + 1 :] if e.step in ("dispatch", "prefetch"))
                assert after[1:] == ("dispatch", nano, event.layer)
    ahead = [event[2:] for event in program if event.step == "prefetch"]
    assert len(set(ahead)) == len(ahead)
    assert bool(ahead) <= at_home


class Recorded:
    """A call that notes when it sends ahead."""

    def __init__(self) -> None:
        self.sent = 0

    def prefetch(self) -> None:
        self.sent += 1


def test_a_run_holds_everybody_to_their_turn() -> None:
    run = EventCursor([], tick_program("forward", whole(1), 2, at_home=True))
    with pytest.raises(AssertionError, match="before the turn of"):
        run.take_turn("forward", "dispatch", 1)
    start = run.take_turn("forward", "dispatch", 0)
    assert start == Event("forward", "dispatch", 0, 0)
    with pytest.raises(AssertionError, match="forward compute in the turn"):
        run.take_turn("forward", "compute", 1)


def test_calls_are_sent_ahead_by_those_that_wait_for_their_way_back() -> None:
    run = EventCursor([], tick_program("forward", whole(1), 2, at_home=True))
    calls = [Recorded(), Recorded()]
    run.prefetch()
    while (event := run.next_event) is not None and event.step != "prefetch":
        run.take_turn(*event[:3])
        run.register_backward(event, calls[event.nano_batch])
    assert [call.sent for call in calls] == [0, 0]
    run.prefetch()
    assert [call.sent for call in calls] == [1, 1]
    with pytest.raises(AssertionError, match="after the program's end"):
        run.take_turn("backward", "dispatch", 0)
    run.begin([], tick_program("backward", whole(1), 2, at_home=True))
    assert run.next_event == Event("backward", "dispatch", 1, 0)


def test_give_way_lets_the_other_go_on() -> None:
    run = EventCursor([], tick_program("forward", whole(1), 2, at_home=False))
    turns = itertools.count()

    def other() -> None:
        next(turns)
        run.take_turn(*run.next_event[:3])  # type: ignore[index]

    run.give_way = other
    run.take_turn("forward", "dispatch", 0)
    # Pong starts meanwhile.
    run.take_turn("forward", "compute", 0)
    assert next(turns) == 1
