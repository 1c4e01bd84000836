"""The paper's communication-aware greedy scheduler (Section 4.2, Appendix B).

**Items.** Every placed piece of a document starts as one *item* on its owner. An item is a *head*
`[h0, h1)` and a *tail* `[t1, t0)` of the piece's queries, `h1 <= t1`; a whole piece is a head and a
tail that touch in its middle. A head's row `x` and its mirror image in the tail see
`(x + 1) + (h0 + t0 - x) = h0 + t0 + 1` keys together, whatever `x`: an item's load is proportional
to its rows, and a share of it is a share of its rows.

**Cutting.** A share is cut off as the *inner* part, `[h, h1)` and `[t1, t)`, because it needs the
fewest keys: a part that reaches out to `t` needs the keys `[0, t)`. (Appendix B: among the parts of
equal load, the one with the smallest key range.) Cuts fall on blocks.

**Bytes.** A part of `r` query rows and `k` key rows costs
`r * (query row + output row + LSE) + k * (key row + value row)`, all of which is taken to move
(Appendix B; what really moves is counted in `distca.cost.volume`).

**Moves.** The mean load is the target. The server with the largest deficit is served first: among
all items of servers above the mean, the share with the largest load for its bytes is moved to it,
`dF = min(the item, the donor's surplus, the deficit)`, until the deficit is within the tolerance.
Then servers above the tolerance give to those with the largest deficit in the same way. It ends
when all are within the tolerance, or when no move brings `_LEAST_GAIN` of the mean.

Loads are predicted seconds where the configuration has a cost model, else visible pairs. Ties go to
the item that came first, so every rank makes the same plan. One move costs time linear in the items
of donors; the number of moves is about that of the servers.

The upper side of the tolerance alone decides the time; like the paper, both sides are aimed at.
Blocks limit what can be cut: what is left over is said in the plan's notes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distca.plan import Mask, Placement, Plan, Tasks
from distca.plan.span import Int64s, union
from distca.schedule.base import ScheduleConfig

_LEAST_GAIN = 1e-3
"""A move that closes less than this share of the mean load is not worth its bytes."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Parts:
    """Heads `[h0, h1)` and tails `[t1, t0)` of documents, one column each."""

    h0: Int64s
    h1: Int64s
    t1: Int64s
    t0: Int64s

    @property
    def rows(self) -> Int64s:
        return (self.h1 - self.h0) + (self.t0 - self.t1)


