"""The front of the prefill ranks, without ranks behind it."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence

import pytest
import torch
import zmq

from distca.prefill.client import PrefillClient
from distca.prefill.front import Front
from distca.prefill.heads import HeadSlices
from distca.prefill.inquiry import ask_ranks
from distca.prefill.messages import (
    Hello,
    Join,
    Message,
    Ping,
    Pong,
    Refusal,
    Rows,
    ToClient,
    Told,
    Unknown,
    Welcome,
    decoder,
    encode,
)
from distca.schedule.serving.handoff.protocol import Transfer
from support.prefills import free_address, in_background

FACTS = {"dtype": "float32"}


def front_of(lease: float) -> Front:
    return Front("tcp://127.0.0.1:*", FACTS, Welcome("", 1, 16, 2, 64, lease), HeadSlices(2, 1, 1))


def client_of(front: Front, worker: int = 0, workers: int = 1) -> PrefillClient:
    hello = Hello(FACTS, "engine", worker, workers, "", worker, 1)
    return PrefillClient(front.address, hello, 4, torch.float32, lambda *_: None)


def meet(front: Front, *clients: PrefillClient, seconds: float = 0.3) -> None:
    """Lets both sides speak."""
    due = time.monotonic() + seconds
    while time.monotonic() < due:
        front.pump(0.01)
        for client in clients:
            client.poll(0.01)


def told_by(
    front: Front, clients: Sequence[PrefillClient], seconds: float = 10.0, kind: str = ""
) -> list[tuple[str, int]]:
    """Kinds and chunks of the events that engines tell, but for their beats, until one is of a kind
    or the time is over."""
    told: list[tuple[str, int]] = []
    due = time.monotonic() + seconds
    while time.monotonic() < due and (not kind or kind not in [each for each, _ in told]):
        meet(front, *clients, seconds=0.02)
        events = [each.event for each in front.take() if isinstance(each, Told)]
        told += [(each.kind, each.chunk) for each in events if each.kind != "Beat"]
    return told


def send_chunk(inbox: str, transfer: Transfer, head: int = 0) -> None:
    """Sends an engine's process all layers of the first chunk: positions 3 to 18, a head of 4."""
    socket: zmq.Socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(inbox)
    rows = torch.zeros(16, 1, 4).numpy().tobytes()
    for layer in range(2):
        header = encode(Rows(transfer, 0, layer, [(3, 19)], 16, head, 1))
        socket.send_multipart([header, rows, rows])
    socket.close()


def test_whoever_is_silent_for_long_is_forgotten_and_must_greet_again() -> None:
    front = front_of(lease=0.2)
    engine: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
    engine.connect(front.address)

    def answer(message: Message) -> Message:
        engine.send(encode(message))
        while not engine.poll(0):
            front.pump(0.01)
        return decoder(ToClient).decode(engine.recv())

    assert isinstance(answer(Hello(FACTS, "engine")), Welcome)
    assert isinstance(answer(Ping()), Pong)
    assert front.engines == 1
    meet(front, seconds=2.5)
    assert front.engines == 0
    assert isinstance(answer(Ping()), Unknown)
    assert isinstance(answer(Hello(FACTS, "engine")), Welcome)
    assert front.engines == 1
    engine.close()
    front.close()


def test_an_engine_asks_before_it_starts_and_is_not_connected() -> None:
    front = front_of(lease=5.0)
    for facts, transfers, why in (
        (FACTS, ("nixl", "tcp"), None),
        # Not known yet.
        ({}, ("tcp",), None),
        ({"dtype": "bfloat16"}, ("tcp",), "dtype: the engine has bfloat16, and the prefill "),
        (FACTS, ("nixl",), "the engine takes rows by nixl, and the prefill ranks send them by tcp"),
    ):
        with in_background(lambda: meet(front, seconds=1.0)):
            told = ask_ranks(front.address, facts, transfers, 10.0)
        assert told is None if why is None else why in str(told)
    assert front.engines == 0
    assert not front.take()
    front.close()


def test_nobody_or_somebody_else_who_is_asked_refuses_nothing() -> None:
    begun = time.monotonic()
    assert ask_ranks(free_address(), FACTS, ("tcp",), 60.0) is None
    assert time.monotonic() - begun < 30
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        assert ask_ranks(address, FACTS, ("tcp",), 0.2) is None


def test_who_sends_what_cannot_be_read_is_told_so() -> None:
    front = front_of(lease=5.0)
    stranger: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
    stranger.connect(front.address)
    for message in ([b"nonsense"], [b"", b"of several", b"frames"], [b""]):
        stranger.send_multipart(message)
        front.pump(10.0)
        assert stranger.poll(10_000)
        told = decoder(ToClient).decode(stranger.recv())
        assert isinstance(told, Refusal)
        assert told.reason.startswith("a message cannot be read: ")
    stranger.close()
    front.close()


