"""The protocol of the device transport, executed by processes that share memory."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distca.transport import ChannelBytes, Pending, TransportError, shared_memory
from distca.transport.compiled import PROTOCOL, host_library
from distca.transport.shared_memory import SharedMemoryTransport
from support.exchanges import CHANNELS, Exchanges, Processes, sizes_of

Run = Callable[..., Processes]
WEAK = Path(__file__).parents[1] / "weak" / "puts.h"


@pytest.fixture
def run() -> Iterator[Run]:
    """Starts processes, and kills them in the end."""
    started: list[Processes] = []

    def start(function, *args, world_size: int) -> Processes:
        started.append(Processes(function, *args, world_size=world_size))
        return started[-1]

    yield start
    for processes in started:
        processes.close()


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Callable[..., Path]:
    """Builds the native code as it is ("strong") or with deferred puts, and with changes."""
    numbers = itertools.count()
    built: dict[tuple[str, ...], Path] = {}

    def build(*changes: str, weak: bool = False) -> Path:
        key = (*changes, str(weak))
        if key not in built:
            folder = tmp_path_factory.mktemp("protocol") / str(next(numbers))
            shutil.copytree(PROTOCOL, folder)
            if weak:
                shutil.copy(WEAK, folder / "puts.h")
            for change in changes:
                name, before, after = change
                text = (folder / name).read_text()
                assert text.count(before) == 1, f"{before!r} is not in {name} once"
                (folder / name).write_text(text.replace(before, after))
            built[key] = host_library(folder, tmp_path_factory.getbasetemp() / "built")
        return built[key]

    return build


def exchange(
    pipe: Connection, library: Path, exchanges: int, read_slowly: bool
) -> tuple[int, int, int]:
    """Wrong bytes, and the bytes that were counted."""
    transport = SharedMemoryTransport(dist.group.WORLD, timedelta(seconds=60), library)
    wrong = Exchanges(transport, read_slowly=read_slowly).run(exchanges)
    transport.close()
    return wrong, transport.bytes_sent.total(), transport.bytes_received.total()


def exchange_wrongly(pipe: Connection, library: Path) -> int:
    """Wrong bytes where the protocol is broken. Nothing is freed: late puts would hit it."""
    transport = SharedMemoryTransport(dist.group.WORLD, timedelta(seconds=2), library)
    made = Exchanges(transport, largest=150_000, read_slowly=True, reserve_often=False)
    return made.run(100)


@pytest.mark.parametrize("weak", [False, True], ids=["strong", "weak"])
@pytest.mark.parametrize(("world_size", "exchanges"), [(2, 3000), (4, 2000), (8, 1000)])
def test_ragged_exchanges(run: Run, library, world_size: int, exchanges: int, weak: bool) -> None:
    results = run(exchange, library(weak=weak), exchanges, weak, world_size=world_size).results()
    assert [wrong for wrong, *_ in results] == [0] * world_size, results
    sent, received = (sum(result[n] for result in results) for n in (1, 2))
    assert sent == received > 0


def test_one_rank_by_itself(run: Run, library) -> None:
    assert run(exchange, library(), 20, False, world_size=1).results() == [(0, 0, 0)]


# Ranks with odd numbers are sent to as peers on other machines are.
WHOLE = (
    (
        "host.h",
        "  void fence(int) {",
        "  void put_and_set(int peer, Word to, const char* from, Word bytes, Word flag, Word value)"
        " { put(peer, to, from, bytes); puts_.fence(); set(peer, flag, value); }\n"
        "  void fence(int) {",
    ),
    ("shared_memory.cpp", "parts = 1 +", "parts = peer % 2 ? 1 : 1 +"),
    (
        "shared_memory.cpp",
        "send_part(channel.sending, channel.flags, epoch, peer, message, part, parts)",
        "peer % 2 ? send_whole(channel.sending, channel.flags, epoch, peer, message) : "
        "send_part(channel.sending, channel.flags, epoch, peer, message, part, parts)",
    ),
)


def test_messages_whose_puts_carry_the_flag(run: Run, library) -> None:
    """`send_whole`, which GPUs use over networks, among messages in parts."""
    results = run(exchange, library(*WHOLE, weak=True), 100, True, world_size=3).results()
    assert [wrong for wrong, *_ in results] == [0, 0, 0]
    no_credit = ("exchange.h", "flags.credit(peer), epoch - 1", "flags.credit(peer), 0")
    changed = library(*WHOLE, no_credit, weak=True)
    results = run(exchange_wrongly, changed, world_size=3).results(timeout=40)
    assert any(isinstance(result, TransportError) or result > 0 for result in results), results


# As `NvshmemTransport` has the host start puts: each step for all peers before the next.
IN_TURN = (
    (
        "shared_memory.cpp",
        "  bool send(Channel& channel) {\n    const auto deadline = Clock::now() + timeout_;\n",
        """  bool send(Channel& channel) {
    const auto deadline = Clock::now() + timeout_;
    const int ranks = controls_.ranks();
    for (int peer = 0; peer < ranks; ++peer) {
      while (peer != controls_.rank()) {
        const Word epoch = channel.epochs[peer];
        channel.sending.wait_until(std::min(deadline, Clock::now() + kSlice));
        const Outcome outcome = wait_for_room(channel.sending, channel.flags, epoch, peer);
        if (outcome == Outcome::done) break;
        if (closing_) return false;
        if (outcome == Outcome::not_yet && Clock::now() < deadline) continue;
        fail(outcome, peer, true, channel.number, epoch);
        return false;
      }
    }
    for (int peer = 0; peer < ranks; ++peer) {
      const Message& message = channel.messages[peer];
      if (peer != controls_.rank()) {
        channel.sending.put(peer, message.to, message.from, message.bytes);
      }
    }
    channel.sending.fence(0);
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == controls_.rank()) continue;
      set_ready(channel.sending, channel.flags, channel.epochs[peer], peer);
    }
    return true;
  }

  bool send_in_parts(Channel& channel) {
    const auto deadline = Clock::now() + timeout_;
""",
    ),
)
IN_TURN_MUTANTS = {
    "no quiet": ("channel.sending.fence(0);", ""),
    "told before the puts": (
        "if (peer != controls_.rank()) {",
        "if (peer != controls_.rank()) {\n        set_ready(channel.sending, channel.flags, "
        "channel.epochs[peer], peer);",
    ),
    "no room": ("channel.flags, epoch, peer)", "channel.flags, 1, peer)"),
}


@pytest.mark.parametrize("weak", [False, True], ids=["strong", "weak"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_puts_that_the_host_starts(run: Run, library, world_size: int, weak: bool) -> None:
    """The order of `--distca-nvshmem-mode copy-engine`, and its steps of `exchange.h`."""
    made = library(*IN_TURN, weak=weak)
    results = run(exchange, made, 200, weak, world_size=world_size).results()
    assert [wrong for wrong, *_ in results] == [0] * world_size, results


@pytest.mark.parametrize("mutant", IN_TURN_MUTANTS)
def test_puts_that_the_host_starts_need_each_step(run: Run, library, mutant: str) -> None:
    ((name, before, after),) = IN_TURN
    was, becomes = IN_TURN_MUTANTS[mutant]
    assert after.count(was) == 1
    changed = library((name, before, after.replace(was, becomes)), weak=True)
    results = run(exchange_wrongly, changed, world_size=3).results(timeout=40)
    assert any(isinstance(result, TransportError) or result > 0 for result in results), results


MUTANTS = {
    "no fence": ("exchange.h", "fabric.fence(peer);", ""),
    "no credit": ("exchange.h", "flags.credit(peer), epoch - 1", "flags.credit(peer), 0"),
    "credit of the exchange before": (
        "exchange.h",
        "flags.credit(peer), epoch - 1",
        "flags.credit(peer), epoch > 1 ? epoch - 2 : 0",
    ),
    "ready before the last part": ("host.h", "if (++complete_[peer] < parts) return false;", ""),
    "ready before the message": (
        "exchange.h",
        "flags.ready(source), epoch",
        "flags.ready(source), epoch - 1",
    ),
    "no flag for an empty message": (
        "exchange.h",
        "if (fabric.last_part(peer, parts))",
        "if (fabric.last_part(peer, parts) && message.bytes)",
    ),
    "another rank's flag": (
        "exchange.h",
        "flags.ready(fabric.rank()), epoch",
        "flags.ready(peer), epoch",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(run: Run, library, mutant: str) -> None:
    """The tests above would not pass without any one of these."""
    changed = library(MUTANTS[mutant], weak=True)
    results = run(exchange_wrongly, changed, world_size=3).results(timeout=40)
    assert any(isinstance(result, TransportError) or result > 0 for result in results), results


def exchange_in_one_arena(pipe: Connection, library: Path) -> int:
    offsets = shared_memory.arena_offsets

    def of_first_slot(sizes):
        begins, end = offsets(sizes)
        return {channel: begins[channel._replace(slot=0)] for channel in begins}, end

    shared_memory.arena_offsets = of_first_slot
    return exchange_wrongly(pipe, library)


def test_an_arena_that_both_nano_batches_use_is_caught(run: Run, library) -> None:
    assert sum(run(exchange_in_one_arena, library(), world_size=3).results()) > 0


def start_before_the_peers(pipe: Connection) -> int:
    """Rank 0 starts two exchanges of one channel's epochs before the others do anything."""
    transport = SharedMemoryTransport(dist.group.WORLD, timedelta(seconds=30))
    transport.reserve(dict.fromkeys(CHANNELS, ChannelBytes(1 << 20, 1 << 20)))
    rank, matrix = transport.rank, np.full((3, 3), 100_000) - np.diag([100_000] * 3)
    sizes = sizes_of(matrix, rank)

    def start(channel, value: int):
        transport.staging(channel, sum(sizes.send)).fill_(value + rank)
        return transport.start("test", channel, sizes)

    first = [start(channel, 10) for channel in CHANNELS] if rank == 0 else []
    # The others go on only when rank 0 has started.
    dist.barrier()
    first = first or [start(channel, 10) for channel in CHANNELS]
    for pending in first:
        received = pending.wait()
        peers = [peer for peer in range(3) if peer != rank]
        assert [int(received[n * 100_000 + 99_999]) for n in (0, 1)] == [10 + p for p in peers]
    # Rank 1 has read nothing yet: who sends to it must wait for room, but `start` need not.
    if rank != 1:
        for pending in first:
            pending.release()
    second = [start(channel, 20) for channel in CHANNELS] if rank != 1 else []
    dist.barrier()
    if rank == 1:
        for channel, pending in zip(CHANNELS, first, strict=True):
            # What rank 1 has not released is as it was.
            assert int(pending.wait()[0]) == 10
            pending.release()
            second.append(start(channel, 20))
    for pending in second:
        assert int(pending.wait()[0]) == 20 + int(rank == 0)
        pending.release()
    transport.close()
    return rank


def test_starting_waits_for_nobody(run: Run) -> None:
    assert run(start_before_the_peers, world_size=3).results() == [0, 1, 2]


def seconds_until_arrival(pipe: Connection, library: Path, times: int) -> list[list[float]]:
    """From the start of rank 1's exchanges until rank 0, which slept, had them: when no other
    thread of it slept, and when one did."""
    transport = SharedMemoryTransport(dist.group.WORLD, timedelta(seconds=30), library)
    transport.reserve(dict.fromkeys(CHANNELS, ChannelBytes(8, 8)))
    rank, sizes = transport.rank, sizes_of(np.array([[0, 8], [8, 0]]), transport.rank)

    def start(channel) -> Pending:
        # The clock is the machine's.
        transport.staging(channel, 8).view(torch.int64)[0] = time.monotonic_ns()
        return transport.start("test", channel, sizes)

    def until_arrival() -> float:
        dist.barrier()
        # For rank 0 to fall asleep; if it does not, it is there sooner.
        time.sleep(0.1 * rank)
        pending = start(CHANNELS[0])
        sent = int(pending.wait().view(torch.int64)[0])
        seconds = (time.monotonic_ns() - sent) / 1e9
        # A release would wake, too.
        dist.barrier()
        pending.release()
        return seconds

    alone = [until_arrival() for _ in range(times)]
    first = start(CHANNELS[1])
    first.wait()
    if rank == 0:
        # Its sending thread waits for room at rank 1.
        first.release()
        start(CHANNELS[1])
    found = [alone, [until_arrival() for _ in range(times)]]
    transport.close()
    return found


def test_who_sleeps_is_woken(run: Run, library) -> None:
    """Long before it would look by itself: a nap is nearly a second here."""
    napping = library(("host.h", "kNap{20}", "kNap{900}"))
    results = run(seconds_until_arrival, napping, 3, world_size=2).results()
    assert (np.median(results[0], axis=1) < 0.4).all(), results


def exchange_until_it_fails(pipe: Connection, what: str) -> str:
    """Exchanges without end; after some, rank 1 is killed, closes, or does nothing more."""
    # Only idleness takes the whole timeout to be found out.
    timeout = timedelta(seconds=2 if what == "idle" else 60)
    transport = SharedMemoryTransport(dist.group.WORLD, timeout)

    def stop(number: int) -> None:
        if number != 50 or transport.rank != 1:
            return
        pipe.send(os.getpid())
        if what == "close":
            transport.close()
        time.sleep({"kill": 30, "close": 1, "idle": 4}[what])
        raise TransportError("this rank stopped")

    exchanges = Exchanges(transport, reserve_often=False, before=stop)
    try:
        exchanges.run(1_000_000)
    except TransportError as error:
        return str(error)
    return "no error"


FAULTS = {
    "kill": "the process of rank 1 has ended",
    "close": "rank 1 has closed its transport",
    "idle": "rank 1 did nothing for 2 s",
}


@pytest.mark.parametrize("what", FAULTS)
def test_who_stops_ends_the_others(run: Run, what: str) -> None:
    processes = run(exchange_until_it_fails, what, world_size=4)
    pid = processes.pipes[1].recv()
    if what == "kill":
        os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    messages = processes.results(timeout=20)
    assert time.monotonic() - killed < 15
    waited = (
        r"rank \d waited for (room at|the message of) rank (\d) in exchange \d+ of "
        r"channel '(?:dispatch|combine)' [01], but "
    )
    for rank in (0, 2, 3):
        found = re.match(waited + r"(rank \d ended the exchange: )?(.*)", messages[rank])
        assert found is not None, messages[rank]
        assert found[4] == FAULTS[what], messages[rank]
        # Who found it out waited for that rank itself.
        assert found[3] or found[2] == "1", messages[rank]


def fail_to_start(pipe: Connection, library: Path) -> str:
    try:
        SharedMemoryTransport(dist.group.WORLD, library=library)
    except TransportError as error:
        return str(error)
    return "no error"


def test_every_rank_says_why_it_cannot_start(run: Run, tmp_path) -> None:
    missing = tmp_path / "nothing.so"
    messages = run(fail_to_start, missing, world_size=2).results()
    assert len(set(messages)) == 1
    assert "nothing.so" in messages[0]


def elsewhere(pipe: Connection) -> str:
    rank = dist.get_rank()
    shared_memory.machine_id = lambda: f"machine {rank}"
    try:
        SharedMemoryTransport(dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return "no error"


def test_several_machines_are_refused(run: Run) -> None:
    messages = run(elsewhere, world_size=2).results()
    assert all("several machines" in message for message in messages), messages


def test_no_compiler_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler .* install one"):
        host_library()


def test_what_the_compiler_says_is_told(tmp_path) -> None:
    (tmp_path / "shared_memory.cpp").write_text("int main() { return missing; }")
    with pytest.raises(RuntimeError, match=r".missing. was not declared|undeclared identifier"):
        host_library(tmp_path, tmp_path / "cache")
