"""The front of the prefill ranks, without ranks behind it."""

from __future__ import annotations

import threading
import time

import torch
import zmq

from distca.inference.messages import encode
from distca.prefill.client import PrefillClient
from distca.prefill.front import Front
from distca.prefill.messages import Hello, Join, Rows, Welcome
from distca.schedule.serving.cdsp.handoff import Transfer
from support.prefills import in_background

FACTS = {"dtype": "float32"}


def front_of(lease: float) -> Front:
    return Front("tcp://127.0.0.1:*", FACTS, Welcome("", 1, 16, 2, 64, lease))


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


def send_chunk(inbox: str, transfer: Transfer) -> None:
    """Sends an engine's process all layers of the first chunk: positions 3 to 18, a head of 4."""
    socket: zmq.Socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(inbox)
    rows = torch.zeros(16, 1, 4).numpy().tobytes()
    for layer in range(2):
        header = encode(Rows(transfer, 0, layer, [(3, 19)], 16))
        socket.send_multipart([header, rows, rows])
    socket.close()


def test_whoever_is_silent_for_long_is_forgotten_and_greets_again() -> None:
    front = front_of(lease=0.2)
    client = client_of(front)

    def is_met() -> bool:
        """Whether both sides know each other, at some moment of five seconds."""
        due = time.monotonic() + 5
        while time.monotonic() < due:
            meet(front, client, seconds=0.05)
            if client.ready and front.engines == 1:
                return True
        return False

    assert is_met()
    meet(front, seconds=2.5)
    assert front.engines == 0
    assert not client.ready
    assert is_met()
    client.close()
    front.close()


def test_an_engine_that_was_idle_for_long_asks_at_once() -> None:
    """It reads nothing meanwhile, and its ranks start again: nothing is lost by that."""
    front = front_of(lease=0.5)
    client = client_of(front)
    meet(front, client)
    assert client.ready
    address = front.address
    front.close()
    time.sleep(1.5)
    assert not client.ready
    front = Front(address, FACTS, Welcome("", 1, 16, 2, 64, 5.0))
    ended = threading.Event()

    def pump() -> None:
        while not ended.is_set():
            front.pump(0.01)

    with in_background(pump):
        try:
            client.begin(Transfer(0), [1] * 9, 0)
            time.sleep(0.5)
        finally:
            ended.set()
    assert client.poll() == []
    assert isinstance(front.take()[0], Join)
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


def test_a_prompt_begins_once_all_processes_of_its_engine_ask() -> None:
    front = front_of(lease=5.0)
    clients = [client_of(front, worker, 2) for worker in range(2)]
    meet(front, *clients)
    clients[0].begin(Transfer(7), [1] * 40, 3)
    meet(front, *clients)
    assert not front.take()
    clients[1].begin(Transfer(7), [1] * 40, 3)
    meet(front, *clients)
    join, *told = front.take()
    assert isinstance(join, Join)
    assert [each.first_head for each in join.receiving] == [0, 1]
    # 37 tokens are three chunks of 16. Each is granted once, when both processes have said so.
    assert [(each.event.kind, each.event.chunk) for each in told] == [  # type: ignore[union-attr]
        ("Grant", chunk) for chunk in range(3)
    ]
    # A chunk counts as received once both have its layers.
    for worker, client in enumerate(clients):
        send_chunk(join.receiving[worker].inbox, Transfer(7))
        meet(front, *clients)
        received = [each.event.kind for each in front.take()]  # type: ignore[union-attr]
        assert received == (["Received"] if client is clients[-1] else [])
    clients[0].cancel(Transfer(7))
    meet(front, *clients)
    (ended,) = front.take()
    assert ended.event.kind == "Abort"  # type: ignore[union-attr]
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
