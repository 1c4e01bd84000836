"""A cursor in a program: which event is next, and on which exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from distca.plan import LayerMasks
from distca.runtime.exchange import Exchange
from distca.schedule.program import Event, Pass, Program, Step


class Prefetches(Protocol):
    """A call of core attention that can send keys and values before its backward pass's turn."""

    def prefetch(self) -> None: ...


class EventCursor:
    """The events of a micro-batch's pass, in turn.

    In a pipeline a micro-batch shares its backward tick with other micro-batches than its forward
    tick, so each tick begins with a program and exchanges of its own.

    Args:
        exchanges: this rank's part of each nano-batch's plan with each mask: mask by mask, each
            ping then pong.
        program: events of the first pass.
        masks: masks of the layers; None: all have one.

    Attributes:
        exchanges: this rank's part of each plan, in the present pass.
        give_way: lets other nano-batches go on, where they run in turns; None: only one runs, or
            autograd keeps the order.
    """

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        program: Program = (),
        masks: LayerMasks | None = None,
    ) -> None:
        self.give_way: Callable[[], object] | None = None
        self._masks = masks or LayerMasks()
        # Calls whose backward pass is still to come.
        self._calls: dict[tuple[int, int], Prefetches] = {}
        self.begin(exchanges, program)

    def begin(self, exchanges: Sequence[Exchange], program: Program) -> None:
        """Begins another pass."""
        self.exchanges = tuple(exchanges)
        self._program, self._next = program, 0

    def exchange(self, nano_batch: int, layer: int) -> Exchange:
        """Returns this rank's part of the plan of a nano-batch in a layer, of the present pass."""
        return self._masks.select(self.exchanges, layer)[nano_batch]

    @property
    def next_event(self) -> Event | None:
        """The event whose turn has come; None: the pass has ended."""
        return self._program[self._next] if self._next < len(self._program) else None

    def take_turn(self, direction: Pass, step: Step, nano_batch: int) -> Event:
        """Lets other nano-batches go on until a nano-batch's turn has come, and takes the turn.

        Returns:
            The event, which the caller then does.
        """
        while (event := self.next_event) is not None and event.nano_batch != nano_batch:
            assert self.give_way is not None, f"{direction} {step} before the turn of {event}"
            self.give_way()
        assert event is not None, f"{direction} {step} after the program's end"
        assert event[:2] == (direction, step), f"{direction} {step} in the turn of {event}"
        self._next += 1
        return event

    def register_backward(self, event: Event, call: Prefetches) -> None:
        """Notes a call whose backward pass will follow."""
        self._calls[event.nano_batch, event.layer] = call

    def unregister_backward(self, event: Event) -> None:
        """Forgets a call whose backward pass has run."""
        self._calls.pop((event.nano_batch, event.layer), None)

    def prefetch(self) -> None:
        """Does the "prefetch" events that come next, if any."""
        while (event := self.next_event) is not None and event.step == "prefetch":
            self._next += 1
            self._calls[event.nano_batch, event.layer].prefetch()
