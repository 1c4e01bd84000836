"""Ticks: a pipeline schedule in which all stages do the same pass at a time.

Core attention has no weights, so the tasks of all stages that work at the same time can be shared
out over the servers of all stages, if all do the same pass (paper, Section 4.1, "Pipeline
parallelism support"). In a *tick* every stage runs one micro-batch through one of its model chunks,
forward in a forward tick and backward in a backward tick, or it is idle and only serves. What a
stage computes in a tick the next one can use in any later tick.

**How many ticks.** The first stage needs a tick for each micro-batch (and chunk), and the last one
starts `stages - 1` ticks later, as does the way back. `2 * (micro_batches * chunks + stages - 1)`
ticks are the fewest, as many as 1F1B takes, and they leave no freedom but when a forward and when a
backward tick comes. With chunks and fewer micro-batches than stages a chunk waits for the one
before: `2 * ((chunks - 1) * stages + micro_batches + stages - 1)`.

**How much is in flight.** Backward ticks come as early as they can without a gap in the last
stage's work. Any schedule with that few ticks keeps at least as many micro-batches in flight on
every stage: without chunks stage `s` keeps `2 * (stages - s) - 1` where 1F1B keeps `stages - s`;
with chunks as many as interleaved 1F1B. A bound on them costs ticks. The fewest for a given bound
are found by a search over all orders of passes, in which a state that is behind another in all
stages is dropped, since whatever it can do the other can do as well. (Of more than `_MOST_STATES`
states that are left, those with most work done are kept: from then on the search is a heuristic.)

**Chains.** Micro-batches that share documents, a *chain*, have to go back in the opposite order: a
later one needs the keys of an earlier one, whose gradients are whole when the later one's backward
pass has run. So their first backward pass comes after their last forward pass. Without chunks that
costs no tick, and stage `s` keeps `2 * (stages - s - 1) + chain` in flight; with chunks a last
chain that is shorter may cost a few.

**Chunks** are run in groups of at least `stages` micro-batches, as in interleaved 1F1B: a group's
micro-batches through the first chunk of all stages, then the second. For micro-batches that don't
divide into such groups a few divisions are tried, none of which is proven to be best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distca.plan.span import Bools, Int64s
from distca.schedule.program import Pass

_MOST_STATES = 64
"""States that the search keeps for each number of ticks: those with most work done."""


class Work(NamedTuple):
    """A stage's work in a tick: the pass of a micro-batch through one of its model chunks."""

    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class Tick:
    """One step of the pipeline.

    Attributes:
        direction: pass that all stages do.
        work: work of each stage; None: the stage only serves.
    """

    direction: Pass
    work: tuple[Work | None, ...]

    def ends_model(self, chunks: int) -> bool:
        """Returns whether the last stage runs a micro-batch through the model's end.

        Args:
            chunks: model chunks of each stage.
        """
        last = self.work[-1]
        return last is not None and last.chunk == chunks - 1


@dataclass(frozen=True)
class TickSchedule:
    """The ticks of one global batch.

    Attributes:
        micro_batches: number of micro-batches in the global batch.
        stages: number of pipeline stages.
        chunks: model chunks (virtual stages) of each stage.
        ticks: ticks in order.
        chain: micro-batches that share documents; the last ones may be fewer.
    """

    micro_batches: int
    stages: int
    chunks: int
    ticks: tuple[Tick, ...]
    chain: int = 1

    @property
    def goes_back(self) -> tuple[bool, ...]:
        """Whether the next tick takes back the micro-batches of each forward tick, `[ticks]`."""
        following = [tick.work if tick.direction == "backward" else None for tick in self.ticks[1:]]
        return tuple(
            tick.direction == "forward" and tick.work == work
            for tick, work in zip(self.ticks, [*following, None], strict=True)
        )

    @property
    def most_in_flight(self) -> tuple[int, ...]:
        """The largest number of forward passes of each stage that wait for their backward pass at
        one time, `[stages]`.

        Each holds the activations of one model chunk.
        """
        now, most = [0] * self.stages, [0] * self.stages
        for tick in self.ticks:
            for stage, work in enumerate(tick.work):
                if work is not None:
                    now[stage] += 1 if tick.direction == "forward" else -1
                    most[stage] = max(most[stage], now[stage])
        return tuple(most)


