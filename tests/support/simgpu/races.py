"""Finds accesses that nothing orders in the log of simulated GPUs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Clock = defaultdict[int, int]


class Record(NamedTuple):
    """See `Record` in `native/log.h`."""

    kind: str
    name: str
    device: int
    stream: int
    a: int
    b: int
    accesses: Sequence[Sequence[int]]


class _Use(NamedTuple):
    """One access of an allocation: bytes, whether written, and when on which stream."""

    begin: int
    end: int
    written: bool
    stream: int
    time: int
    name: str


@dataclass
class Counts:
    """What a part of a log asked for.

    Attributes:
        launches: operators, copies and graphs that the host started.
        syncs: how often the host waited, by reason and place.
        bytes_to_device: bytes of copies from the host.
        bytes_to_host: bytes of copies to the host.
        operators: launches by name.
    """

    launches: int = 0
    syncs: Counter[str] = field(default_factory=Counter)
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    operators: Counter[str] = field(default_factory=Counter)


def count(log: Iterable[Sequence[Any]]) -> Counts:
    """Counts launches, waits and bytes. What a capture only records is no launch."""
    found, captured = Counts(), False
    for each in log:
        record = Record(*each)
        if record.kind in ("capture_begin", "capture_end"):
            captured = record.kind == "capture_begin"
        elif record.kind == "sync":
            found.syncs[record.name] += 1
        elif record.kind in ("op", "copy", "replay") and not captured:
            found.launches += 1
            found.operators[record.name or record.kind] += 1
            if record.name == "to device":
                found.bytes_to_device += record.b
            elif record.name == "to host":
                found.bytes_to_host += record.b
    return found


def races(log: Iterable[Sequence[Any]]) -> list[str]:
    """Accesses of two streams to the same bytes, one of them a write, without an order.

    Each stream has a vector clock. An event carries the clock of its stream. A stream or the host
    that waits for the event takes that clock over. What the host starts comes after everything that
    the host has waited for. Memory that is freed while another stream may still use it goes to what
    its own stream does next. That is a race unless its stream waits before, or `record_stream` has
    told the allocator.
    """
    clocks: defaultdict[int, Clock] = defaultdict(lambda: defaultdict(int))
    host: Clock = defaultdict(int)
    events: dict[int, Clock] = {}
    uses: defaultdict[int, list[_Use]] = defaultdict(list)
    homes: dict[int, int] = {}
    kept: defaultdict[int, set[int]] = defaultdict(set)
    late: defaultdict[int, list[tuple[int, _Use]]] = defaultdict(list)
    found: list[str] = []
    captured = False

    def learn(of: Clock, other: Clock) -> None:
        for stream, time in other.items():
            of[stream] = max(of[stream], time)

    for each in log:
        record = Record(*each)
        stream, kind = record.stream, record.kind
        if kind in ("capture_begin", "capture_end"):
            captured = kind == "capture_begin"
        elif kind == "record":
            learn(clocks[stream], host)
            events[record.a] = clocks[stream].copy()
        elif kind == "wait":
            learn(clocks[stream], events.get(record.a, Clock(int)))
        elif kind == "sync":
            if record.name.startswith(("device", "nccl barrier")):
                for clock in list(clocks.values()):
                    learn(host, clock)
            elif record.name.startswith("event"):
                learn(host, events.get(record.a, Clock(int)))
            else:
                learn(host, clocks[stream])
        elif kind == "alloc":
            homes[record.a] = stream
            uses.pop(record.a, None)
            kept.pop(record.a, None)
        elif kind == "record_stream":
            kept[record.a].add(stream)
        elif kind == "free":
            home = homes.get(record.a, stream)
            late[home] += [
                (record.b, use)
                for use in uses.pop(record.a, [])
                if use.stream != home and use.stream not in kept[record.a]
            ]
        elif kind in ("op", "copy", "graph_op") and not captured:
            clock = clocks[stream]
            learn(clock, host)
            freed = {
                (size, use.name, use.stream)
                for size, use in late.pop(stream, [])
                if clock[use.stream] < use.time
            }
            found += [
                f"{size} bytes are freed while {name} of stream {other} may use them"
                for size, name, other in sorted(freed)
            ]
            clock[stream] += 1
            for base, begin, end, written in record.accesses:
                new = _Use(begin, end, bool(written), stream, clock[stream], record.name)
                found += _conflicts(new, uses[base], clock)
                if written:
                    uses[base] = [use for use in uses[base] if not _follows(new, use, clock)]
                uses[base].append(new)
    return found


def _follows(new: _Use, old: _Use, clock: Clock) -> bool:
    """Whether a write stands for an earlier access: whoever waits for it waits for both."""
    ordered = old.stream == new.stream or clock[old.stream] >= old.time
    return ordered and new.begin <= old.begin and old.end <= new.end


def _conflicts(new: _Use, olds: Iterable[_Use], clock: Clock) -> list[str]:
    return [
        f"{new.name} of stream {new.stream} {'writes' if new.written else 'reads'} bytes "
        f"[{new.begin}, {new.end}) without waiting for {old.name} of stream {old.stream}, which "
        f"{'writes' if old.written else 'reads'} [{old.begin}, {old.end})"
        for old in olds
        if old.stream != new.stream
        and (new.written or old.written)
        and new.begin < old.end
        and old.begin < new.end
        and clock[old.stream] < old.time
    ]
