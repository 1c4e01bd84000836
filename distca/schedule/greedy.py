"""The paper's communication-aware greedy scheduler (Section 4.2, Appendix B).

**Items.** Every placed piece of a document is at first one *item* on its owner. An item is a *head*
`[h0, h1)` and a *tail* `[t1, t0)` of the piece's queries, `h1 <= t1`; a whole piece is a head and a
tail that touch in its middle. Row `x` of the head sees `x + 1` keys and its mirror image
`h0 + t0 - 1 - x` in the tail `h0 + t0 - x`: together `h0 + t0 + 1`, whatever `x`. So the load of an
item is proportional to its rows, and a share of its load is that share of its rows.

**Cutting.** A share is cut off as the *inner* part, `[h, h1)` and `[t1, t)`; the outer part stays.
Cutting both sides equally leaves `h0 + t0` as it is, so what stays is an item like the first. Cuts
fall on blocks (or take a side whole): of the blocks around the wanted rows of either side, the pair
whose load is nearest to the wanted one is taken.

**Bytes** (Appendix B, whose formulas the published text lost; derived here). With the bytes
`w_q` of a query row, an output row and its LSE and `w_kv` of a key row and a value row, a part of
`r` query rows that sees `k` keys costs `V = w_q * r + w_kv * k`.
A plain shard, the queries `[k - r, k)`, has the load `F = r * k - r * (r - 1) / 2`; for a given
`F` that is `k ~ F / r + r / 2`, and `V` is least at `r = sqrt(w_kv * F / (w_q + w_kv / 2))`, where
it is `2 * sqrt(w_kv * F * (w_q + w_kv / 2))`, as far as the document has such a shard.
A head-tail part of load `F` has `r = 2 * F / (h0 + t0 + 1)` rows wherever it is cut, so only `k`
is left to choose; the head's keys are among the tail's, thus `k` is where the tail ends, and that
is least for the inner part: `k = t1 + r / 2`. Hence `V = w_q * r + w_kv * (t1 + r / 2)`.
Under a window the keys are `[first_key(h0), h1)` and `[first_key(t1), t0)`, their overlap counted
once; again the inner part has the fewest.

**Moves.** The mean load is the target. Servers below the tolerance are served in order of their
deficit, the largest first: over all items of servers above the mean, the share
`dF = min(the item, the donor's surplus, the deficit)` is cut and priced, and the part with the most
load for its bytes, `E = load / V`, is moved (the whole item where `dF` is all of it), until the
deficit is within the tolerance. Donors that are still above the tolerance then give to the server
with the largest deficit in the same way, and servers that are still short are served once more. The
algorithm ends when all are within the tolerance, or when no move brings donor and recipient closer
to the mean by `_LEAST_GAIN` of it. It does end, since parts that moved do not move again.

A move costs a few vectorised passes over the items of the donors, and there are about as many moves
as servers: some ten milliseconds for 64 servers of 64K tokens.

**Differences from the paper.** Its text leaves open how parts are rounded to blocks, how
ties are broken (here: the item that comes first in the placement) and what happens to donors that
no deficit has relieved (here: the second pass). Loads are predicted seconds where the configuration
has a cost model; without one they are visible pairs, which the paper's FLOPs are proportional to.
`V` assumes, as the paper does, that all of a part's rows move; `distca.cost.volume` counts those
that do. Neighbouring parts of a document on one server become one task. Where a document spans
ranks, the paper's item is a range of tokens and its mirror image in the *document*. Here a rank's
piece is contiguous, and its head and tail are mirrored within the piece.
`benchmarks/plans/mirrored_placement.py` compares both.

Where blocks are too coarse for the tolerance, the plan's notes say so. Without a cost model all
loads are integers, so that every machine makes the very same plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from distca.plan import Mask, Placement, Plan, Tasks, place_in_turn
from distca.plan.span import Floats, Int64s, union
from distca.schedule.base import ScheduleConfig, server_loads

_LEAST_GAIN = 1e-3
"""Least part of the mean load by which a move must bring loads closer, to be worth its bytes."""

_FEWER_MORE = (np.ceil, np.floor)
"""Roundings of a head's cut, to fewer rows and to more; a tail is rounded as its mirror image."""

_ROUNDINGS = 4


@dataclass(frozen=True)
class Parts:
    """A table of parts: heads `[h0, h1)` and tails `[t1, t0)` of documents, all int64 `[parts]`."""

    h0: Int64s
    h1: Int64s
    t1: Int64s
    t0: Int64s

    @property
    def rows(self) -> Int64s:
        return (self.h1 - self.h0) + (self.t0 - self.t1)

    def select(self, selection: Int64s) -> Parts:
        return Parts(self.h0[selection], self.h1[selection], self.t1[selection], self.t0[selection])

    def and_then(self, other: Parts) -> Parts:
        columns = ("h0", "h1", "t1", "t0")
        return Parts(*(np.concatenate([getattr(p, c) for p in (self, other)]) for c in columns))


