"""Resources with occupancy: each rank's compute, and its four ports.

Every rank runs the same program, so its next event never depends on a time. That is why this
discrete-event simulation needs no queue of events: each event of the program is worked out for all
ranks at once, in the program's order, and a resource serves its uses in that order.

**Ports.** A rank has a port out and a port in to the links of its node, and the same to the network
(full duplex). The messages that a rank sends in an exchange share its port out and leave together;
messages that it receives share its port in:

* a port out is busy from when the rank starts the exchange (or the port is free) for its bytes over
  its speed; then all the rank's messages of that kind have left;
* a port in carries a message once its sender's port out begins with it: of any message and all that
  begin later the bytes have yet to pass, so the port is busy until the last of these times (and for
  all bytes since it was free);
* an exchange is over for a rank when all its outgoing messages have left, all its incoming ones
  have left their senders and passed its port in, and a latency later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distca.cost.link import Links
from distca.cost.volume import Messages
from distca.plan.span import Floats, Int64s
from distca.simulate.charges import end_of_compute
from distca.simulate.cluster import Cluster

NODE, NETWORK = 0, 1


@dataclass(frozen=True)
class Transfer:
    """The bytes of an exchange, worked out once for all its uses.

    Attributes:
        bytes_sent: bytes that each rank sends, `[ranks]`.
        bytes_received: bytes that each rank receives, `[ranks]`.
        out_seconds: time that each port out is busy, `[2, ranks]`: node and network.
        in_seconds: time that each port in is busy, `[2, ranks]`.
        source: sender of each message, ordered by destination and kind, `[messages]`.
        kind: NODE or NETWORK for each message, `[messages]`.
        seconds: time that each message takes, `[messages]`.
        destinations: ranks that receive, rising.
        firsts: number of the first message to each destination.
        port: number of each message's port in among the used ones, `[messages]`.
        ports: kind and rank of each used port in, `[2, ports]`.
        port_firsts: number of the first message to each used port in.
    """

    bytes_sent: Int64s
    bytes_received: Int64s
    out_seconds: Floats
    in_seconds: Floats
    source: Int64s
    kind: Int64s
    seconds: Floats
    destinations: Int64s
    firsts: Int64s
    port: Int64s
    ports: Int64s
    port_firsts: Int64s

    @staticmethod
    def of_messages(messages: Messages, links: Links) -> Transfer:
        """Makes a transfer of messages; empty ones are none."""
        there = np.flatnonzero(messages.sizes)
        source, destination = messages.source[there], messages.destination[there]
        sizes, ranks = messages.sizes[there], messages.world_size
        kind = (links.node(source) != links.node(destination)).astype(int)
        order = np.lexsort((source, kind, destination))
        destination, source, kind = destination[order], source[order], kind[order]
        seconds = sizes[order] / (links.gb_per_s(source, destination) * 1e9)
        out_seconds, in_seconds = np.zeros((2, ranks)), np.zeros((2, ranks))
        np.add.at(out_seconds, (kind, source), seconds)
        np.add.at(in_seconds, (kind, destination), seconds)
        destinations, firsts = np.unique(destination, return_index=True)
        ports, port_firsts, port = np.unique(
            2 * destination + kind, return_index=True, return_inverse=True
        )
        return Transfer(
            messages.sent(),
            messages.received(),
            out_seconds,
            in_seconds,
            source,
            kind,
            seconds,
            destinations,
            firsts,
            port,
            np.stack([ports % 2, ports // 2]),
            port_firsts,
        )


@dataclass
class Span:
    """Work of a rank from one moment to another, for a trace like `distca.runtime.trace`'s."""

    rank: int
    lane: str
    name: str
    start: float
    end: float
    args: dict[str, Any]


