"""A worker that says nothing, or an iteration that does not end, ends the engine with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from distca.inference.messages import ModelOutput, encode
from distca.serve.engine import workers as of_engine
from distca.serve.engine.messages import Beat, FromWorker
from distca.serve.engine.workers import BEAT_TIMEOUT, WorkerError, Workers
from support.token_engine import token_settings

STEP_TIMEOUT = 5.0


class NoProcesses:
    """Processes of workers that never end, since there are none."""

    def __init__(self, *_: object) -> None:
        pass

    def ended(self) -> int | None:
        """See `WorkerProcesses`."""
        return None

    def close(self) -> None:
        """See `WorkerProcesses`."""


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


Say = Callable[[FromWorker], None]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> Iterator[tuple[Workers, Say]]:
    """An engine's workers, and what a worker says to it."""
    monkeypatch.setattr(of_engine, "WorkerProcesses", NoProcesses)
    settings = replace(token_settings(), step_timeout=STEP_TIMEOUT)
    workers = Workers(settings, tmp_path, zmq.Poller(), clock)
    sockets: dict[int, zmq.Socket] = {}

    def say(message: FromWorker) -> None:
        if message.rank not in sockets:
            socket = sockets[message.rank] = zmq.Context.instance().socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, f"worker-{message.rank}".encode())
            socket.connect(workers._listening.socket.getsockopt_string(zmq.LAST_ENDPOINT))
        sockets[message.rank].send(encode(message))
        # It has arrived before the engine looks.
        assert workers._listening.socket.poll(20_000)

    yield workers, say
    for socket in sockets.values():
        socket.close(linger=0)
    workers.close(None)


def test_a_worker_that_says_nothing_hangs(watched: tuple[Workers, Say], clock: Clock) -> None:
    workers, say = watched
    clock.now += 10 * BEAT_TIMEOUT
    assert workers.receive() == [], "nobody has said anything yet: they load"
    for rank in range(2):
        say(Beat(rank))
        assert workers.receive() == [], "a beat is no news"
    clock.now += BEAT_TIMEOUT
    workers.receive()
    # Whatever it says, it is alive.
    done = ModelOutput(1, 3, [], 0, 0, 0.0, 0.0)
    say(done)
    assert workers.receive() == [done]
    say(Beat(0))
    workers.receive()
    clock.now += BEAT_TIMEOUT
    say(Beat(1))
    workers.receive()
    clock.now += 2.0
    with pytest.raises(WorkerError, match=r"^rank 0 hangs: nothing was heard of it for 32 s$"):
        workers.receive()


def test_an_iteration_that_does_not_end_hangs(watched: tuple[Workers, Say], clock: Clock) -> None:
    """From its own begin on, though its workers beat; between iterations nothing is late."""
    workers, say = watched
    for _ in range(3):
        workers.begin_step()
        clock.now += STEP_TIMEOUT
        workers.receive()
        workers.end_step()
        clock.now += 10 * STEP_TIMEOUT
        workers.receive()
    workers.begin_step()
    clock.now += STEP_TIMEOUT + 0.5
    say(Beat(0))
    with pytest.raises(WorkerError, match=r"^an iteration took longer than 5 s: raise --step-time"):
        workers.receive()
