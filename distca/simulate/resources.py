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
from functools import cached_property

import numpy as np

from distca.cost.link import Links
from distca.cost.volume import Messages
from distca.plan.span import Bools, Floats, Int64s, order_by
from distca.simulate.charges import end_of_compute
from distca.simulate.cluster import Cluster


@dataclass(frozen=True)
class Transfer:
    """The bytes of an exchange, worked out once for all its uses.

    Messages are ordered by destination and kind. Ports have the same numbers in both directions:
    those to the node by rank, then those to the network.

    Attributes:
        bytes_sent: bytes that each rank sends, `[ranks]`.
        seconds_of_ports: time that each port is busy, `[4, ranks]`: out to the node and to the
            network, in from the node and from the network.
        out_port: number of each message's port out, `[messages]`.
        seconds: time that each message takes, `[messages]`.
        destinations: ranks that receive, rising.
        firsts: number of the first message to each destination.
        port: number of each message's port in among the used ones, `[messages]`.
        ports: numbers of the used ports in, `[ports]`.
        port_firsts: number of the first message to each used port in.
    """

    bytes_sent: Int64s
    seconds_of_ports: Floats
    out_port: Int64s
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
        kind = links.node(source) != links.node(destination)
        order = order_by(destination, kind, source)
        destination, source, kind = destination[order], source[order], kind[order]
        seconds = sizes[order] / (links.gb_per_s(source, destination) * 1e9)
        out_port, in_port = kind * ranks + source, kind * ranks + destination
        seconds_of_ports = np.zeros((4, ranks))
        np.add.at(seconds_of_ports[:2].reshape(-1), out_port, seconds)
        np.add.at(seconds_of_ports[2:].reshape(-1), in_port, seconds)
        # Messages to a destination, and those through a port, follow each other.
        firsts, port_firsts = (
            np.flatnonzero(np.diff(by, prepend=-1)) for by in (destination, in_port)
        )
        return Transfer(
            messages.sent(),
            seconds_of_ports,
            out_port,
            seconds,
            destination[firsts],
            firsts,
            np.cumsum(np.diff(in_port, prepend=-1) != 0) - 1,
            in_port[port_firsts],
            port_firsts,
        )

    @property
    def out_seconds(self) -> Floats:
        """Time that each port out is busy, `[2, ranks]`: to the node and to the network."""
        return self.seconds_of_ports[:2]

    @property
    def in_seconds(self) -> Floats:
        """Time that each port in is busy, `[2, ranks]`."""
        return self.seconds_of_ports[2:]

    @cached_property
    def messages_sent(self) -> Int64s:
        """Messages that each rank sends, `[ranks]`."""
        ranks = len(self.bytes_sent)
        return np.bincount(self.out_port % ranks, minlength=ranks)

    @cached_property
    def sorted_by_port(self) -> Int64s:
        """Numbers by which messages lie in the order of their ports in, `[messages]`: the last bits
        are a message's own number, and those before leave room for that of its port out."""
        keys = self.port * self.out_seconds.size << len(self.port).bit_length()
        return keys | np.arange(len(self.port))

    @cached_property
    def used(self) -> Bools:
        """Whether each port is used, `[4, ranks]`."""
        return self.seconds_of_ports > 0


