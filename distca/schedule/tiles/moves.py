"""Moving tiles of attention between servers until none is above the tolerance.

The imbalance that a placement leaves is moved as *tiles*: `x` query rows by `y` key rows of a task.
A tile whose rows all travel costs `x * w_q + y * w_kv` bytes (`w_q`: a query row, its output and
LSE; `w_kv`: a key and a value row) for `x * y` pairs, least at `x * w_q = y * w_kv`. Keys that the
recipient has, because it owns them or because another of its tasks needs them, cost nothing: then
queries alone travel.

**Who gives to whom.** The server furthest above its limit, `(1 + tolerance) * target`, gives, and
no more than it takes to be below: within the tolerance a byte buys nothing. Possible recipients are
servers that already hold keys of its heaviest documents, and the emptiest servers. Every pair of a
task and a recipient is priced:

* a slice of the task's last rows, over the keys that the recipient holds (all of the task's, or the
  longest range of them), so that queries alone travel;
* a tile of the last rows by the first keys, in the proportion above.

The price is the seconds on the links of the two servers (cheaper within a node than between nodes),
weighed by how busy these links are already, over the load that moves. The cheapest tile is taken,
cut on blocks; nothing is cut below `least_rows` rows or keys, where the kernel runs badly. A
recipient is never filled above its target, nor beyond the bytes that its arena holds.

Up to three tasks remain of a task: the rows before the tile, and the tile's rows over the keys
before and after it. All are full rectangles or end on the diagonal.

Prices are estimates (they assume that all keys come from the giver, and that tiles share only what
the recipient holds); loads are exact, as are the bytes that `distca.cost.volume` counts in the
end. A move takes some hundred microseconds whatever the number of servers, since it looks at few
tasks (`_TASKS`) and recipients (`_RECIPIENTS`, `_HOLDERS`).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from distca.plan import Plan, Tasks
from distca.plan.span import Floats, Int64s, order_by
from distca.schedule.base import ScheduleConfig, level_load, task_loads
from distca.schedule.tiles.spans import Span, SpanCutter, Task

_TASKS = 3
"""Number of a giver's tasks that are considered for a move, those with the largest loads."""
_RECIPIENTS = 2
"""Number of the emptiest servers that are considered, besides those that hold keys."""
_HOLDERS = 3
"""Number of servers with keys of a document that are considered, the emptiest of them."""
_MARGIN = 0.005
"""Part of the limit by which givers are brought below it, to allow for rounding to blocks."""
_ROUNDING = 1e-9
"""Allowance for the rounding of prices and of pairs."""
_MOVES_PER_SERVER = 30
"""Most moves for each server, in case moving does not end by itself."""


class _Tile(NamedTuple):
    """A span of a giver's task, with its price and recipient, which must receive `kv_rows`."""

    price: float
    task: int
    recipient: int
    span: Span
    kv_rows: int


class _Given(NamedTuple):
    """A task that tiles are cut from.

    Attributes:
        server: its server, the giver.
        number: its number among the giver's tasks.
        task: the task.
        surplus: load that the giver has too much.
        travelling: spans whose rows all travel, by their pairs.
    """

    server: int
    number: int
    task: Task
    surplus: float
    travelling: dict[float, Span | None]


def balance(
    plan: Plan,
    config: ScheduleConfig,
    traffic: Floats,
    buffered: Floats,
    busy: Floats | None = None,
    pools: Int64s | None = None,
    sources: Int64s | None = None,
) -> Tasks:
    """Moves tiles until no server is above `(1 + tolerance)` times its target, or none helps.

    Args:
        plan: a valid plan.
        config: tolerance, cost model, shape, links and bounds.
        traffic: seconds that each rank's link is busy with these tasks, `[ranks]`.
        buffered: bytes that each server receives to compute them, `[ranks]`.
        busy: seconds in which each server computes something else, which cannot move, `[ranks]`,
            or None.
        pools: number of each server's pool, from 0 on, int64 `[ranks]`: tiles move inside a pool
            alone, and each has a target of its own. None: there is one.
        sources: rank that sends a document's rows, int64 `[documents]`; None: the giver does.
    """
    return _Mover(plan, config, traffic, buffered, busy, pools, sources).run()


