"""How rows go from a rank to a process of an engine: what is agreed on, and what NIXL fails at."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.prefill.client import HandshakeError, PrefillClient
from distca.prefill.front import Front
from distca.prefill.heads import HeadSlices
from distca.prefill.inbox import Arrival, NixlLanding, RowForm, TcpInbox
from distca.prefill.messages import Hello, Join, Left, Receiving, Rows, TransferName, Welcome
from distca.prefill.nixl import NixlAgent, NixlError
from distca.prefill.outbox import Outbox
from distca.schedule.serving.handoff.protocol import Transfer
from support.prefills import NEEDS_NIXL

FORM = RowForm(range(2), 4, torch.float32)
ROW = 2 * 2 * 4 * 4
"""Bytes of keys and values of a row."""

CPU = torch.device("cpu")


class Ends:
    """A rank's outbox, and the inbox of a process, whose memory has slots of `rows` rows.

    The rank is the last of those that send rows.
    """

    def __init__(self, rows: int, slots: int, ranks: int = 1) -> None:
        self.agent, self.ours = NixlAgent(), NixlAgent()
        agents = [*(NixlAgent() for _ in range(ranks - 1)), self.agent]
        senders = {number: each.metadata for number, each in enumerate(agents)}
        self.landing = NixlLanding(self.ours, senders, FORM, CPU, rows * slots * ROW * ranks)
        self.inbox = TcpInbox("127.0.0.1", FORM)
        self.outbox = Outbox(ranks - 1, CPU, self.agent)
        self.to = Receiving(self.inbox.address, 0, 0, 2, self.landing.message)
        self.seen: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.by_tcp = 0

    def send(self, number: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sends so many rows of a prompt."""
        keys, values = torch.randn(2, count, *FORM.shape)
        half = count // 2
        pieces = [(10, 10 + half), (50, 50 + count - half)]
        pieces = [each for each in pieces if each[0] < each[1]]
        rows = Rows(Transfer(number), 0, 0, pieces, count, 0, 2)
        self.outbox.send(self.to, rows, keys, values)
        return keys, values

    def receive(self, seconds: float = 10.0, count: int = 1 << 30) -> None:
        """Takes rows until so many positions have come, or the time is over."""
        due = time.monotonic() + seconds
        while len(self.seen) < count and time.monotonic() < due:
            self.outbox.pump()
            for arrival in self.landing.receive():
                self.take(arrival)
            while self.inbox.socket.poll(1):
                self.by_tcp += 1
                self.take(self.inbox.receive())

    def take(self, arrival: Arrival) -> None:
        rows, (keys, values) = arrival.rows, arrival.tensors()
        positions = [at for start, end in rows.pieces for at in range(start, end)]
        for at, k, v in zip(positions, keys, values, strict=True):
            self.seen.setdefault((rows.transfer.request, at), [k.clone(), v.clone()])
        arrival.done()

    def check(self, number: int, sent: tuple[torch.Tensor, torch.Tensor]) -> None:
        """All rows of a prompt came, as they were sent."""
        got = [rows for (prompt, _), rows in sorted(self.seen.items()) if prompt == number]
        for kind in range(2):
            torch.testing.assert_close(torch.stack([each[kind] for each in got]), sent[kind])

    def close(self) -> None:
        self.outbox.close()
        self.landing.close()
        self.inbox.close()


@NEEDS_NIXL
@pytest.mark.parametrize(
    ("rows", "slots", "ranks"), [(1, 2, 1), (3, 2, 1), (5, 7, 1), (64, 2, 1), (1, 3, 2)]
)
def test_rows_come_through_few_slots(
    monkeypatch: pytest.MonkeyPatch, rows: int, slots: int, ranks: int
) -> None:
    monkeypatch.setattr("distca.prefill.inbox.MOST_SLOT_BYTES", rows * ROW)
    ends = Ends(rows, slots, ranks)
    assert (ends.landing.message.slots, ends.landing.message.slot_bytes) == (slots, rows * ROW)
    sent = {number: ends.send(number, count) for number, count in enumerate((1, 40, 7, 25))}
    ends.receive(count=73)
    for number, each in sent.items():
        ends.check(number, each)
    assert not ends.by_tcp
    ends.close()


