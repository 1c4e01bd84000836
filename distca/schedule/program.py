"""The order of events of core attention on every rank: a value, the *program* of a tick.

The runtime, ranks that only serve and the simulator all follow it, so none has an order of its own
(paper, Section 4.1 and Figure 7). A call of core attention has three events for a nano-batch and a
layer: *dispatch* sends the rows that kernels need, *compute* waits for those that arrive, runs the
kernels and sends outputs to their owners, *combine* waits for outputs that come back and merges
them. A rank's linear layers run between *combine* of a layer and *dispatch* of the next.

Two nano-batches, ping and pong, take turns. If outputs come back, the kernels of both run before
either goes on:

    ping: dispatch                                               linear layers before it
    pong: dispatch                                               ping's inputs are under way
    ping: compute                                                pong's inputs are under way
    pong: compute                                                ping's outputs are under way
    ping: combine, linear layers, dispatch of the next layer     pong's outputs are under way

If all queries are computed at home, keys and values travel and nothing comes back: the owners have
the outputs when the kernels end. Then a nano-batch goes on at once, and its keys travel while the
other's kernels *and* linear layers run:

    ping: compute, combine, linear layers, dispatch of the next  pong's keys are under way
    pong: the same                                               ping's keys are under way

The backward pass mirrors the forward pass exactly, as autograd runs in the opposite order. The keys
and values of a layer are known before its turn, so with queries at home they are sent as soon as
the kernels of the layer above have run (*prefetch*), those of the last layer while the loss is
computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from distca.plan import LayerMasks

Pass = Literal["forward", "backward"]
Step = Literal["dispatch", "compute", "combine", "prefetch"]

NANO_BATCHES = ("ping", "pong")
"""Names of a micro-batch's two nano-batches, by number."""

_MIRRORED: dict[Step, Step] = {"dispatch": "combine", "compute": "compute", "combine": "dispatch"}

Ablation = Literal["none", "single-stream", "signal"]
"""Part of the exchanges that is left out, to measure its cost (paper, Section 6.3): none; the
overlap, as each exchange is waited for where it starts; or the bytes, as messages are one byte."""

ABLATIONS: tuple[Ablation, ...] = ("none", "single-stream", "signal")


class Event(NamedTuple):
    """One event of a program.

    Attributes:
        direction: pass of the event; a forward pass that is recomputed is "forward", too.
        step: event of a call of core attention, or a prefetch for it.
        nano_batch: number of the nano-batch, 0 or 1.
        layer: number of the layer in the model chunk, from 0.
    """

    direction: Pass
    step: Step
    nano_batch: int
    layer: int


Program = tuple[Event, ...]


class LayerGroup(NamedTuple):
    """Consecutive layers of a model chunk that are recomputed together, or not at all.

    Attributes:
        layers: numbers of the layers in the chunk, in order.
        recomputed: whether the forward pass of all of them runs again before their backward pass.
    """

    layers: range
    recomputed: bool


def tick_program(
    direction: Pass,
    groups: Sequence[LayerGroup],
    nano_batches: int,
    at_home: bool,
    goes_back: bool = True,
) -> Program:
    """Makes the program of a tick, the same on every rank.

    Args:
        direction: pass of the tick.
        groups: all layers of a model chunk, in groups.
        nano_batches: number of nano-batches, 1 or 2.
        at_home: whether owners compute all queries, and all ranks run the same micro-batch, in
            both passes.
        goes_back: whether the next tick is the backward pass of the same micro-batches.
    """
    events: list[Event] = []
    if direction == "forward":
        for group in groups:
            events += _forward(group.layers, nano_batches, at_home)
        if goes_back and at_home and not groups[-1].recomputed:
            events += _first_prefetched(groups[-1].layers, nano_batches)
        return tuple(events)
    for group in reversed(groups):
        if group.recomputed:
            events += _forward(group.layers, nano_batches, at_home)
            if at_home:
                events += _first_prefetched(group.layers, nano_batches)
        events += _backward(group.layers, nano_batches, at_home)
    return tuple(events)


def calls_of(program: Program, masks: LayerMasks) -> list[Counter[Pass]]:
    """Counts each nano-batch's calls of core attention with each mask in a program, by pass."""
    calls = [e for e in program if e.step == "compute" and e.nano_batch == 0]
    return [
        Counter(e.direction for e in calls if masks.pattern[e.layer % len(masks.pattern)] == number)
        for number in range(len(masks.masks))
    ]


def _forward(layers: range, nano_batches: int, at_home: bool) -> list[Event]:
    both = range(nano_batches)
    events = [Event("forward", "dispatch", n, layers[0]) for n in both]
    for layer in layers:
        # Events of a nano-batch after its kernels: after those of both nano-batches, or at once.
        after = [
            [Event("forward", "combine", n, layer)]
            + ([Event("forward", "dispatch", n, layer + 1)] if layer + 1 in layers else [])
            for n in both
        ]
        kernels = [Event("forward", "compute", n, layer) for n in both]
        if at_home:
            for n in both:
                events += [kernels[n], *after[n]]
        else:
            events += [*kernels, *(event for n in both for event in after[n])]
    return events


def _backward(layers: range, nano_batches: int, at_home: bool) -> list[Event]:
    events: list[Event] = []
    for _, step, nano_batch, layer in reversed(_forward(layers, nano_batches, at_home)):
        events.append(Event("backward", _MIRRORED[step], nano_batch, layer))
        if at_home and step == "compute" and layer > layers[0]:
            events.append(Event("backward", "prefetch", nano_batch, layer - 1))
    return events


def _first_prefetched(layers: range, nano_batches: int) -> list[Event]:
    """Makes the events that send the last layer's keys between forward and backward pass.

    A single nano-batch has none: its kernels wait for the loss, the only work that would hide them.
    """
    if nano_batches == 1:
        return []
    last = layers[-1]
    return [Event("backward", "prefetch", n, last) for n in reversed(range(nano_batches))]


def layer_groups(
    layers: int, granularity: str | None, method: str | None, number: int | None
) -> tuple[LayerGroup, ...]:
    """Groups a model chunk's layers by Megatron's flags of recomputation.

    Args:
        layers: number of layers in the chunk.
        granularity: `--recompute-granularity`; only "full" recomputes core attention.
        method: `--recompute-method`, "uniform" or "block".
        number: `--recompute-num-layers`: layers of a group, or layers recomputed one by one.
    """
    if granularity != "full":
        return (LayerGroup(range(layers), False),)
    assert number is not None
    if method == "uniform":
        return tuple(
            LayerGroup(range(n, min(n + number, layers)), True) for n in range(0, layers, number)
        )
    one_by_one = [LayerGroup(range(n, n + 1), True) for n in range(min(number, layers))]
    rest = [LayerGroup(range(number, layers), False)] if number < layers else []
    return (*one_by_one, *rest)
