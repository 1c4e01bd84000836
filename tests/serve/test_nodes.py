"""Servers on several machines: two of this one's addresses, and what their messages look like."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import zmq

from distca.inference.messages import decoder, encode
from distca.inference.models import load_tokenizer, read_model
from distca.inference.sampling import Penalties, SamplingParams
from distca.serve.engine.kept_keys import KeptKeys
from distca.serve.engine.link import Link, link_of
from distca.serve.engine.node import Node
from distca.serve.engine.node_messages import (
    AreYouThere,
    HeadEnds,
    Join,
    Joined,
    NodeEnds,
    StoreCall,
    ToHead,
)
from distca.serve.engine.nodes import NodeError, OtherNodes, Unreachable, facts
from distca.serve.engine.settings import Nodes, ServerConfig
from support.byte_tokenizer import save_chat_model
from support.engines import one_process, settings_of
from support.pretraining import ROOT
from support.served import Server, are_gone

HEAD = "127.0.0.2"
KEY = b"a key of the job that cannot be guessed"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((HEAD, 0))
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("served"))


@pytest.fixture
def settings(folder: Path) -> ServerConfig:
    return settings_of(str(folder), 2, 16, nodes=Nodes(2, 0, HEAD, free_port(), KEY))


def start_node(folder: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "distca", "serve", str(folder), "--headless", *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stderr=subprocess.PIPE,
        text=True,
    )


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def test_two_machines_answer_until_one_is_lost(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "key", tmp_path / "other"
    for path, key in zip(keys, (KEY, KEY + b"x"), strict=True):
        path.write_bytes(key)
    port = free_port()
    alike = (
        "--context-parallel-size 2 --context-parallel-threshold 1 --max-model-len 512 --nnodes 2 "
    )
    alike += f"--master-addr {HEAD} --master-port {port}"
    nodes = [
        start_node(folder, *alike.split(), "--node-rank", "1", "--job-key-file", str(key))
        for key in keys
    ]
    try:
        server = Server(folder, *alike.split(), "--job-key-file", str(keys[0]))
        node, stranger = nodes
        said = stranger.communicate(timeout=60)[1]
        assert stranger.returncode == 1
        assert "refused this node: is --job-key-file the same on all nodes?" in said
        # It listens on the given address alone.
        with socket.socket() as other:
            assert other.connect_ex(("127.0.0.1", port)) != 0
        prompt = "The sky is " * 5
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 6, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
        model, tokenizer = read_model(str(folder), torch.float32), load_tokenizer(str(folder))
        loaded = model.load(torch.device("cpu"), "eager")
        submit = (0, 0, tokenizer.encode(prompt), SamplingParams(6, stops=model.stops), Penalties())
        expected = tokenizer.decode(one_process(loaded, submit), skip_special_tokens=True)
        assert answer["choices"][0]["text"] == expected
        moved = httpx.get(f"{server.url}/debug/state").json()["bytes_moved"]
        assert moved > 0
        pids = [*server.pids(), node.pid, *children(node.pid)]
        body |= {"max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            node.send_signal(signal.SIGKILL)
            begin = time.monotonic()
            assert any("error" in line for line in lines)
        assert server.end() == 1
        # By itself it takes 3 seconds; other tests may run beside it.
        assert time.monotonic() - begin < 15
        assert "node 1 is lost" in server.log.splitlines()[-1]
        assert KEY.decode() not in server.log
        node.wait()
        assert are_gone([pid for pid in pids if pid != node.pid], 5)
    finally:
        for each in nodes:
            each.kill()
            each.communicate()


class Head:
    """Stands for a head that takes a machine in; it never lets work begin.

    Args:
        settings: settings of the head.
        answers: messages to the machine once it has joined.
    """

    def __init__(self, settings: ServerConfig, *answers: Any) -> None:
        self.joined: Any = None
        self._link, self._answers = link_of(settings.nodes, Path()), answers
        self.ends, self.ready = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Head:
        self._thread.start()
        assert self.ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.ends.set()
        self._thread.join()

    def _run(self) -> None:
        context: zmq.Context = zmq.Context()
        listening = self._link.bind(context)
        self.ready.set()
        messages = decoder(ToHead)
        while not self.ends.is_set():
            if listening.socket.poll(50):
                name, encoded = listening.socket.recv_multipart()
                message = messages.decode(encoded)
                if isinstance(message, Join):
                    self.joined = message
                    for each in self._answers:
                        listening.socket.send_multipart([name, encode(each)])
                    if not self._answers:
                        break
        listening.close(1000)
        context.term()


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Nodes take signals over for good."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_machine_ends_with_its_head(settings: ServerConfig) -> None:
    node = replace(settings, nodes=replace(settings.nodes, rank=1))
    with Head(settings, AreYouThere(), HeadEnds("a rank failed")) as head:
        assert Node(node).run() == "a rank failed"
    assert head.joined == Join(1, facts(node))
    with Head(settings, HeadEnds(None)):
        assert Node(node).run() is None
    with Head(settings):
        why = Node(node).run()
        assert why is not None
        assert f"the head at {HEAD}" in why
        assert "has ended" in why
    strange = replace(node, nodes=replace(node.nodes, key=KEY + b"x"))
    with Head(settings, AreYouThere()) as head:
        why = Node(strange).run()
        assert why is not None
        assert "refused this node: is --job-key-file the same" in why
    assert head.joined is None
    # What has no key at all cannot say anything either.
    with Head(settings, AreYouThere()) as head, zmq.Context() as context:
        plain = context.socket(zmq.DEALER)
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(link_of(settings.nodes, Path()).endpoint)
        plain.send(encode(Join(1, facts(node))))
        assert not plain.poll(500)
        plain.close()
    assert head.joined is None


def test_machines_must_be_alike(settings: ServerConfig) -> None:
    said: list[tuple[bytes, Any]] = []

    def send(name: bytes, message: Any) -> None:
        if name == b"gone":
            raise Unreachable
        said.append((name, message))

    three = replace(settings, nodes=replace(settings.nodes, count=3))
    nodes = OtherNodes(three, send)
    assert not nodes.take(b"a", Join(1, facts(three)))
    for rank in (0, 1, 3):
        assert not nodes.take(b"b", Join(rank, facts(three)))
        name, refused = said.pop()
        assert name == b"b"
        assert f"--node-rank {rank}: give each node its own, 1 to 2" in refused.message
    assert nodes.missing == 1
    elsewhere = replace(three, model="/elsewhere", nodes=replace(three.nodes, rank=2))
    assert nodes.take(b"c", Join(2, facts(elsewhere)))
    assert said == [(b"a", Joined()), (b"c", Joined())]
    for changes, what in (
        ({"block_size": 8}, "block_size 8, and the head with 4"),
        ({"salt": b"other"}, "model"),
        ({"nodes": replace(three.nodes, count=2)}, "nnodes 2, and the head with 3"),
    ):
        with pytest.raises(NodeError, match=f"node 2 was started with {what}"):
            OtherNodes(three, send).take(b"d", Join(2, facts(replace(three, **changes))))
        assert isinstance(said.pop()[1], HeadEnds)
    with pytest.raises(NodeError, match="node 2: was asked to end"):
        nodes.take(b"c", NodeEnds(2, "was asked to end"))


def test_a_lost_machine_is_noticed(settings: ServerConfig) -> None:
    def send(name: bytes, message: Any) -> None:
        if not isinstance(message, Joined):
            raise Unreachable

    nodes = OtherNodes(settings, send)
    assert nodes.take(b"a", Join(1, facts(settings)))
    with pytest.raises(NodeError, match="node 1 is lost: its connection is closed"):
        nodes.check()
    nodes.end("why")


def test_the_store_is_torchs() -> None:
    """As `torch.distributed.HashStore` answers, so does the engine's over a socket."""
    from torch.distributed import HashStore

    from distca.serve.engine.store import EngineStore

    context: zmq.Context = zmq.Context()
    socket_ = context.socket(zmq.ROUTER)
    port = socket_.bind_to_random_port("tcp://127.0.0.1")
    ends = threading.Event()

    def serve() -> None:
        kept, calls = KeptKeys(), decoder(StoreCall)
        while not ends.is_set():
            if socket_.poll(20):
                name, call = socket_.recv_multipart()
                socket_.send_multipart([name, encode(kept.answer(calls.decode(call)))])

    thread = threading.Thread(target=serve)
    thread.start()
    ours = EngineStore(Link(f"tcp://127.0.0.1:{port}"), "a", timedelta(seconds=5))
    theirs = HashStore()
    found: list[list[Any]] = []
    for store in (ours, theirs):
        store.set("a", "1")
        found.append(
            [
                store.get("a"),
                store.add("b", 3),
                store.add("b", -1),
                store.get("b"),
                store.check(["a", "b"]),
                store.check(["a", "c"]),
                store.compare_set("a", "1", "2"),
                store.compare_set("a", "1", "3"),
                store.delete_key("a"),
                store.delete_key("a"),
                store.num_keys(),
            ]
        )
        store.wait(["b"])
        with pytest.raises(Exception, match=r"(?i)time"):
            store.wait(["c"], timedelta(milliseconds=50))
    assert found[0] == found[1]
    ends.set()
    thread.join()
    socket_.close()