def test_a_client_is_idle_once_it_has_told_all_ends() -> None:
    front = front_of(lease=5.0)
    client = client_of(front)
    meet(front, client)
    assert client.idle
    client.begin(Transfer(0), [1] * 20, 3)
    client.begin(Transfer(1), [1] * 20, 3)
    assert not client.idle
    meet(front, client)
    (first, second) = (each for each in front.take() if isinstance(each, Join))
    client.cancel(Transfer(0))
    assert [each.outcome for each in client.poll()] == ["cancelled"]
    # The ranks have not said yet that nothing more comes.
    assert not client.idle
    for each in (first, second):
        front.say(each.number, "Drained", "over")
    meet(front, client)
    assert client.idle
    client.close()
    front.close()


def test_a_client_says_which_prompts_it_waits_for() -> None:
    """Else the ranks forget what it no longer asks about."""
    front = front_of(lease=0.4)
    client = client_of(front)

    def waited_for() -> set[int]:
        meet(front, client, seconds=1.0)
        told = [each.event for each in front.take() if isinstance(each, Told)]
        return {each.transfer.request for each in told if each.kind == "Beat"}

    assert waited_for() == set()
    for number in (0, 3):
        client.begin(Transfer(number), [1] * 20, 3)
    # The front numbers them itself.
    assert waited_for() == {0, 1}
    client.close()
    front.close()


def test_what_cannot_be_read_is_no_end(caplog) -> None:
    """Whoever reaches the addresses can send anything."""
    front = front_of(lease=60.0)
    client = client_of(front)
    meet(front, client)
    client.begin(Transfer(0), [1] * 20, 3)
    meet(front, client)
    (joined,) = (each for each in front.take() if isinstance(each, Join))
    socket: zmq.Socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(joined.receiving[0].inbox)
    socket.send_multipart([b"nonsense", b"x"])
    socket.send_multipart([encode(Rows(Transfer(0), 0, 0, [(3, 19)], 16, 0, 1)), b"short"])
    due = time.monotonic() + 10
    while caplog.text.count("a message cannot be read") < 2 and time.monotonic() < due:
        meet(front, client, seconds=0.05)
    assert caplog.text.count("a message cannot be read") == 2
    send_chunk(joined.receiving[0].inbox, Transfer(0))
    assert told_by(front, [client], kind="Received")[-1] == ("Received", 0)
    socket.close()
    client.close()
    front.close()


