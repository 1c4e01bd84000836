"""The hand-off's two state machines: small worlds in every order of events, others at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from distca.schedule.serving.handoff import Receiver, Sender, receive, receiver, send, sender
from distca.schedule.serving.handoff.protocol import (
    Abort,
    Beat,
    Begin,
    Cancel,
    Computed,
    Drained,
    Fence,
    Fenced,
    Free,
    Landed,
    Received,
    Send,
    Start,
    Tick,
    Transfer,
    Write,
    Written,
)
from support import handoffs
from support.handoffs import Broken, Scenario, explore, walk

BOTH = ("prefill", "decode")
SMALL = [
    (Scenario(chunks=2, layers=2), 1_000),
    (Scenario(chunks=2, layers=2, cancels=1), 9_000),
    (Scenario(chunks=2, cancels=1, ticks=1, deaths=BOTH), 5_000),
    (Scenario(layers=2, cancels=2, ticks=1), 4_000),
    (Scenario(requests=2, cancels=1, deaths=BOTH), 4_000),
]
LARGER = [(Scenario(chunks=2, cancels=2, ticks=2, deaths=BOTH), 90_000)]


def test_nothing_goes_wrong_in_any_order(full: bool) -> None:
    for scenario, least in SMALL + LARGER * full:
        assert explore(scenario) >= least, scenario


def walks(count: int) -> None:
    for seed in range(count):
        kinds: dict[str, Any] = {"requests": 4, "chunks": 1 + seed % 3, "layers": 2}
        kinds |= {"cancels": seed % 4}
        walk(Scenario(**kinds, ticks=seed % 5, deaths=BOTH if seed % 3 == 0 else ()), seed)


def test_nothing_goes_wrong_at_random(full: bool) -> None:
    walks(20_000 if full else 300)


def drop_a_chunk(state: Sender, event: Any, now: float) -> Any:
    """The prefill side writes the first chunk alone."""
    state, actions = send(state, event, now)
    return state, [each for each in actions if not (isinstance(each, Write) and each.chunk)]


def free_at_once(state: Receiver, event: Any, now: float) -> Any:
    """The decode side frees blocks when it is cancelled, without waiting for `Drained`."""
    state, actions = receive(state, event, now)
    if isinstance(event, Cancel) and actions and isinstance(actions[0], Send):
        state, freed = receiver._free(state, event.transfer, "")
        actions += freed
    return state, actions


MUTANTS: list[tuple[Any, str, Callable[..., Any], str]] = [
    (handoffs, "send", drop_a_chunk, "wait beyond"),
    (receiver, "is_full", lambda known: known.landed[0] == receiver._all_layers(known), "starts"),
    (sender, "is_drained", lambda _: True, "freed"),
    (handoffs, "receive", free_at_once, "landed in blocks"),
    (sender, "_tick", lambda state, _: (state, []), "wait beyond"),
    (receiver, "_tick", lambda state, _: (state, []), "wait beyond"),
]


@pytest.mark.parametrize(("where", "name", "mutant", "told"), MUTANTS)
def test_what_breaks_the_rules_is_caught(where, name, mutant, told, monkeypatch) -> None:
    monkeypatch.setattr(where, name, mutant)
    with pytest.raises(Broken, match=told):
        walks(300)


T = Transfer(3, 1)


def feed(side: str, state: Any, *events: Any, now: float = 0.0) -> tuple[Any, list[Any]]:
    """The state after some events, and the actions of the last one."""
    actions: list[Any] = []
    for event in events:
        state, actions = (send if side == "prefill" else receive)(state, event, now)
    return state, actions


def test_a_request_is_handed_over() -> None:
    begin = Begin(T, chunks=2, layers=2)
    there, _ = feed("decode", Receiver(2.0), begin)
    here, actions = feed("prefill", Sender(2.0), begin)
    assert not actions
    here, actions = feed("prefill", here, Computed(T, 0, 0))
    assert actions == [Write(T, 0, 0)]
    here, actions = feed("prefill", here, Computed(T, 0, 1))
    assert actions == [Write(T, 0, 1)]
    there, actions = feed("decode", there, Landed(T, 0, 1), Landed(T, 0, 0))
    assert actions == [Send(Received(T, 0))]
    here, _ = feed("prefill", here, Received(T, 0))
    there, actions = feed("decode", there, Landed(T, 1, 0))
    assert not actions
    there, actions = feed("decode", there, Landed(T, 1, 1))
    assert actions == [Send(Received(T, 1)), Start(T)]
    here, _ = feed("prefill", here, Computed(T, 1, 0), Computed(T, 1, 1))
    here, actions = feed("prefill", here, Received(T, 1))
    assert not actions, "writes are under way"
    layers = [(chunk, layer) for chunk in (0, 1) for layer in (0, 1)]
    here, actions = feed("prefill", here, *(Written(T, *each) for each in layers))
    assert actions == [Free(T)]
    assert not here.outgoing


def test_who_is_not_known_is_told() -> None:
    assert feed("decode", Receiver(2.0), Beat(T)) == (
        Receiver(2.0),
        [Send(Abort(T, "not known here"))],
    )
    here = Sender(2.0)
    assert feed("prefill", here, Abort(T, "no"))[1] == [Send(Drained(T))]
    begun, _ = feed("prefill", here, Begin(T, 1, 1))
    after, actions = feed("prefill", begun, Abort(T, "cancelled"))
    assert actions == [Send(Drained(T)), Free(T, "cancelled")]
    assert after == here


def test_nothing_is_written_of_what_is_given_up() -> None:
    here, _ = feed("prefill", Sender(2.0), Begin(T, 2, 1), Computed(T, 0, 0), Cancel(T))
    here, actions = feed("prefill", here, Computed(T, 1, 0))
    assert not actions
    assert feed("prefill", here, Written(T, 0, 0))[1] == [
        Send(Drained(T)),
        Free(T, "cancelled"),
    ]


def test_another_epoch_is_another_transfer() -> None:
    """What lands late of a first try doesn't count for the second."""
    again = T._replace(epoch=2)
    there, _ = feed("decode", Receiver(2.0), Begin(again, 1, 1))
    there, actions = feed("decode", there, Landed(T, 0, 0))
    assert not actions
    assert not receiver.is_full(there.incoming[again])


def test_silence_is_borne_for_a_lease() -> None:
    tick = Tick()
    there, _ = feed("decode", Receiver(2.0), Begin(T, 1, 1))
    assert feed("decode", there, tick, now=2.0)[1] == [Send(Beat(T))]
    heard, _ = feed("decode", there, Beat(T), now=1.5)
    assert feed("decode", heard, tick, now=3.5)[1] == [Send(Beat(T))]
    fenced, actions = feed("decode", there, tick, now=2.1)
    assert actions == [Fence(T)]
    assert feed("decode", fenced, tick, now=9.0)[1] == []
    freed, actions = feed("decode", fenced, Fenced(T))
    assert actions == [Free(T, "the prefill side is silent")]
    assert freed == replace(there, incoming={})


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_silent_transfer_takes_no_beats_from_others(side: str) -> None:
    state: Any = Sender(2.0) if side == "prefill" else Receiver(2.0)
    other = Transfer(4)
    state, _ = feed(side, state, Begin(T, 1, 1), Begin(other, 1, 1))
    state, _ = feed(side, state, Beat(other), now=2.0)
    state, actions = feed(side, state, Tick(), now=3.0)
    assert actions == [Fence(T), Send(Beat(other))]
    assert feed(side, state, Tick(), now=4.0)[1] == [Send(Beat(other))]