class GreedyScheduler:
    """See the module's docstring."""

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config

    def schedule(self, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        """See `Scheduler.schedule`."""
        lengths = np.asarray(lengths, dtype=np.int64)
        state = _State(self._config, placement, mask)
        state.fill_deficits()
        state.relieve_donors()
        return Plan(
            lengths,
            placement,
            state.tasks(),
            mask,
            self._config.block,
            scheduler="greedy",
            notes=state.notes(),
        )


class _State:
    """The items that are still on their owners, what has moved, and the loads."""

    def __init__(self, config: ScheduleConfig, placement: Placement, mask: Mask) -> None:
        self._config, self._mask = config, mask
        self._document, self._owner = placement.document, placement.rank
        # Head and tail meet on a block, so that either may be cut off there; or at the end.
        middle = (placement.start + placement.end) // (2 * config.block) * config.block
        middle = np.where(middle <= placement.start, placement.end, middle)
        self._h0, self._h1 = placement.start.copy(), middle.copy()
        self._t1, self._t0 = middle.copy(), placement.end.copy()
        self._load = self._loads(self._all())
        self._server_load = np.bincount(
            self._owner, weights=self._load, minlength=placement.world_size
        )
        self._mean = float(self._server_load.mean())
        # document, start, end, server of the query ranges that moved
        self._moved: list[tuple[int, int, int, int]] = []

    def _all(self) -> _Parts:
        return _Parts(self._h0, self._h1, self._t1, self._t0)

    def _loads(self, parts: _Parts) -> Floats:
        """The load of each part: its head and its tail as one task each."""
        total = np.zeros(len(parts.h0))
        for start, end in ((parts.h0, parts.h1), (parts.t1, parts.t0)):
            first = self._mask.first_key(start)
            pairs = self._mask.pairs(start, end, first, end)
            if self._config.cost_model is None:
                total += pairs
            else:
                seconds = self._config.cost_model.seconds(end - start, end - first, pairs)
                total += np.where(end > start, seconds, 0.0)
        return total

    def _bytes(self, parts: _Parts) -> Floats:
        """Appendix B's cost of moving each part with all the keys it sees."""
        shape = self._config.shape
        head_from, tail_from = self._mask.first_key(parts.h0), self._mask.first_key(parts.t1)
        separate = (parts.h1 - head_from) + (parts.t0 - tail_from)
        together = parts.t0 - np.minimum(head_from, tail_from)
        keys = np.where(tail_from <= parts.h1, together, separate)
        keys = np.where(parts.h1 == parts.h0, parts.t0 - tail_from, keys)
        keys = np.where(parts.t1 == parts.t0, parts.h1 - head_from, keys)
        row = 2 * shape.q_row_bytes + shape.lse_row_bytes
        return parts.rows * float(row) + keys * float(shape.kv_row_bytes)

    def _inner(self, items: Int64s, share: Floats) -> _Parts:
        """The inner part of each item that holds about a share of its load, cut on blocks."""
        block = self._config.block
        h0, h1, t1, t0 = self._h0[items], self._h1[items], self._t1[items], self._t0[items]
        # Half of the rows from each side, as far as a side reaches.
        rows = share * (h1 - h0 + t0 - t1) / 2
        head = np.rint((h1 - rows) / block).astype(np.int64) * block
        tail = np.rint((t1 + rows) / block).astype(np.int64) * block
        # A cut at or past an end is no cut: the part then reaches to the end.
        head = np.where((head <= h0) | (share >= 1), h0, np.minimum(head, h1))
        tail = np.where((tail >= t0) | (share >= 1), t0, np.maximum(tail, t1))
        return _Parts(head, h1, t1, tail)

    def fill_deficits(self) -> None:
        """Serves the servers below the mean, the emptiest first."""
        order = np.argsort(self._server_load, kind="stable")
        for server in order:
            while self._server_load[server] < self._mean * (1 - self._config.tolerance):
                if not self._move_best_to(int(server)):
                    break

    def relieve_donors(self) -> None:
        """Takes from the servers that are still above the tolerance."""
        above = self._mean * (1 + self._config.tolerance)
        while self._server_load.max(initial=0.0) > above:
            if not self._move_best_to(int(self._server_load.argmin()), only_above=above):
                break

    def _move_best_to(self, server: int, only_above: float | None = None) -> bool:
        """Moves the share with the most load for its bytes to a server; False if none gains."""
        surplus = self._server_load - self._mean
        deficit = -float(surplus[server])
        donors = self._server_load > (self._mean if only_above is None else only_above)
        items = np.flatnonzero(donors[self._owner] & (self._load > 0))
        least = _LEAST_GAIN * self._mean
        if len(items) == 0 or deficit <= least:
            return False
        load = self._load[items]
        most = np.minimum(np.minimum(load, surplus[self._owner[items]]), deficit)
        part = self._inner(items, most / load)
        gain = self._loads(part)
        # Rounded to blocks a part may be larger than it should: it must still be an improvement.
        donor = self._server_load[self._owner[items]]
        after = np.maximum(donor - gain, self._server_load[server] + gain)
        useful = (gain > least) & (donor - after > least)
        if not useful.any():
            return False
        score = np.where(useful, gain / np.maximum(self._bytes(part), 1.0), -1.0)
        best = int(score.argmax())
        self._move(int(items[best]), part, best, server)
        return True

    def _move(self, item: int, parts: _Parts, column: int, server: int) -> None:
        head, tail = int(parts.h0[column]), int(parts.t0[column])
        document = int(self._document[item])
        ranges = ((head, int(self._h1[item])), (int(self._t1[item]), tail))
        self._moved += [(document, start, end, server) for start, end in ranges if end > start]
        one = np.array([item])
        self._h1[item], self._t1[item] = head, tail
        left = float(self._loads(self._select(one))[0])
        moved = _Parts(*(column_[column : column + 1] for column_ in _columns(parts)))
        self._server_load[self._owner[item]] += left - self._load[item]
        self._server_load[server] += float(self._loads(moved)[0])
        self._load[item] = left

    def _select(self, items: Int64s) -> _Parts:
        return _Parts(self._h0[items], self._h1[items], self._t1[items], self._t0[items])

    def tasks(self) -> Tasks:
        """All query ranges over all their keys, neighbours on one server joined."""
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

    def notes(self) -> tuple[str, ...]:
        """Says it when a server is left above the tolerance."""
        worst = float(self._server_load.max(initial=0.0))
        if self._mean == 0 or worst <= self._mean * (1 + self._config.tolerance):
            return ()
        return (
            f"the busiest server is at {worst / self._mean:.3f} times the mean load, above the "
            f"tolerance of {self._config.tolerance}: no cut on a block of {self._config.block} "
            "tokens brings it down",
        )


def _columns(parts: _Parts) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    return parts.h0, parts.h1, parts.t1, parts.t0