@dataclass
class Resources:
    """State of all ranks' compute and ports, as the module describes them.

    Attributes:
        ranks: number of ranks.
        cluster: latencies and rates of copying.
        speeds: relative speed of each rank's compute, `[ranks]`.
        recording: keep spans.
        clock: time at which each rank's compute is free, seconds, `[ranks]`.
        computed: seconds that each rank's compute was busy so far, `[ranks]`.
        exposed: seconds that each rank's compute waited for exchanges so far, `[ranks]`.
        sent: bytes that each rank has sent, `[ranks]`, by phase of the exchange.
        received: bytes that each rank has received, `[ranks]`, by phase of the exchange.
        held: seconds that messages have taken of each rank's ports out and in, to its node and to
            the network, `[4, ranks]`.
        spans: recorded spans of all ranks.
        labels: labels that every new span gets.
    """

    ranks: int
    cluster: Cluster
    speeds: Floats
    recording: bool = False
    clock: Floats = field(init=False)
    computed: Floats = field(init=False)
    exposed: Floats = field(init=False)
    held: Floats = field(init=False)
    sent: dict[str, Int64s] = field(default_factory=dict)
    received: dict[str, Int64s] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    labels: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock, self.computed, self.exposed = (np.zeros(self.ranks) for _ in range(3))
        self._out, self._in = np.zeros((2, self.ranks)), np.zeros((2, self.ranks))
        self.held = np.zeros((4, self.ranks))
        cluster = self.cluster
        self._latency = np.array([cluster.node_latency, cluster.network_latency])

    def compute(self, seconds: Floats, name: str = "", lane: str = "", **labels: Any) -> None:
        """Lets each rank compute: seconds at speed 1 when no exchange interferes, `[ranks]`."""
        start = self.clock
        busy_until = np.maximum(self._out.max(axis=0), self._in.max(axis=0))
        interference = self.cluster.charges.interference
        self.clock = end_of_compute(start, seconds / self.speeds, busy_until, interference)
        self.computed += self.clock - start
        if name:
            self._record(name, lane, start, self.clock, labels)

    def wait(self, until: Floats, name: str = "", **labels: Any) -> None:
        """Lets each rank wait until an exchange is over for it, `[ranks]`."""
        start = self.clock
        self.clock = np.maximum(start, until)
        self.exposed += self.clock - start
        if name:
            self._record(name, "exchange", start, self.clock, labels)

    def exchange(self, moved: Transfer, phase: str) -> Floats:
        """Starts an exchange now; returns when it is over for each rank, `[ranks]`."""
        start = self.clock
        out = moved.out_seconds > 0
        begins = np.maximum(self._out, start)
        self._out = np.where(out, begins + moved.out_seconds, self._out)
        over = np.maximum(start, np.where(out, self._out, 0.0).max(axis=0))
        if len(moved.source):
            comes = moved.in_seconds > 0
            self._in = self._in + moved.in_seconds
            used = tuple(moved.ports)
            self._in[used] = np.maximum(self._in[used], self._last_to_pass(moved, begins))
            passed = np.where(comes, self._in + self._latency[:, None], 0.0).max(axis=0)
            left = self._out[moved.kind, moved.source] + self._latency[moved.kind]
            passed[moved.destinations] = np.maximum(
                passed[moved.destinations], np.maximum.reduceat(left, moved.firsts)
            )
            over = np.maximum(over, passed)
        self.held += np.concatenate([moved.out_seconds, moved.in_seconds])
        self._count(moved, phase)
        return over

    @staticmethod
    def _last_to_pass(moved: Transfer, begins: Floats) -> Floats:
        """Time at which each used port in has passed all, had it been free before, `[ports]`.

        Args:
            moved: bytes of the exchange.
            begins: time at which each port out begins, `[2, ranks]`.
        """
        last_first = np.empty(begins.size, dtype=np.int64)
        last_first[np.argsort(-begins, axis=None)] = np.arange(begins.size)
        sender = moved.kind * begins.shape[1] + moved.source
        # Each port's messages, the last one to begin first.
        order = np.argsort(moved.port * begins.size + last_first[sender])
        seconds = moved.seconds[order]
        total = np.cumsum(seconds)
        before = (total - seconds)[moved.port_firsts]
        passed = begins.ravel()[sender[order]] + total - before[moved.port]
        last: Floats = np.maximum.reduceat(passed, moved.port_firsts)
        return last

    def _count(self, moved: Transfer, phase: str) -> None:
        zeros = np.zeros(self.ranks, dtype=np.int64)
        self.sent[phase] = self.sent.get(phase, zeros) + moved.bytes_sent
        self.received[phase] = self.received.get(phase, zeros) + moved.bytes_received

    def barrier(self, groups: Sequence[Int64s], seconds: Sequence[float]) -> None:
        """Lets each group of ranks wait for its last member, and then for its seconds."""
        start = self.clock.copy()
        for members, each in zip(groups, seconds, strict=True):
            self.clock[members] = self.clock[members].max() + each
        self._record("gradients", "pipeline", start, self.clock, {})

    def copy_seconds(self, nbytes: Int64s) -> Floats:
        """Seconds to gather or scatter bytes, each of which is read and written."""
        return self.traffic_seconds(2 * nbytes)

    def traffic_seconds(self, nbytes: Int64s) -> Floats:
        """Seconds to read or write bytes of memory."""
        return nbytes.astype(np.float64) / self.cluster.copied_bytes_per_second

    def record_since(self, name: str, lane: str, start: Floats, **labels: Any) -> None:
        """Records a span of every rank from a moment until now."""
        self._record(name, lane, start, self.clock, labels)

    def _record(
        self, name: str, lane: str, start: Floats, end: Floats, labels: dict[str, Any]
    ) -> None:
        if not self.recording:
            return
        for rank in np.flatnonzero(end > start).tolist():
            args = self.labels | labels
            self.spans.append(Span(rank, lane, name, float(start[rank]), float(end[rank]), args))