@dataclass
class Span:
    """Work of a rank from one moment to another, for a trace like `distca.runtime.trace`'s."""

    rank: int
    lane: str
    name: str
    start: float
    end: float
    args: dict[str, object]


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
        between: bytes that each rank has sent to each other in exchanges, `[ranks, ranks]`, if
            spans are kept.
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
    between: Int64s | None = field(init=False, default=None)
    spans: list[Span] = field(default_factory=list)
    labels: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock, self.computed, self.exposed = (np.zeros(self.ranks) for _ in range(3))
        self._out, self._in = np.zeros((2, self.ranks)), np.zeros((2, self.ranks))
        self.held = np.zeros((4, self.ranks))
        if self.recording:
            self.between = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        cluster = self.cluster
        self._latency = np.array([[cluster.node_latency], [cluster.network_latency]])
        self._busy_until = np.zeros(self.ranks)

    def compute(self, seconds: Floats, name: str = "", lane: str = "", **labels: object) -> None:
        """Lets each rank compute: seconds at speed 1 when no exchange interferes, `[ranks]`."""
        start, interference = self.clock, self.cluster.charges.interference
        self.clock = end_of_compute(start, seconds / self.speeds, self._busy_until, interference)
        self.computed += self.clock - start
        if name:
            self._record(name, lane, start, self.clock, labels)

    def wait(self, until: Floats, name: str = "", **labels: object) -> None:
        """Lets each rank wait until an exchange is over for it, `[ranks]`."""
        start = self.clock
        self.clock = np.maximum(start, until)
        self.exposed += self.clock - start
        if name:
            self._record(name, "exchange", start, self.clock, labels)

    def exchange(self, moved: Transfer, phase: str, by_copy_engines: bool = False) -> Floats:
        """Starts an exchange now; returns when it is over for each rank, `[ranks]`.

        Args:
            moved: bytes of the exchange.
            phase: its name.
            by_copy_engines: whether it takes no compute, but a launch for each message.
        """
        start = self.clock
        if by_copy_engines:
            start = start + self.cluster.launch_seconds * moved.messages_sent
        sends, comes = moved.used[:2], moved.used[2:]
        begins = np.maximum(self._out, start)
        self._out = np.where(sends, begins + moved.out_seconds, self._out)
        over = np.maximum(start, np.maximum(*np.where(sends, self._out, 0.0)))
        if len(moved.out_port):
            self._in = self._in + moved.in_seconds
            ports = self._in.reshape(-1)
            last = self._last_to_pass(moved, begins.reshape(-1))
            ports[moved.ports] = np.maximum(ports[moved.ports], last)
            passed = np.maximum(*np.where(comes, self._in + self._latency, 0.0))
            left = (self._out + self._latency).reshape(-1)[moved.out_port]
            passed[moved.destinations] = np.maximum(
                passed[moved.destinations], np.maximum.reduceat(left, moved.firsts)
            )
            over = np.maximum(over, passed)
            if not by_copy_engines:
                self._busy_until = np.maximum(np.maximum(*self._out), np.maximum(*self._in))
        self.held += moved.seconds_of_ports
        self.sent.setdefault(phase, np.zeros(self.ranks, dtype=np.int64))
        self.sent[phase] += moved.bytes_sent
        if self.between is not None:
            self.between += self._bytes_between(moved)
        return over

    def _bytes_between(self, moved: Transfer) -> Int64s:
        """Bytes that each rank sends to each other in an exchange, `[ranks, ranks]`."""
        kind, source = np.divmod(moved.out_port, self.ranks)
        messages = np.diff(moved.firsts, append=len(source))
        destination = np.repeat(moved.destinations, messages)
        speeds = self.cluster.node_bytes_per_second, self.cluster.network_bytes_per_second
        sizes = np.rint(moved.seconds * np.array(speeds)[kind])
        found = np.bincount(source * self.ranks + destination, sizes, self.ranks**2)
        return found.astype(np.int64).reshape(self.ranks, self.ranks)

    @staticmethod
    def _last_to_pass(moved: Transfer, begins: Floats) -> Floats:
        """Time at which each used port in has passed all, had it been free before, `[ports]`.

        Args:
            moved: bytes of the exchange.
            begins: time at which each port out begins, `[2 * ranks]`.
        """
        last_first = np.empty(len(begins), dtype=np.int64)
        last_first[np.argsort(-begins)] = np.arange(len(begins))
        # Each port's messages, the last one to begin first.
        bits, keys = len(moved.port).bit_length(), moved.sorted_by_port
        keys = keys + (last_first << bits)[moved.out_port]
        keys.sort()
        order = keys & ((1 << bits) - 1)
        seconds = moved.seconds[order]
        total = np.cumsum(seconds)
        before = (total - seconds)[moved.port_firsts]
        passed = begins[moved.out_port[order]] + total - before[moved.port]
        last: Floats = np.maximum.reduceat(passed, moved.port_firsts)
        return last

    def meet(self, groups: Int64s) -> None:
        """Lets each group of ranks, `[groups, members]`, wait for its last member."""
        until = self.clock.copy()
        until[groups] = until[groups].max(axis=1, keepdims=True)
        self.wait(until)

    def barrier(self, groups: Sequence[Int64s], seconds: Sequence[float]) -> None:
        """Lets each group of ranks wait for its last member, and then for its seconds."""
        start = self.clock.copy()
        for members, each in zip(groups, seconds, strict=True):
            self.clock[members] = self.clock[members].max() + each
        self._record("gradients", "pipeline", start, self.clock, {})

    def copy_seconds(self, nbytes: Int64s) -> Floats:
        """Returns the seconds to gather or scatter bytes, each of which is read and written."""
        return self.traffic_seconds(2 * nbytes)

    def traffic_seconds(self, nbytes: Int64s) -> Floats:
        """Returns the seconds to read or write bytes of memory."""
        return self.cluster.traffic_seconds(nbytes)

    def record_since(self, name: str, lane: str, start: Floats, **labels: object) -> None:
        """Records a span of every rank from a moment until now."""
        self._record(name, lane, start, self.clock, labels)

    def _record(
        self, name: str, lane: str, start: Floats, end: Floats, labels: dict[str, object]
    ) -> None:
        if not self.recording:
            return
        for rank in np.flatnonzero(end > start).tolist():
            args = self.labels | labels
            self.spans.append(Span(rank, lane, name, float(start[rank]), float(end[rank]), args))