def tick_schedule(
    micro_batches: int,
    stages: int,
    chunks: int = 1,
    max_in_flight: int | None = None,
    forward_only: bool = False,
    chain: int = 1,
) -> TickSchedule:
    """Finds the schedule with the fewest ticks, and the least in flight among those.

    Args:
        micro_batches: micro-batches of the global batch, at least 1.
        stages: pipeline stages, at least 1.
        chunks: model chunks (virtual stages) of each stage, at least 1.
        max_in_flight: most micro-batches (times chunks) that a stage keeps for their backward pass;
            None: no bound.
        forward_only: whether backward ticks are left out, for an evaluation.
        chain: micro-batches that share documents, and so go back in the opposite order.

    Raises:
        ValueError: a number is less than 1, or a chain is longer than what may be in flight.
    """
    for name, value in (
        ("micro-batches", micro_batches),
        ("pipeline stages", stages),
        ("model chunks of a stage", chunks),
        ("micro-batches in flight", max_in_flight),
        ("micro-batches in a chain", chain),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{value} {name}: there must be at least 1")
    if max_in_flight is not None and max_in_flight < min(chain, micro_batches):
        raise ValueError(
            f"{max_in_flight} micro-batches in flight: a chain of {chain} needs as many, since its "
            "backward pass begins with its last one"
        )

    def found_in(groups: tuple[int, ...], bound: int | None = None) -> TickSchedule:
        order = _Order(groups, stages, chunks, chain)
        if forward_only:
            ticks = order.forward_ticks()
        else:
            ticks = order.earliest_backward() if bound is None else order.fewest_ticks(bound)
        return TickSchedule(micro_batches, stages, chunks, ticks, chain)

    ways = _groups(micro_batches, stages, chunks, chain)
    if forward_only:
        return found_in(ways[0])
    found = [found_in(groups) for groups in ways]
    if max_in_flight is not None:
        bound = max_in_flight * chunks
        if min(max(s.most_in_flight) for s in found) > bound:
            ways = _groups(micro_batches, min(stages, max_in_flight), chunks, chain, max_in_flight)
            found = [found_in(groups, bound) for groups in ways]
    return min(found, key=lambda s: (len(s.ticks), s.most_in_flight))


def most_in_flight_of_1f1b(micro_batches: int, stages: int, chunks: int = 1) -> tuple[int, ...]:
    """Returns what 1F1B keeps in flight on each stage, cf. `TickSchedule.most_in_flight`."""
    if chunks == 1:
        return tuple(min(micro_batches, stages - stage) for stage in range(stages))
    passes = micro_batches * chunks
    return tuple(
        min(passes, 2 * (stages - stage - 1) + (chunks - 1) * stages + 1) for stage in range(stages)
    )


def chain_sizes(micro_batches: int, chain: int) -> list[int]:
    return [min(chain, micro_batches - first) for first in range(0, micro_batches, chain)]


def _groups(
    micro_batches: int, size: int, chunks: int, chain: int, largest: int | None = None
) -> list[tuple[int, ...]]:
    """Lists ways to divide micro-batches into groups of at least `size`, if there are enough.

    Groups consist of whole chains.
    """
    if chunks == 1 or micro_batches <= max(size, chain):
        return [(micro_batches,)]
    chains = chain_sizes(micro_batches, chain)
    size = -(-size // chain)
    if largest is not None:
        size = min(size, largest // chain)
    number, left = divmod(len(chains), size)
    if number == 0:
        return [(micro_batches,)]
    spread = [size + left // number + (n < left % number) for n in range(number)]
    last = [size] * (number - 1) + [size + left]
    own = [size] * number + [left] * (left > 0)
    ends = np.cumsum(chains)

    def whole(way: list[int]) -> tuple[int, ...]:
        return tuple(np.diff(ends[np.cumsum(way) - 1], prepend=0).tolist())

    ways = {whole(spread), whole(last)}
    allowed = {way for way in ways if largest is None or max(way) <= largest}
    return sorted(allowed) or [whole(own)]


class _State(NamedTuple):
    """A state of the search: passes that each stage has done, and how the state was reached."""

    forward: np.ndarray
    backward: np.ndarray
    tick: Tick | None
    before: _State | None


class _Order:
    """Order in which every stage does its passes, with the passes that each waits for."""

    def __init__(self, groups: Sequence[int], stages: int, chunks: int, chain: int) -> None:
        self._stages = stages
        self._forward: list[Work] = []
        self._backward: list[Work] = []
        first = 0
        for size in groups:
            members = range(first, first + size)
            # The last one of a chain comes first.
            chains = [members[n : n + chain] for n in range(0, size, chain)]
            back = [m for each in chains for m in reversed(each)]
            self._forward += [Work(m, c) for c in range(chunks) for m in members]
            self._backward += [Work(m, c) for c in reversed(range(chunks)) for m in back]
            first += size
        forward_place = {work: n for n, work in enumerate(self._forward)}
        backward_place = {work: n for n, work in enumerate(self._backward)}
        # Numbers of passes of the last stage (forward) or the first stage (backward) to wait for.
        self._chunk_before = [
            1 + forward_place[Work(m, c - 1)] if c else 0 for m, c in self._forward
        ]
        self._chunk_after = [
            1 + backward_place[Work(m, c + 1)] if c < chunks - 1 else 0 for m, c in self._backward
        ]
        self._own_forward = [
            1 + forward_place[work] if work.chunk == chunks - 1 else 0 for work in self._backward
        ]

    def _start(self) -> _State:
        zeros = np.zeros(self._stages, dtype=np.int64)
        return _State(zeros, zeros.copy(), None, None)

    def _done(self, state: _State) -> bool:
        return int(state.backward.min()) == len(self._forward)

    def _forward_tick(self, state: _State, bound: int | None = None) -> _State | None:
        """Runs the next forward pass of all stages that can; returns None if no stage can."""
        done, total = state.forward, len(self._forward)
        can = np.zeros(self._stages, dtype=bool)
        can[1:] = done[1:] < done[:-1]
        if done[0] < total:
            can[0] = done[-1] >= self._chunk_before[done[0]] and (
                bound is None or done[0] - state.backward[0] < bound
            )
        if not can.any():
            return None
        tick = Tick("forward", self._doing(self._forward, done, can))
        return _State(done + can, state.backward, tick, state)

    @staticmethod
    def _doing(order: list[Work], done: np.ndarray, can: np.ndarray) -> tuple[Work | None, ...]:
        return tuple(order[n] if able else None for n, able in zip(done, can, strict=True))

    def _last_can_go_back(self, state: _State) -> bool:
        done = state.backward[-1]
        return bool(
            done < len(self._backward)
            and state.backward[0] >= self._chunk_after[done]
            and state.forward[-1] >= self._own_forward[done]
        )

    def _backward_tick(self, state: _State) -> _State | None:
        """Runs the next backward pass of all stages that can; returns None if no stage can."""
        done = state.backward
        can = np.zeros(self._stages, dtype=bool)
        can[:-1] = done[:-1] < done[1:]
        can[-1] = self._last_can_go_back(state)
        if not can.any():
            return None
        tick = Tick("backward", self._doing(self._backward, done, can))
        return _State(state.forward, done + can, tick, state)

    def forward_ticks(self) -> tuple[Tick, ...]:
        """Returns a schedule without backward ticks."""
        state = self._start()
        while (following := self._forward_tick(state)) is not None:
            state = following
        return _ticks(state)

    def earliest_backward(self) -> tuple[Tick, ...]:
        """Returns the schedule in which backward ticks come as early as the last stage can work."""
        state = self._start()
        while not self._done(state):
            if self._last_can_go_back(state):
                following = self._backward_tick(state)
            else:
                following = self._forward_tick(state) or self._backward_tick(state)
            assert following is not None
            state = following
        return _ticks(state)

    def fewest_ticks(self, bound: int) -> tuple[Tick, ...]:
        """Returns the shortest schedule with at most `bound` passes in flight.

        Only the first stage is bounded: it has most in flight, being first in and last out. The
        states after each number of ticks are searched together, as rows of a table.
        """
        done = np.zeros((1, 2, self._stages), dtype=np.int64)
        # For each number of ticks: the state that each one came from, and whether by a forward one.
        steps: list[tuple[Int64s, Bools]] = []
        while True:
            able = np.stack([self._able_forward(done, bound), self._able_backward(done)], axis=1)
            # Each state's forward tick, then its backward tick.
            origin = np.repeat(np.arange(len(done)), 2)
            forward = np.tile([True, False], len(done))
            after = done[origin]
            after[forward, 0] += able[:, 0]
            after[~forward, 1] += able[:, 1]
            there = able.any(axis=2).reshape(-1)
            after, origin, forward = after[there], origin[there], forward[there]
            ended = np.flatnonzero(after[:, 1].min(axis=1) == len(self._forward))
            if len(ended):
                last = int(ended[0])
                steps.append((origin, forward))
                break
            kept = _not_behind(after.reshape(len(after), -1))
            done = after[kept]
            steps.append((origin[kept], forward[kept]))
        directions: list[bool] = []
        for origin, forward in reversed(steps):
            directions.append(bool(forward[last]))
            last = int(origin[last])
        state = self._start()
        for is_forward in reversed(directions):
            following = (
                self._forward_tick(state, bound) if is_forward else self._backward_tick(state)
            )
            assert following is not None
            state = following
        return _ticks(state)

    def _able_forward(self, done: Int64s, bound: int) -> Bools:
        """Which stages can do their next forward pass in each state, `[states, stages]`.

        Args:
            done: passes that each stage has done, forward and backward, `[states, 2, stages]`.
            bound: most passes of the first stage in flight.
        """
        forward, backward = done[:, 0], done[:, 1]
        able = np.zeros(forward.shape, dtype=bool)
        able[:, 1:] = forward[:, 1:] < forward[:, :-1]
        # One that has done all waits for ever.
        waits = np.array([*self._chunk_before, len(self._forward) + 1])
        able[:, 0] = forward[:, -1] >= waits[forward[:, 0]]
        able[:, 0] &= forward[:, 0] - backward[:, 0] < bound
        return able

    def _able_backward(self, done: Int64s) -> Bools:
        """Which stages can do their next backward pass in each state, `[states, stages]`."""
        forward, backward = done[:, 0], done[:, 1]
        able = np.zeros(backward.shape, dtype=bool)
        able[:, :-1] = backward[:, :-1] < backward[:, 1:]
        never = len(self._backward) + 1
        after, own = (np.array([*each, never]) for each in (self._chunk_after, self._own_forward))
        last = backward[:, -1]
        able[:, -1] = (backward[:, 0] >= after[last]) & (forward[:, -1] >= own[last])
        return able


def _not_behind(table: Int64s) -> Int64s:
    """Returns the numbers of the states that no other is ahead of, or level with, in all stages and
    both passes.

    Args:
        table: passes that each stage of each state has done, `[states, 2 * stages]`.
    """
    first = np.lexsort(table.T[::-1])
    differs = np.any(np.diff(table[first], axis=0), axis=1)
    first = first[np.concatenate([[True], differs])]
    table = table[first]
    # All states differ now, and each is level with itself.
    ahead = np.logical_and.reduce([of[:, None] <= of for of in table.T]).sum(axis=1)
    kept = np.flatnonzero(ahead == 1)
    if len(kept) > _MOST_STATES:
        kept = kept[np.argsort(-table[kept].sum(axis=1), kind="stable")[:_MOST_STATES]]
    return first[kept]  # type: ignore[no-any-return]


def _ticks(state: _State) -> tuple[Tick, ...]:
    return tuple(reversed(list(_back_from(state))))


def _back_from(state: _State) -> Iterator[Tick]:
    while state.before is not None:
        assert state.tick is not None
        yield state.tick
        state = state.before
