"""A server with roles on live ranks: each is a worker, and the first one has the engine, too."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

END = b"end"


@dataclass(frozen=True)
class Played:
    """What happens to a server.

    Attributes:
        submits: arguments of each `AddRequest`.
        blocks: blocks of a prefill rank, and of a decode rank.
        in_turn: whether each request waits until the one before has ended.
    """

    submits: Sequence[tuple]
    blocks: tuple[int, int] = (64, 64)
    in_turn: bool = False


@dataclass
class Seen:
    """What was seen.

    Attributes:
        told: tokens by request.
        refused: what was said to requests that were refused.
        stats: numbers at the end.
        chunks: chunks by their sequence: their positions, and ranks.
        moved: bytes of blocks that changed their rank.
        decoding: requests in the order in which they joined batches.
    """

    told: dict[int, list[int]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    stats: Any = None
    chunks: dict[int, list[tuple[int, int, tuple[int, ...]]]] = field(default_factory=dict)
    moved: int = 0
    decoding: list[int] = field(default_factory=list)


class Hub:
    """Stands for `Workers`: what the engine says to live ranks, and they to it."""

    def __init__(self, folder: Path) -> None:
        import zmq

        from distca.inference.messages import decoder
        from distca.serve.handoff.messages import FromRoles

        self.socket: Any = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.bind(f"ipc://{folder}/workers")
        self._decoder, self.seen = decoder(FromRoles), Seen()
        self._inboxes: list[Any] = []

    def end(self, processes: int, inboxes: list[str]) -> None:
        """Ends the workers. Sockets stay: one that is dropped lingers for a reader who is gone."""
        import zmq

        for rank in range(processes):
            self.post(rank, END)
        for inbox in inboxes:
            self._inboxes.append(zmq.Context.instance().socket(zmq.PUSH))
            self._inboxes[-1].connect(inbox)
            self._inboxes[-1].send(END)

    def post(self, rank: int, encoded: bytes) -> None:
        self._note(rank, encoded)
        self.socket.send_multipart([f"worker-{rank}".encode(), encoded])

    def _note(self, rank: int, encoded: bytes) -> None:
        said = [None] if encoded == END else msgspec.msgpack.decode(encoded)
        if said[0] == "RunChunk":
            _, _, sequence, start, tokens, *_ = said
            pieces = self.seen.chunks.setdefault(sequence, [])
            if pieces and pieces[-1][:2] == (start, start + len(tokens)):
                ranks = (*pieces.pop()[2], rank)
            else:
                ranks = (rank,)
            pieces.append((start, start + len(tokens), ranks))

    def receive(self) -> list[Any]:
        from distca.serve.handoff.messages import ChunkDone, Decoded

        heard = []
        while self.socket.poll(0):
            heard.append(self._decoder.decode(self.socket.recv_multipart()[1]))
        for each in heard:
            if isinstance(each, ChunkDone):
                self.seen.moved += each.bytes_moved
            elif isinstance(each, Decoded):
                self.seen.decoding += [request for request, _ in each.joined]
        return heard


class Api:
    """Stands for the socket to the API process."""

    def __init__(self, played: Played, seen: Seen) -> None:
        from distca.inference.messages import decoder
        from distca.serve.engine.messages import FromEngine

        self._played, self._seen, self._decoder = played, seen, decoder(FromEngine)
        self._script: deque[Any] = deque()
        self._open = {each[0] for each in played.submits}
        self._idle = False

    def begin(self) -> None:
        from distca.inference.messages import AddRequest

        self._script.extend(AddRequest(*each) for each in self._played.submits)

    def poll(self, _: int) -> bool:
        if self._played.in_turn and len(self._open) > len(self._script):
            return False
        return bool(self._script) or (not self._open and self._idle)

    def recv(self) -> bytes:
        from distca.inference.messages import encode
        from distca.serve.engine.messages import Close

        return encode(self._script.popleft() if self._script else Close())

    def send(self, encoded: bytes) -> None:
        from distca.serve.engine.messages import Outputs, Refused

        message = self._decoder.decode(encoded)
        if isinstance(message, Refused):
            self._seen.refused[message.number] = message.message
            self._open.discard(message.number)
        elif isinstance(message, Outputs):
            for output in message.outputs:
                self._seen.told.setdefault(output.number, []).append(output.token)
                if output.finish:
                    self._open.discard(output.number)

    def note(self, stats: Any) -> None:
        self._seen.stats = stats
        self._idle = not any(rank.referenced for rank in stats.ranks)


def serve_on_a_rank(settings: Any, folder: str, played: Played, changes: Any = None) -> Seen | None:
    """Serves on this rank; the first one's result is what was seen.

    Args:
        settings: settings of the engine, with as many processes as ranks.
        folder: folder for sockets.
        played: what happens.
        changes: function that breaks something first.
    """
    import torch
    import torch.distributed as dist
    import zmq

    from distca.inference.messages import encode
    from distca.serve.handoff.roles import make_worker

    rank = dist.get_rank()
    with contextlib.ExitStack() as undo:
        if changes is not None:
            undo.callback(changes())
        worker = make_worker(settings, settings.roles, torch.device("cpu"), Path(folder))
        results: list[Any] = []
        if rank == 0:
            hub = Hub(Path(folder))
            arguments = (settings, folder, played, hub, results)
            engine = threading.Thread(target=_run_engine, args=arguments)
            engine.start()
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"worker-{rank}".encode())
        socket.connect(f"ipc://{folder}/workers")
        socket.send(encode(worker.loaded()))
        with contextlib.suppress(msgspec.DecodeError):
            worker.serve(socket)
        if rank == 0:
            engine.join()
        dist.barrier()
        zmq.Context.instance().destroy(linger=0)
    if results and isinstance(results[0], BaseException):
        raise results[0]
    return results[0] if results else None


def _run_engine(settings: Any, folder: str, played: Played, hub: Hub, results: list[Any]) -> None:
    import zmq

    from distca.serve.handoff.engine import RolesEngine

    seen = hub.seen
    api = Api(played, seen)
    poller = zmq.Poller()
    poller.register(hub.socket, zmq.POLLIN)
    try:
        engine = RolesEngine(settings, api, hub)  # type: ignore[arg-type]
        loaded = 0
        while loaded < settings.processes:
            poller.poll(100)
            loaded += len(hub.receive())
        engine.begin(*played.blocks, 1, poller)
        api.begin()
        settle = engine._settle

        def settle_and_look() -> None:
            settle()
            api.note(engine._stats())

        engine._settle = settle_and_look  # type: ignore[method-assign]
        engine.serve(poller)
        results.append(seen)
    except BaseException as error:
        results.append(error)
    decoding = range(settings.roles.prefill, settings.processes)
    hub.end(settings.processes, [f"ipc://{folder}/inbox-{rank}" for rank in decoding])


def tokens(count: int, seed: int, vocabulary: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocabulary, count).tolist()
