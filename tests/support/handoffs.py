"""A prefill side, a decode rank and all that can happen between them, in any order.

`World.moves` lists what can happen next, and `make` lets it happen: messages overtake each other,
writes land or fail late, clients go away, either side dies, and time passes. What must never happen
raises `Broken`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from distca.schedule.serving.handoff import Receiver, Sender, receive, send
from distca.schedule.serving.handoff.protocol import (
    Action,
    Beat,
    Begin,
    Cancel,
    Computed,
    Fence,
    Fenced,
    Finish,
    Free,
    Landed,
    Send,
    Start,
    Started,
    Tick,
    Transfer,
    Write,
    Written,
)

LEASE = 2.0
SIDES = ("prefill", "decode")


class Broken(AssertionError):
    """Raised where something happened that must not."""


@dataclass(frozen=True)
class Scenario:
    """What may happen.

    Attributes:
        requests: requests, each tried once.
        chunks: chunks of each.
        layers: layers of each.
        cancels: times that a client's going is told to a side, at most.
        deaths: sides that may die.
        ticks: times that half a lease may pass while something else could happen.
    """

    requests: int = 1
    chunks: int = 1
    layers: int = 1
    cancels: int = 0
    deaths: tuple[str, ...] = ()
    ticks: int = 0


class World:
    """Both sides, and what is under way between and around them.

    Attributes:
        started: requests in the order in which they began to decode.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.sender = Sender(LEASE)
        self.receiver = Receiver(LEASE)
        self.started: list[Transfer] = []
        self.pending: dict[str, list[Any]] = {side: [] for side in SIDES}
        self.writes: set[Write] = set()
        self.landed: set[Write] = set()
        self.closed: set[Transfer] = set()
        self.holding: set[tuple[str, Transfer]] = set()
        self.alive = set(SIDES)
        self.steps = [0] * scenario.requests
        self.cancels = self.ticks = self.waited = 0
        self.now = 0.0
        self.scripts = [self._script(Transfer(n)) for n in range(scenario.requests)]

    def _script(self, transfer: Transfer) -> list[tuple[str, Any]]:
        """What the engine and the kernels do for a request: the side, and its event."""
        begin = Begin(transfer, self.scenario.chunks, self.scenario.layers)
        script: list[tuple[str, Any]] = [("decode", begin), ("prefill", begin)]
        for chunk in range(self.scenario.chunks):
            for layer in range(self.scenario.layers):
                script.append(("prefill", Computed(transfer, chunk, layer)))
        return script

    def copy(self) -> World:
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list | set):
                setattr(other, name, value.copy())
        other.pending = {side: list(events) for side, events in self.pending.items()}
        return other

    def key(self) -> Hashable:
        """All that the future depends on."""
        return (
            tuple(sorted(self.sender.outgoing.items(), key=lambda item: item[0])),
            tuple(sorted(self.receiver.incoming.items(), key=lambda item: item[0])),
            tuple(tuple(sorted(map(repr, self.pending[side]))) for side in SIDES),
            tuple(map(frozenset, (self.writes, self.landed, self.closed, self.holding))),
            (frozenset(self.alive), tuple(self.started), tuple(self.steps)),
            (self.cancels, self.ticks, self.waited, self.now),
        )

    def moves(self) -> list[tuple[Any, ...]]:
        """What can happen next; nothing where all has ended."""
        found: list[tuple[Any, ...]] = []
        for number, script in enumerate(self.scripts):
            if self.steps[number] < len(script):
                found.append(("step", number))
        for side in SIDES:
            coming = dict.fromkeys(self.pending[side])
            found += [("deliver", side, each) for each in coming if self._may_come(side, each)]
        found += [("land", write) for write in sorted(self.writes, key=repr)]
        if self.cancels < self.scenario.cancels:
            found += [("cancel", *held) for held in sorted(self.holding) if held[0] in self.alive]
        dying = [side for side in self.scenario.deaths if side in self.alive]
        found += [("die", side) for side in dying if len(self.alive) == 2]
        idle = not any(move[0] in ("step", "deliver", "land") for move in found)
        waiting = self.sender.outgoing or self.receiver.incoming
        if waiting if idle else self.ticks < self.scenario.ticks:
            found.append(("tick",))
        return found

    def _may_come(self, side: str, event: Any) -> bool:
        """Whether an event can come now: the prefill side hears of a request first of all."""
        return side == "decode" or self.steps[event.transfer.request] > 1

    def make(self, move: tuple[Any, ...]) -> None:
        """Lets something happen.

        Raises:
            Broken: it must not.
        """
        match move:
            case ("step", number):
                side, event = self.scripts[number][self.steps[number]]
                self.steps[number] += 1
                self._apply(side, event)
            case ("deliver", side, event):
                self.pending[side].remove(event)
                self._apply(side, event)
            case ("land", write):
                self._land(write)
            case ("cancel", side, transfer):
                self.cancels += 1
                self._apply(side, Cancel(transfer))
            case ("die", side):
                self.alive.discard(side)
                self.pending[side].clear()
                self.holding = {held for held in self.holding if held[0] != side}
                if side == "prefill":
                    self.steps = [len(script) for script in self.scripts]
                    self.sender = Sender(LEASE)
                else:
                    self.receiver = Receiver(LEASE)
            case ("tick",):
                others = [each for each in self.moves() if each[0] in ("step", "deliver", "land")]
                self.ticks += bool(others)
                self.waited += not others
                if self.waited > 3:
                    raise Broken("a wait beyond the lease")
                self.now += 0.6 * LEASE
                for side in SIDES:
                    self._apply(side, Tick())

    def _tell(self, side: str, event: Any) -> None:
        """Puts an event on its way; one that is on it already, as beats may be, is one."""
        if side in self.alive and not (isinstance(event, Beat) and event in self.pending[side]):
            self.pending[side].append(event)

    def _land(self, write: Write) -> None:
        self.writes.discard(write)
        where = (write.transfer, write.chunk, write.layer)
        if write.transfer not in self.closed and "decode" in self.alive:
            if ("decode", write.transfer) not in self.holding:
                raise Broken(f"{write} landed in blocks that were freed")
            self.landed.add(write)
            self._tell("decode", Landed(*where))
        self._tell("prefill", Written(*where))

    def _apply(self, side: str, event: Any) -> None:
        if side not in self.alive:
            return
        if side == "prefill":
            self.sender, actions = send(self.sender, event, self.now)
            known: Any = self.sender.outgoing
        else:
            self.receiver, actions = receive(self.receiver, event, self.now)
            known = self.receiver.incoming
        if isinstance(event, Begin) and event.transfer in known:
            self.holding.add((side, event.transfer))
        if isinstance(event, Started):
            self._tell(side, Finish(event.transfer))
        for action in actions:
            self._act(side, action)

    def _act(self, side: str, action: Action) -> None:
        match action:
            case Send(message):
                self._tell("decode" if side == "prefill" else "prefill", message)
            case Write(transfer):
                if ("prefill", transfer) not in self.holding:
                    raise Broken(f"{action} reads blocks that were freed")
                self.writes.add(action)
            case Fence(transfer):
                self.closed.add(transfer)
                self._tell(side, Fenced(transfer))
            case Start(transfer):
                found = {write for write in self.landed if write.transfer == transfer}
                if len(found) < self.scenario.chunks * self.scenario.layers:
                    raise Broken(f"{transfer} starts with {len(found)} layers of chunks")
                self.started.append(transfer)
                self._tell("decode", Started(transfer))
            case Free(transfer):
                if (side, transfer) not in self.holding:
                    raise Broken(f"{transfer} is freed twice")
                self.holding.discard((side, transfer))
                under_way = any(write.transfer == transfer for write in self.writes)
                if side == "prefill" and under_way and transfer not in self.closed:
                    raise Broken(f"{transfer} is freed while it is written")

    def check_end(self) -> None:
        """Looks for what is left where nothing can happen any more.

        Raises:
            Broken: something is.
        """
        if self.sender.outgoing or self.receiver.incoming:
            raise Broken("a request has not ended")
        if self.holding:
            raise Broken(f"blocks leaked: {self.holding}")
        undisturbed = not self.cancels and len(self.alive) == 2 and not self.ticks
        if undisturbed and len(self.started) < self.scenario.requests:
            raise Broken("a request did not start, though nothing went wrong")


def walk(scenario: Scenario, seed: int) -> World:
    """Makes moves at random until nothing can happen any more; time passes rarely."""
    drawn, world = random.Random(seed), World(scenario)
    while moves := world.moves():
        weights = [{"tick": 0.1, "die": 0.05, "cancel": 0.2}.get(move[0], 1.0) for move in moves]
        world.make(drawn.choices(moves, weights)[0])
    world.check_end()
    return world


def explore(scenario: Scenario) -> int:
    """Makes all moves in all orders; returns the number of worlds that there are."""
    seen, left = set(), [World(scenario)]
    while left:
        world = left.pop()
        key = world.key()
        if key in seen:
            continue
        seen.add(key)
        moves = world.moves()
        if not moves:
            world.check_end()
        for move in moves:
            after = world.copy()
            after.make(move)
            left.append(after)
    return len(seen)