@NEEDS_NIXL
def test_what_waits_keeps_its_values_and_is_dropped_with_its_prompt() -> None:
    ends = Ends(2, 2)
    first = ends.send(0, 9)
    kept = [each.clone() for each in first]
    # Blocks are another prompt's by the time that there is a slot.
    for each in first:
        each.fill_(torch.nan)
    ends.send(1, 9)
    ends.outbox.forget([ends.to], Transfer(1))
    ends.receive(seconds=1.0)
    assert {number for number, _ in ends.seen} == {0}
    ends.check(0, (kept[0], kept[1]))
    ends.close()


@NEEDS_NIXL
@pytest.mark.parametrize("method", ["write", "is_written", "connect"])
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_where_nixl_fails_rows_come_by_tcp(
    monkeypatch: pytest.MonkeyPatch, method: str, calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    ends = Ends(3, 4)
    real, left = getattr(ends.agent, method), calls if method != "connect" else 0

    def fail(*args: Any) -> Any:
        nonlocal left
        if not left:
            raise NixlError("the cable is cut")
        left -= 1
        return real(*args)

    monkeypatch.setattr(ends.agent, method, fail)
    sent = {number: ends.send(number, 20) for number in range(3)}
    ends.receive(count=60)
    for number, each in sent.items():
        ends.check(number, each)
    assert ends.by_tcp
    assert caplog.text.count("by TCP from now on: the cable is cut") == 1
    ends.close()


@NEEDS_NIXL
def test_a_process_that_is_gone_keeps_nothing() -> None:
    ends = Ends(2, 2)
    ends.send(0, 9)
    ends.outbox.disconnect(ends.to.inbox)
    ends.outbox.pump()
    assert not ends.outbox._connections
    # A process that greets again has other memory.
    ends.landing.close()
    again = NixlAgent()
    ends.landing = NixlLanding(again, {0: ends.agent.metadata}, FORM, CPU, 4 * ROW)
    ends.to = Receiving(ends.inbox.address, 0, 0, 2, ends.landing.message)
    sent = ends.send(1, 9)
    ends.receive(count=9)
    ends.check(1, sent)
    ends.close()


@NEEDS_NIXL
def test_memory_without_room_for_each_rank_is_a_line() -> None:
    agent = NixlAgent()
    with pytest.raises(NixlError, match="127 bytes of memory for NIXL are less than two rows of"):
        NixlLanding(agent, {0: b""}, FORM, CPU, 2 * ROW - 1)


@NEEDS_NIXL
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_has_two_slots_at_least(ranks: int) -> None:
    """However large slots may be."""
    agents = [NixlAgent() for _ in range(ranks)]
    senders = {number: each.metadata for number, each in enumerate(agents)}
    landing = NixlLanding(NixlAgent(), senders, FORM, CPU, 5 * ROW * ranks)
    assert (landing.message.slots, landing.message.slot_bytes) == (2, 2 * ROW)
    landing.close()


@NEEDS_NIXL
@pytest.mark.parametrize("fails", [False, True])
def test_memory_is_kept_as_long_as_a_write_may_read_it(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Only where a write cannot be ended."""

    class Write:
        def release(self) -> None:
            if fails:
                raise RuntimeError

    agent, given_back = NixlAgent(), []
    monkeypatch.setattr(agent, "_errors", RuntimeError)
    monkeypatch.setattr(agent._agent, "deregister_memory", given_back.append)
    assert agent.give_up(Write()) is not fails
    memory = torch.zeros(8, dtype=torch.uint8)
    registered = agent.register(memory)
    agent.deregister(registered, memory if fails else None)
    assert given_back == ([] if fails else [registered])


def front_with(transfers: tuple[TransferName, ...], agents: tuple[bytes, ...] = ()) -> Front:
    welcome = Welcome("", 1, 16, 2, 64, 0.4, agents=agents)
    return Front("tcp://127.0.0.1:*", {}, welcome, HeadSlices(1, 1, 1), transfers)


def meet(front: Front, client: PrefillClient, seconds: float) -> None:
    due = time.monotonic() + seconds
    while time.monotonic() < due and client.welcome is None and client.refused is None:
        front.pump(0.01)
        client.poll(0.01)


def client_of(front: Front, transfer: Any = "auto") -> PrefillClient:
    hello = Hello({}, "engine", heads=1)
    return PrefillClient(front.address, hello, 4, torch.float32, lambda *_: None, transfer)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(("nixl",), "tcp"), pytest.param(("tcp",), "nixl", marks=NEEDS_NIXL)],
)
def test_sides_that_have_nothing_in_common_are_told_so(
    theirs: tuple[TransferName, ...], ours: str
) -> None:
    front = front_with(theirs)
    client = client_of(front, ours)
    meet(front, client, 10.0)
    line = f"the engine takes rows by {ours}, and the prefill ranks send them by {theirs[0]}"
    with pytest.raises(HandshakeError, match=line):
        client.connect(1.0)
    client.close()
    front.close()


def test_nixl_alone_is_refused_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NixlError("NIXL is not installed here")

    monkeypatch.setattr("distca.prefill.client.NixlAgent", missing)
    front = front_with(("tcp",))
    with pytest.raises(NixlError, match="not installed here"):
        client_of(front, "nixl")
    client = client_of(front)
    meet(front, client, 10.0)
    assert client.comes_by == "TCP (NIXL is not installed here)"
    client.close()
    front.close()


@NEEDS_NIXL
def test_nixl_is_chosen_where_both_sides_have_it() -> None:
    agent = NixlAgent()
    front = front_with(("nixl", "tcp"), (agent.metadata,))
    for transfer, told in (("auto", "NIXL"), ("tcp", "TCP (TCP was chosen)")):
        client = client_of(front, transfer)
        meet(front, client, 10.0)
        assert client.comes_by == told
        client.close()
    front.close()


@NEEDS_NIXL
def test_who_connects_waits_for_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's thread makes it, and may have read the answer before."""

    def slow(*args: Any) -> NixlLanding:
        time.sleep(1.0)
        return NixlLanding(*args)

    monkeypatch.setattr("distca.prefill.client.NixlLanding", slow)
    agent = NixlAgent()
    front = front_with(("nixl", "tcp"), (agent.metadata,))
    client = client_of(front)
    due = time.monotonic() + 60
    while client.welcome is None and time.monotonic() < due:
        front.pump(0.01)
    assert client.connect(1.0)
    assert client.comes_by == "NIXL"
    client.close()
    front.close()


@NEEDS_NIXL
def test_an_engine_that_was_silent_greets_again_with_other_memory() -> None:
    """A rank may have written to a slot of which the engine hears only now."""
    agent = NixlAgent()
    front = front_with(("nixl", "tcp"), (agent.metadata,))
    client = client_of(front)
    meet(front, client, 10.0)
    client.begin(Transfer(0), [1] * 20, 0)
    due, found = time.monotonic() + 60, []
    while not found and time.monotonic() < due:
        front.pump(0.01)
        found += [each for each in front.take() if isinstance(each, Join)]
    before = found[0].receiving[0]
    assert before.landing is not None
    front.give_up(found[0].number)
    assert [each.inbox for each in front.take() if isinstance(each, Left)] == [before.inbox]
    again: list[Join] = []
    number = 0
    while not again and time.monotonic() < due + 10:
        front.pump(0.01)
        if client.poll(0.01) or client.ready:
            number += 1
            client.begin(Transfer(number), [1] * 20, 0)
        again += [each for each in front.take() if isinstance(each, Join)]
        again = [each for each in again if each.receiving[0].landing != before.landing]
    landing = again[0].receiving[0].landing
    assert landing is not None
    assert landing.name != before.landing.name
    client.close()
    front.close()


def test_a_flag_that_cannot_hold_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distca.commands.main import main
    from support.small_models import save_small_model

    def missing() -> None:
        raise NixlError("NIXL is not installed here")

    monkeypatch.setattr("distca.prefill.nixl.NixlAgent", missing)
    folder = str(save_small_model("llama", tmp_path))
    for flags, line in (
        (["--transfer", "nixl"], "--transfer nixl: NIXL is not installed here"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid: the host"),
        (["--host", "::1"], "--host ::1: ::1 is an IPv6 address"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["prefill", folder, "--model-impl", "transformers", *flags])
        assert ended.value.code == 2
        assert line in capsys.readouterr().err.strip().splitlines()[-1]
