"""What each rank starts, waits for and runs, in the order that `distca.schedule.program` states.

Losses are the same wherever a wait stands; what a wait stands in front of is what makes steps fast.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from support.events import SeenEvent, events_and_trace, events_of_step
from support.parity import RECOMPUTE

LENGTHS = [768]
DATA_PARALLEL = ["--num-layers", "2", "--distca", "--seq-length", "384"]
OUTPUTS_RETURN = ["--distca-scheduler", "greedy"]
QUERIES_AT_HOME = "--distca-scheduler per-document-cp --distca-context-parallel-size 2".split()
BOTH, WHOLE = ("ping", "pong"), (None,)
Nano = str | None


def starts(phase: str, nano: Nano) -> SeenEvent:
    return "start", phase, nano


def waits(phase: str, nano: Nano) -> SeenEvent:
    return "wait", phase, nano


def computes(nano: Nano, backward: bool = False) -> list[SeenEvent]:
    """A nano-batch's kernels when its inputs are there; then its outputs go."""
    there, back, kernel = "dispatch", "combine", "forward"
    if backward:
        there, back, kernel = "dispatch_backward", "combine_backward", "backward"
    return [waits(there, nano), ("kernel", kernel, nano), starts(back, nano)]


def layers_there(layers: Sequence[int], nanos: Sequence[Nano]) -> list[SeenEvent]:
    """A forward pass where outputs return."""
    events: list[SeenEvent] = []
    for nano in nanos:
        events += [("pre-attention", layers[0], nano), starts("dispatch", nano)]
    for layer, following in itertools.zip_longest(layers, layers[1:]):
        for nano in nanos:
            events += computes(nano)
        for nano in nanos:
            events += [waits("combine", nano), ("post-attention", layer, nano)]
            if following:
                events += [("pre-attention", following, nano), starts("dispatch", nano)]
    return events


def layers_back(layers: Sequence[int], nanos: Sequence[Nano]) -> list[SeenEvent]:
    """Its backward pass: the opposite order."""
    events: list[SeenEvent] = []

    def gradient_comes(layer: int, nano: Nano) -> list[SeenEvent]:
        began = ("post-attention backward", layer, nano)
        return [began, starts("dispatch_backward", nano)]

    for nano in nanos[::-1]:
        events += gradient_comes(layers[-1], nano)
    for before in [*layers[-2::-1], None]:
        for nano in nanos[::-1]:
            events += computes(nano, backward=True)
        for nano in nanos[::-1]:
            events.append(waits("combine_backward", nano))
            events += gradient_comes(before, nano) if before else []
    return events


@pytest.mark.parametrize("nanos", [BOTH, WHOLE], ids=["ping-pong", "whole"])
def test_where_outputs_return(ranks, nanos: Sequence[Nano]) -> None:
    """Nano-batches or whole micro-batches."""
    flags = [*DATA_PARALLEL, *OUTPUTS_RETURN]
    flags.append("--distca-ping-pong" if nanos == BOTH else "--no-distca-ping-pong")
    there, back = layers_there([1, 2], nanos), layers_back([1, 2], nanos)
    expected = [*there, ("output layer",), *back]
    assert ranks.run(events_of_step, flags, LENGTHS, world_size=2) == [expected] * 2


def layers_there_at_home(layers: Sequence[int], ahead: bool = True) -> list[SeenEvent]:
    """A forward pass of ping and pong where queries are at home, so that nothing returns."""
    events: list[SeenEvent] = []
    for nano in BOTH:
        events += [("pre-attention", layers[0], nano), starts("dispatch", nano)]
    for layer, following in itertools.zip_longest(layers, layers[1:]):
        for nano in BOTH:
            events += [waits("dispatch", nano), ("kernel", "forward", nano)]
            events.append(("post-attention", layer, nano))
            if following:
                events += [("pre-attention", following, nano), starts("dispatch", nano)]
    # The keys that the backward pass needs first are known before the loss is.
    return [*events, *(starts("dispatch_backward", nano) for nano in BOTH[::-1] if ahead)]


def layers_back_at_home(layers: Sequence[int]) -> list[SeenEvent]:
    """Its backward pass through some layers, the last of which comes first."""
    events: list[SeenEvent] = []
    for before, layer, after in itertools.zip_longest([None, *layers], layers, layers[1:]):
        for nano in BOTH[::-1]:
            events += [waits("combine_backward", nano)] if before else []
            if layer:
                events.append(("post-attention backward", layer, nano))
                events += computes(nano, backward=True)
            # The keys of the layer before are known before its gradient is.
            events += [starts("dispatch_backward", nano)] if after else []
    return events


def test_where_queries_are_at_home(ranks) -> None:
    """A nano-batch's keys are under way while the other's kernels and linear layers run, there and
    back; the last layer's leave before the output layer, and so before the loss."""
    flags = [*DATA_PARALLEL, *QUERIES_AT_HOME, "--distca-ping-pong"]
    expected = [*layers_there_at_home([1, 2]), ("output layer",), *layers_back_at_home([2, 1])]
    assert ranks.run(events_of_step, flags, LENGTHS, world_size=2) == [expected] * 2


def test_recomputed_layers_communicate_again(ranks) -> None:
    flags = [*DATA_PARALLEL, *QUERIES_AT_HOME, "--distca-ping-pong", *RECOMPUTE]
    expected = layers_there_at_home([1], ahead=False) + layers_there_at_home([2], ahead=False)
    expected.append(("output layer",))
    for layer in (2, 1):
        expected += layers_there_at_home([layer]) + layers_back_at_home([layer])
    assert ranks.run(events_of_step, flags, LENGTHS, world_size=2) == [expected] * 2


def test_the_trace_says_what_the_transport_and_the_kernels_did(ranks) -> None:
    flags = [*DATA_PARALLEL, *OUTPUTS_RETURN, "--distca-ping-pong"]
    for happened, traced in ranks.run(events_and_trace, flags, LENGTHS, world_size=2):
        assert traced == [event for event in happened if event[0] in ("start", "wait", "kernel")]
        assert len(traced) == 2 * 2 * 2 * 5


def serves(events: Sequence[SeenEvent]) -> list[SeenEvent]:
    """A rank without tokens: what one with tokens does, but for the linear layers."""
    return [event for event in events if "attention" not in event[0]]


@pytest.mark.parametrize("nanos", [BOTH, WHOLE], ids=["ping-pong", "whole"])
def test_a_stage_that_only_serves(ranks, nanos: Sequence[Nano]) -> None:
    """It follows the stage that works, whose layers it has none of."""
    flags = "--num-layers 4 --pipeline-model-parallel-size 2 --distca --seq-length 768".split()
    flags += ["--global-batch-size", "1"]
    flags.append("--distca-ping-pong" if nanos == BOTH else "--no-distca-ping-pong")
    there, back = serves(layers_there([1, 2], nanos)), serves(layers_back([1, 2], nanos))
    expected = [
        [*layers_there([1, 2], nanos), *there, *back, *layers_back([1, 2], nanos)],
        [
            *(*there, *layers_there([3, 4], nanos), ("output layer",)),
            *(*layers_back([3, 4], nanos), *back),
        ],
    ]
    assert ranks.run(events_of_step, flags, LENGTHS, world_size=2) == expected