def test_the_log_says_how_rows_come_to_those_that_receive_any(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    front = front_of(lease=5.0)
    receives, asks = Hello(FACTS, "receives", heads=1), Hello(FACTS, "asks")
    clients = [
        PrefillClient(front.address, each, 4, torch.float32, lambda *_: None)
        for each in (receives, asks)
    ]
    meet(front, *clients)
    told = [each.getMessage() for each in caplog.records if "connected" in each.getMessage()]
    assert sorted(told) == [
        "connected: asks, process 0",
        "connected: receives, process 0, rows by TCP",
    ]
    for client in clients:
        client.close()
    front.close()


def test_an_engine_that_was_idle_for_long_asks_at_once() -> None:
    """It polls nothing meanwhile, and its ranks start again: nothing is lost by that."""
    front = front_of(lease=0.5)
    client = client_of(front)
    meet(front, client)
    assert client.ready
    address = front.address
    front.close()
    time.sleep(1.5)
    assert not client.ready
    front = Front(address, FACTS, Welcome("", 1, 16, 2, 64, 5.0), HeadSlices(2, 1, 1))
    ended = threading.Event()

    def pump() -> None:
        while not ended.is_set():
            front.pump(0.01)

    with in_background(pump):
        try:
            due = time.monotonic() + 10
            while not client.ready and time.monotonic() < due:
                time.sleep(0.05)
            client.begin(Transfer(0), [1] * 9, 0)
            # A step of the engine may be longer than a lease.
            time.sleep(7.0)
            assert client.ready
            assert client.poll() == []
        finally:
            ended.set()
    assert any(isinstance(each, Join) for each in front.take())
    # Nobody is there: it does not wait for each prompt.
    client.close()
    front.close()
    alone = PrefillClient(address, Hello(FACTS, "engine"), 4, torch.float32, lambda *_: None)
    since = time.monotonic()
    for number in range(20):
        alone.begin(Transfer(number), [1], 0)
    assert time.monotonic() - since < 10
    assert len(alone.poll()) == 20
    alone.close()


def test_an_idle_engine_that_polls_nothing_stays_connected() -> None:
    """It asks for the state a few times in a lease, on a thread of its own."""
    front = front_of(lease=2.0)
    client = client_of(front)
    meet(front, client)
    due = time.monotonic() + 3.5
    while time.monotonic() < due:
        front.pump(0.05)
        assert client.ready
    client.close()
    front.close()


def test_each_start_of_the_ranks_is_told_once() -> None:
    address, told = free_address(), list[str]()

    def note(client: PrefillClient) -> None:
        told.append(client.comes_by)

    hello = Hello(FACTS, "engine", 0, 1, "", 0, 1)
    client = PrefillClient(address, hello, 4, torch.float32, lambda *_: None, on_welcome=note)
    for starts in range(1, 3):
        welcome, due = Welcome("", 1, 16, 2, 64, 0.5), time.monotonic() + 10.0
        # ZeroMQ lets go of the address of the one before a little later.
        while True:
            try:
                front = Front(address, FACTS, welcome, HeadSlices(2, 1, 1))
                break
            except ValueError:
                assert time.monotonic() < due
                time.sleep(0.05)
        meet(front, client, seconds=3.0)
        assert len(told) == starts
        front.close()
    assert told[0].startswith("TCP (")
    client.close()


def test_whoever_connects_waits_as_long_as_it_says() -> None:
    """Nobody is there, so nothing ever comes."""
    front = front_of(lease=5.0)
    client = client_of(front)
    front.close()
    since = time.monotonic()
    assert not client.connect(0.3)
    assert 0.3 <= time.monotonic() - since < 10
    client.close()


def test_an_engine_that_was_busy_for_long_hears_first_who_was_there() -> None:
    """What has come meanwhile is read before anybody counts as silent."""
    front = front_of(lease=0.5)
    client = client_of(front)
    meet(front, client)
    client.begin(Transfer(0), [1] * 9, 0)
    meet(front, client)
    # The engine computes for long, and the front says that it is there.
    meet(front, seconds=1.5)
    failures = []
    for _ in range(10):
        front.pump(0.01)
        failures += client.poll(0.01)
    assert not failures
    assert client.under_way == 1
    # Who is silent indeed is found out.
    due = time.monotonic() + 5
    while not failures and time.monotonic() < due:
        failures += client.poll(0.01)
    assert [each.failure for each in failures] == ["the prefill side is silent"]
    client.close()
    front.close()


def test_a_prompt_begins_once_all_processes_of_its_engine_ask() -> None:
    # No beats meanwhile.
    front = front_of(lease=60.0)
    clients = [client_of(front, worker, 2) for worker in range(2)]
    meet(front, *clients)
    clients[0].begin(Transfer(7), [1] * 40, 3)
    meet(front, *clients)
    assert not front.take()
    clients[1].begin(Transfer(7), [1] * 40, 3)
    while not (begun := front.take()):
        front.pump(0.01)
    (join,) = (each for each in begun if isinstance(each, Join))
    assert [each.first_head for each in join.receiving] == [0, 1]
    meet(front, *clients)
    # 37 tokens are three chunks of 16. One counts as received once both have its layers.
    for worker, client in enumerate(clients):
        send_chunk(join.receiving[worker].inbox, Transfer(7), worker)
        if client is clients[-1]:
            assert told_by(front, clients, kind="Received") == [("Received", 0)]
        else:
            assert told_by(front, clients, 0.5) == []
    clients[0].cancel(Transfer(7))
    assert told_by(front, clients, kind="Abort") == [("Abort", -1)]
    assert [each.failure for each in clients[0].poll()] == []
    # The ranks would say this now.
    front.say(join.number, "Drained")
    front.forget(join.number)
    failures = []
    due = time.monotonic() + 5
    while any(client.under_way for client in clients) and time.monotonic() < due:
        front.pump(0.01)
        for client in clients:
            failures += [each.failure for each in client.poll(0.01)]
    assert failures == ["given up by the prefill side"]
    for each in (*clients, front):
        each.close()


def test_what_an_engine_said_before_it_closed_arrives() -> None:
    address = free_address()
    # Nobody listens yet, so its greeting waits.
    client = PrefillClient(address, Hello(FACTS, "engine"), 4, torch.float32, lambda *_: None)
    assert not client.connect(0.1)
    client.close()
    with zmq.Context.instance().socket(zmq.ROUTER) as front:
        front.bind(address)
        assert front.poll(5000)
        _, frame = front.recv_multipart()
    assert decoder(Hello).decode(frame).facts == FACTS