class _Mover:
    def __init__(
        self,
        plan: Plan,
        config: ScheduleConfig,
        traffic: Floats,
        buffered: Floats,
        busy: Floats | None,
        pools: Int64s | None,
        sources: Int64s | None,
    ) -> None:
        self._plan, self._config = plan, config
        self._sources = None if sources is None else sources.tolist()
        tasks, mask = plan.tasks, plan.mask
        self._tasks, self._mask = tasks, mask
        shape = config.shape
        self._q_bytes = shape.round_trip_bytes
        self._kv_bytes = shape.moved_kv_row_bytes
        self._all_pairs = tasks.pairs(mask)
        self._all_loads = task_loads(tasks, mask, config.cost_model, self._all_pairs)
        servers = plan.world_size
        speeds = config.speeds_of(servers)
        loads = np.bincount(tasks.server, weights=self._all_loads, minlength=servers) / speeds
        self._busy: list[float] = [0.0] * servers if busy is None else busy.tolist()
        self._loads: list[float] = (loads if busy is None else loads + busy).tolist()
        self._speeds: list[float] = speeds.tolist()
        self._pool: list[int] = [0] * servers if pools is None else pools.tolist()
        self._pools = max(self._pool) + 1
        # The servers of each pool, the emptiest first; of equal ones those with lower numbers.
        self._by_load: list[list[tuple[float, int]]] = [[] for _ in range(self._pools)]
        for load, server in sorted((load, server) for server, load in enumerate(self._loads)):
            self._by_load[self._pool[server]].append((load, server))
        self._targets = [level_load(float(self._all_loads.sum()), speeds, busy)]
        if pools is not None:
            waits, shared = np.zeros(servers) if busy is None else busy, loads * speeds
            self._targets = [
                level_load(float(shared[each].sum()), speeds[each], waits[each])
                for each in (pools == pool for pool in range(self._pools))
            ]
        self._limits = [target * (1 + config.tolerance) for target in self._targets]
        self._least = config.least_rows()
        self._spans = SpanCutter(config, mask, self._least)
        self._least_pairs = float(self._least**2)
        self._traffic: list[float] = traffic.tolist()
        # Seconds of each pool's busiest link.
        self._busiest = [0.0] * self._pools
        for pool, seconds in zip(self._pool, self._traffic, strict=True):
            self._busiest[pool] = max(self._busiest[pool], seconds)
        self._buffered: list[float] = buffered.tolist()
        by_server = order_by(tasks.server)
        self._server_edges: list[int] = np.searchsorted(
            tasks.server[by_server], np.arange(servers + 1)
        ).tolist()
        spans = (tasks.document, tasks.q_start, tasks.q_end, tasks.kv_start, tasks.kv_end)
        columns = (*spans, self._all_loads, self._all_pairs)
        # Columns of `Task`, sorted by server.
        self._columns = [*(column[by_server] for column in columns), by_server]
        # Tasks of the servers that were looked at, by server; those of all others are unchanged.
        self._touched: dict[int, list[Task]] = {}
        self._held: dict[int, dict[int, list[tuple[int, int]]]] = {}

    def run(self) -> Tasks:
        givers: list[list[tuple[float, int]]] = [[] for _ in range(self._pools)]
        for server, load in enumerate(self._loads):
            if load > self._limit(server):
                givers[self._pool[server]].append((-load, server))
        if any(givers):
            self._index_documents()
        for each in givers:
            heapq.heapify(each)
        moves = 0
        # Pools share no loads, so that each moves one tile a round: all that is counted with numpy
        # is counted for all pools at once.
        while any(givers) and moves < _MOVES_PER_SERVER * len(self._loads):
            chosen = []
            for each in filter(None, givers):
                _, server = heapq.heappop(each)
                tile = self._best_tile(server)
                if tile is not None:
                    chosen.append((server, tile))
            self._move(chosen)
            moves += len(chosen)
            for server, _ in chosen:
                if self._loads[server] > self._limit(server):
                    heapq.heappush(givers[self._pool[server]], (-self._loads[server], server))
        return self._result()

    def _sender(self, document: int, giver: int, recipient: int) -> int:
        """Returns the rank whose link a tile's rows take, from one server to another."""
        if self._sources is None or self._sources[document] == recipient:
            return giver
        return self._sources[document]

    def _limit(self, server: int) -> float:
        return self._limits[self._pool[server]]

    def _index_documents(self) -> None:
        """Indexes who holds keys of a document, but for its parent's: its owners, and the servers
        of tasks that have some."""
        placement, keys = self._plan.placement, self._plan.key_ranges
        document = np.concatenate([placement.document, keys.document])
        order, numbers = order_by(document), np.arange(len(self._plan.lengths) + 1)
        self._holder_edges = np.searchsorted(document[order], numbers)
        offset = self._plan.document_offsets[keys.document]
        columns = (
            np.concatenate([placement.rank, self._tasks.server[keys.task]]),
            np.concatenate([placement.start, keys.start - offset]),
            np.concatenate([placement.end, keys.end - offset]),
        )
        # A server, and the range of a document's keys that it has, sorted by document.
        self._holders_of_all = [column[order] for column in columns]

    def _tasks_of(self, server: int) -> list[Task]:
        if server not in self._touched:
            low, high = self._server_edges[server : server + 2]
            mine = (column[low:high].tolist() for column in self._columns)
            self._touched[server] = [*map(Task._make, zip(*mine, strict=True))]
        return self._touched[server]

    def _holders(self, document: int) -> dict[int, list[tuple[int, int]]]:
        """Returns the servers with keys of a document, and the joined ranges that they have."""
        held, prefix = self._holders_of_own(document), self._plan.cached_prefix
        if self._plan.parents is None or prefix is None:
            return held
        path, held = self._path(document), dict(held)
        for below, each in pairwise(path):
            # The document sees its parent's tokens up to where it branches off.
            until = int(prefix[below])
            for server, spans in self._holders_of_own(each).items():
                for start, end in spans:
                    if start < until:
                        held[server] = _joined(held.get(server, []), start, min(end, until))
        return held

    def _path(self, document: int) -> list[int]:
        """Lists a document, its parent, and so on."""
        path, parents = [document], self._plan.parents
        while parents is not None and parents[path[-1]] >= 0:
            path.append(int(parents[path[-1]]))
        return path

    def _hold(self, document: int, server: int, start: int, end: int) -> None:
        """Notes that a server has keys of a document."""
        for each in self._path(document):
            first = int(self._plan.inherited_lengths[each])
            if max(start, first) < end:
                held = self._holders_of_own(each)
                held[server] = _joined(held.get(server, []), max(start, first), end)
            end = min(end, first)

    def _holders_of_own(self, document: int) -> dict[int, list[tuple[int, int]]]:
        """Returns the same without the keys of the document's parent."""
        if document not in self._held:
            low, high = self._holder_edges[document], self._holder_edges[document + 1]
            columns = (column[low:high].tolist() for column in self._holders_of_all)
            held: dict[int, list[tuple[int, int]]] = {}
            for server, start, end in zip(*columns, strict=True):
                held[server] = _joined(held.get(server, []), start, end)
            self._held[document] = held
        return self._held[document]

    def _best_tile(self, server: int) -> _Tile | None:
        """Returns the best tile to move away from a server; None if there is none."""
        mine = self._tasks_of(server)
        loads = [task.load for task in mine]
        heaviest = sorted(range(len(mine)), key=loads.__getitem__, reverse=True)[:_TASKS]
        pool = self._pool[server]
        emptiest = [server for _, server in self._by_load[pool][:_RECIPIENTS]]
        surplus = self._loads[server] - self._limit(server) * (1 - _MARGIN)
        surplus *= self._speeds[server]
        best: _Tile | None = None
        for number in heaviest:
            task = mine[number]
            rows, keys = task.q_end - task.q_start, task.kv_end - task.kv_start
            if min(rows, keys) < self._least or task.load <= 0:
                continue
            held = self._holders(task.document)
            given = _Given(server, number, task, surplus, {})
            for recipient in dict.fromkeys([*self._emptiest_of(held, pool), *emptiest]):
                if recipient != server:
                    best = self._best_of(best, given, recipient, held.get(recipient, ()))
        return None if best is None or best.price == math.inf else best

    def _emptiest_of(self, servers: Collection[int], pool: int) -> list[int]:
        """Returns the servers with least load of some, in the order of all of a pool."""
        if self._pools > 1:
            servers = [server for server in servers if self._pool[server] == pool]
        by_load = self._by_load[pool]
        if len(servers) ** 2 < _HOLDERS * len(by_load):
            return [server for _, server in sorted((self._loads[s], s) for s in servers)[:_HOLDERS]]
        # If they are many, the first ones come soon.
        return list(islice((s for _, s in by_load if s in servers), _HOLDERS))

    def _best_of(
        self,
        best: _Tile | None,
        given: _Given,
        recipient: int,
        spans: Collection[tuple[int, int]],
    ) -> _Tile | None:
        """Finds the cheapest of a tile and those of a task for one recipient.

        Args:
            best: cheapest tile so far, or None.
            given: task to cut the tiles from.
            recipient: server that would get them.
            spans: ranges of the document's keys that the recipient has.
        """
        task, server = given.task, given.server
        free = self._targets[self._pool[recipient]] - self._loads[recipient]
        free *= self._speeds[recipient]
        if free * task.pairs < task.load * self._least_pairs:
            return best
        most = free * task.pairs / task.load
        pairs = max(min(given.surplus * task.pairs / task.load, most), self._least_pairs)
        low, high = 0, 0
        for start, end in spans:
            start = start if start > task.kv_start else task.kv_start
            end = end if end < task.kv_end else task.kv_end
            if end - start > high - low:
                low, high = start, end
        has_all = (low, high) == (task.kv_start, task.kv_end)
        sender = self._sender(task.document, server, recipient)
        per_byte = self._config.links.seconds_per_byte(sender, recipient)
        # No tile has a lower price than its bytes a pair, at least: most are not worth cutting.
        limit = math.inf if best is None else best.price * (1 + _ROUNDING)
        choices: list[tuple[Span | None, bool]] = []
        if per_byte * self._q_bytes < limit * (high - low):
            if has_all:
                choices.append((self._spans.last_rows(task, pairs), True))
            elif self._mask.window_left is None and high - low >= self._least:
                choices.append((self._spans.rectangle(task, pairs, low, high), True))
        least_bytes = 2 * (self._q_bytes * self._kv_bytes / pairs) ** 0.5
        if not has_all and per_byte * least_bytes < limit:
            # Often several recipients have room for all that the giver has too much.
            if pairs not in given.travelling:
                given.travelling[pairs] = self._spans.travelling(task, pairs)
            choices.append((given.travelling[pairs], False))
        for span, is_held in choices:
            if span is not None and span.pairs <= most * (1 + _ROUNDING):
                tile = self._priced(sender, given, recipient, span, is_held, pairs, per_byte)
                if best is None or tile.price < best.price:
                    best = tile
        return best

    def _priced(
        self,
        sender: int,
        given: _Given,
        recipient: int,
        span: Span,
        held_already: bool,
        pairs: float,
        per_byte: float,
    ) -> _Tile:
        """Prices a tile; the price is infinite if it does not fit the recipient's arena."""
        kv_rows = 0 if held_already else span.kv_end - span.kv_start
        rows = given.task.q_end - span.q_cut
        seconds = (rows * self._q_bytes + kv_rows * self._kv_bytes) * per_byte
        busy = max(self._traffic[sender], self._traffic[recipient]) + seconds
        busiest = max(busy, self._busiest[self._pool[recipient]])
        price = seconds * (1 + busy / busiest) / min(span.pairs, pairs)
        bound = self._config.max_buffer_bytes
        if bound is not None:
            more = self._arena_bytes(rows, kv_rows)
            if self._buffered[recipient] + more > bound:
                price = math.inf
        return _Tile(price, given.number, recipient, span, kv_rows)

    def _arena_bytes(self, q_rows: int, kv_rows: int) -> int:
        """Returns the bytes that the recipient of a tile stores to compute it."""
        return q_rows * self._config.shape.q_row_bytes + kv_rows * self._kv_bytes

    def _move(self, chosen: Sequence[tuple[int, _Tile]]) -> None:
        """Moves tiles of givers in different pools; the rest of their tasks stays with them."""
        cuts = [
            self._spans.cut(self._tasks_of(server)[tile.task], tile.span) for server, tile in chosen
        ]
        tasks = self._new_tasks([each for cut in cuts for each in cut])
        first = 0
        for (server, tile), cut in zip(chosen, cuts, strict=True):
            self._give(server, tile, tasks[first : first + len(cut)])
            first += len(cut)

    def _give(self, server: int, tile: _Tile, new: Sequence[Task]) -> None:
        """Gives a tile to its recipient.

        Args:
            server: giver.
            tile: what it gives.
            new: tasks in place of the tile's task: that of the tile, and those that stay.
        """
        mine = self._tasks_of(server)
        task, recipient, span = mine.pop(tile.task), tile.recipient, tile.span
        mine += new[1:]
        theirs = self._tasks_of(recipient)
        theirs.append(new[0])
        for place, tasks in ((server, mine), (recipient, theirs)):
            by_load = self._by_load[self._pool[place]]
            by_load.pop(bisect_left(by_load, (self._loads[place], place)))
            load = sum([t.load for t in tasks]) / self._speeds[place]
            self._loads[place] = load + self._busy[place]
            insort(by_load, (self._loads[place], place))
        self._hold(task.document, recipient, span.kv_start, span.kv_end)
        rows = task.q_end - span.q_cut
        moved = rows * self._q_bytes + tile.kv_rows * self._kv_bytes
        sender = self._sender(task.document, server, recipient)
        seconds = moved * self._config.links.seconds_per_byte(sender, recipient)
        for place in (sender, recipient):
            self._traffic[place] += seconds
            pool = self._pool[place]
            self._busiest[pool] = max(self._busiest[pool], self._traffic[place])
        self._buffered[recipient] += self._arena_bytes(rows, tile.kv_rows)

    def _new_tasks(self, spans: Sequence[tuple[int, int, int, int, int]]) -> list[Task]:
        """Makes tasks of spans `(document, q_start, q_end, kv_start, kv_end)`."""
        document, q_start, q_end, kv_start, kv_end = (
            np.array(spans, dtype=np.int64).reshape(-1, 5).T
        )
        tasks = Tasks(document, q_start, q_end, kv_start, kv_end, np.zeros_like(document))
        pairs = tasks.pairs(self._mask)
        loads = task_loads(tasks, self._mask, self._config.cost_model, pairs)
        rest = zip(spans, loads.tolist(), pairs.tolist(), strict=True)
        return [Task(*span, load, count) for span, load, count in rest]

    def _result(self) -> Tasks:
        if not self._touched:
            return self._tasks
        turn = np.full(len(self._loads), -1)
        turn[list(self._touched)] = np.arange(len(self._touched))
        rest = self._tasks[turn[self._tasks.server] < 0]
        here = [(task, server) for server, mine in self._touched.items() for task in mine]
        old = np.array([task.row for task, _ in here if task.row >= 0], dtype=np.int64)
        new = Tasks.from_rows((*task[:5], server) for task, server in here if task.row < 0)
        mine = Tasks.concatenate([self._tasks[old], new])
        # In the order of documents, as their owners have the rows.
        spans = (mine.document, mine.q_start, mine.q_end, mine.kv_start, mine.kv_end)
        return Tasks.concatenate([rest, mine[order_by(turn[mine.server], *spans)]])


def _joined(spans: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """Adds a span to disjoint, sorted ones; spans that touch are joined."""
    kept = []
    for low, high in spans:
        if high < start or end < low:
            kept.append((low, high))
        else:
            start, end = min(low, start), max(high, end)
    return sorted([*kept, (start, end)])