class GreedyScheduler:
    """The paper's greedy scheduler, as the module describes it."""

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config

    def plan(self, lengths: Int64s, capacities: Int64s, mask: Mask) -> Plan:
        """Makes a plan as `Scheduler.plan` says; documents are placed in turn, as in the paper."""
        return self.schedule(lengths, place_in_turn(lengths, capacities), mask)

    def schedule(self, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        """Makes a plan as `Scheduler.schedule` says."""
        parts = whole_pieces(placement, self._config.block)
        return self.move_parts(lengths, placement, parts, placement.document, placement.rank, mask)

    def move_parts(
        self,
        lengths: Int64s,
        placement: Placement,
        parts: Parts,
        document: Int64s,
        owner: Int64s,
        mask: Mask,
    ) -> Plan:
        """Makes a plan from items.

        Args:
            lengths: tokens of each document, int64.
            placement: owners of all tokens.
            parts: heads and tails of the items, which cover each query once.
            document: document of each item, int64 `[items]`.
            owner: rank that owns each item's tokens, int64 `[items]`.
            mask: tokens that a query sees.
        """
        state = _State(self._config, parts, document, owner, placement.world_size, mask)
        state.fill_deficits()
        state.relieve_donors()
        state.fill_deficits()
        tasks = state.tasks()
        return Plan(
            np.asarray(lengths, dtype=np.int64),
            placement,
            tasks,
            mask,
            self._config.block,
            scheduler="greedy",
            notes=state.notes(tasks),
        )


def whole_pieces(placement: Placement, block: int) -> Parts:
    """Returns a placement's pieces as items: head and tail meet in the middle of a piece.

    They meet on a block, so that either may be cut off whole; or at the end.
    """
    middle = (placement.start + placement.end) // (2 * block) * block
    middle = np.where(middle <= placement.start, placement.end, middle)
    return Parts(placement.start.copy(), middle.copy(), middle.copy(), placement.end.copy())


class _State:
    """State of the scheduler: items on their owners, query ranges that moved, and loads."""

    def __init__(
        self,
        config: ScheduleConfig,
        parts: Parts,
        document: Int64s,
        owner: Int64s,
        servers: int,
        mask: Mask,
    ) -> None:
        self._config, self._mask = config, mask
        self._document, self._owner = document, owner
        self._h0, self._h1, self._t1, self._t0 = parts.h0, parts.h1, parts.t1, parts.t0
        self._load = self._loads(self._items())
        self._server_load = np.bincount(self._owner, weights=self._load, minlength=servers)
        # Rounded only once, so that a machine's order of summation does not matter.
        self._mean = math.fsum(self._server_load) / servers
        # Query ranges that moved: (document, start, end, server).
        self._moved: list[tuple[int, int, int, int]] = []

    def _items(self) -> Parts:
        return Parts(self._h0, self._h1, self._t1, self._t0)

    def _loads(self, parts: Parts) -> Floats:
        """Returns the load of each part, whose head and tail are a task each."""
        start = np.concatenate([parts.h0, parts.t1])
        end = np.concatenate([parts.h1, parts.t0])
        first = self._mask.first_key(start)
        pairs = self._mask.pairs(start, end, first, end)
        if self._config.cost_model is None:
            loads = pairs.astype(np.float64)
        else:
            seconds = self._config.cost_model.seconds(end - start, end - first, pairs)
            loads = np.where(end > start, seconds, 0.0)
        heads, tails = loads.reshape(2, -1)
        total: Floats = heads + tails
        return total

    def _bytes(self, parts: Parts) -> Floats:
        """Returns the bytes `V` of Appendix B: those of moving each part with all keys it sees."""
        shape = self._config.shape
        head_from, tail_from = self._mask.first_key(parts.h0), self._mask.first_key(parts.t1)
        separate = (parts.h1 - head_from) + (parts.t0 - tail_from)
        together = parts.t0 - np.minimum(head_from, tail_from)
        keys = np.where(tail_from <= parts.h1, together, separate)
        keys = np.where(parts.h1 == parts.h0, parts.t0 - tail_from, keys)
        keys = np.where(parts.t1 == parts.t0, parts.h1 - head_from, keys)
        row = shape.round_trip_bytes
        return parts.rows * float(row) + keys * float(shape.moved_kv_row_bytes)

    def _inner(self, items: Int64s, share: Floats) -> Parts:
        """Cuts, on blocks, the inner part of each item that holds about a share of its load.

        Returns `_ROUNDINGS` parts of all items, rounding by rounding: both sides to fewer rows,
        the tail to more, the head to more, both to more.
        """
        block = self._config.block
        h0, h1, t1, t0 = self._h0[items], self._h1[items], self._t1[items], self._t0[items]
        # Each side gives half of the rows; where a side is too short, the other gives the rest.
        rows = share * (h1 - h0 + t0 - t1)
        tail_rows = np.minimum(np.maximum(rows / 2, rows - (h1 - h0)), t0 - t1)
        head, tail = h1 - (rows - tail_rows), t1 + tail_rows
        # A cut at or past an end is none: the part then takes the whole side.
        heads = [np.clip(to(head / block).astype(np.int64) * block, h0, h1) for to in _FEWER_MORE]
        tails = [np.clip(-to(-tail / block).astype(np.int64) * block, t1, t0) for to in _FEWER_MORE]
        return Parts(
            np.concatenate([heads[0], heads[0], heads[1], heads[1]]),
            np.tile(h1, _ROUNDINGS),
            np.tile(t1, _ROUNDINGS),
            np.concatenate([tails[0], tails[1], tails[0], tails[1]]),
        )

    def fill_deficits(self) -> None:
        """Moves parts to the servers below the tolerance, the emptiest first."""
        below = self._mean * (1 - self._config.tolerance)
        for server in np.argsort(self._server_load, kind="stable"):
            while self._server_load[server] < below:
                if not self._move_best_to(int(server), donors_above=self._mean):
                    break

    def relieve_donors(self) -> None:
        """Moves parts away from the servers that are still above the tolerance."""
        above = self._mean * (1 + self._config.tolerance)
        while self._server_load.max(initial=0.0) > above:
            emptiest_first = np.argsort(self._server_load, kind="stable")
            if not any(self._move_best_to(int(s), donors_above=above) for s in emptiest_first):
                break

    def _move_best_to(self, server: int, donors_above: float) -> bool:
        """Moves the part with most load for its bytes to a server; returns False if none gains."""
        surplus = self._server_load - self._mean
        deficit = -float(surplus[server])
        least = _LEAST_GAIN * self._mean
        if deficit <= least:
            return False
        donors = self._server_load > donors_above
        items = np.flatnonzero(donors[self._owner] & (self._load > 0))
        if len(items) == 0:
            return False
        load = self._load[items]
        donor = surplus[self._owner[items]]
        most = np.minimum(np.minimum(load, donor), deficit)
        parts = self._inner(items, most / load)
        gain = self._loads(parts).reshape(_ROUNDINGS, -1)
        # A part may be larger than wanted after rounding to blocks; it must still bring a gain.
        after = np.maximum(np.abs(donor - gain), np.abs(gain - deficit))
        useful = (gain > least) & (np.maximum(donor, deficit) - after > least)
        # A recipient may exceed the tolerance only by less than its donor is relieved.
        slack = self._config.tolerance * self._mean
        useful &= gain - deficit <= np.maximum(slack, donor - least)
        nearest = np.where(useful, np.abs(gain - most), np.inf).argmin(axis=0)
        columns = nearest * len(items) + np.arange(len(items))
        useful, gain = useful.ravel()[columns], gain.ravel()[columns]
        if not useful.any():
            return False
        parts = parts.select(columns)
        score = np.where(useful, gain / np.maximum(self._bytes(parts), 1.0), -1.0)
        best = int(score.argmax())
        self._move(int(items[best]), parts.select(np.array([best])), server)
        return True

    def _move(self, item: int, part: Parts, server: int) -> None:
        """Moves an inner part of an item to a server."""
        head, tail = int(part.h0[0]), int(part.t0[0])
        document = int(self._document[item])
        ranges = ((head, int(self._h1[item])), (int(self._t1[item]), tail))
        self._moved += [(document, start, end, server) for start, end in ranges if end > start]
        self._h1[item], self._t1[item] = head, tail
        rest = self._items().select(np.array([item]))
        left, moved = self._loads(rest.and_then(part)).tolist()
        self._server_load[self._owner[item]] += left - self._load[item]
        self._server_load[server] += moved
        self._load[item] = left

    def tasks(self) -> Tasks:
        """Makes tasks of all query ranges over all their keys; joins neighbours on a server."""
        moved = np.array(self._moved, dtype=np.int64).reshape(-1, 4)
        document = np.concatenate([self._document, self._document, moved[:, 0]])
        start = np.concatenate([self._h0, self._t1, moved[:, 1]])
        end = np.concatenate([self._h1, self._t0, moved[:, 2]])
        server = np.concatenate([self._owner, self._owner, moved[:, 3]])
        servers = len(self._server_load)
        group, start, end = union(document * servers + server, start, end)
        return Tasks(
            document=group // servers,
            q_start=start,
            q_end=end,
            kv_start=self._mask.first_key(start),
            kv_end=end,
            server=group % servers,
        )

    def notes(self, tasks: Tasks) -> tuple[str, ...]:
        """Returns a note if a server is outside the tolerance with its final tasks."""
        loads = server_loads(tasks, self._mask, len(self._server_load), self._config.cost_model)
        mean, tolerance = float(loads.mean()), self._config.tolerance
        # Allows for the rounding of the mean of large numbers.
        slack = 1e-9 * mean
        low, high = float(loads.min()), float(loads.max())
        if mean * (1 - tolerance) - slack <= low and high <= mean * (1 + tolerance) + slack:
            return ()
        return (
            f"loads are {low / mean:.3f} to {high / mean:.3f} times the mean, outside the "
            f"tolerance of {tolerance}: no part on its owner, cut on blocks of "
            f"{self._config.block} tokens, moves donor and recipient closer to the mean",
        )
