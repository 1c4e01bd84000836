"""A real engine whose workers compute nothing, in this process: a block's rows hold their tokens.

The token that follows a sequence is drawn from logits that all rows of its blocks decide, so that
a wrong block, or one that another sequence was given too, gives a wrong answer.
"""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch
import uvicorn

from distca.inference.messages import (
    AddRequest,
    ExecuteBatch,
    ModelOutput,
    NewRequest,
    SampledToken,
    Scores,
    decoder,
    encode,
)
from distca.inference.sampling import TokenLogprobs
from distca.schedule.serving.limits import SchedulerConfig
from distca.serve.api.app import Bounds, make_app
from distca.serve.api.engine_client import EngineClient
from distca.serve.api.metrics import Metrics
from distca.serve.api.model import ApiModel
from distca.serve.api.server import Address
from distca.serve.engine.engine import EngineProcess
from distca.serve.engine.messages import Dead, FromEngine, ToEngine, ToWorker
from distca.serve.engine.settings import ServerConfig
from support.byte_tokenizer import CHAT, chat_tokenizer
from support.small_models import VOCABULARY


def token_settings(
    block_size: int = 4,
    tokens: int = 32,
    sequences: int = 8,
    world_size: int = 2,
    caching: bool = True,
    positions: int = 96,
) -> ServerConfig:
    """Settings of an engine without a model; sequences of 12 tokens are long."""
    limits = SchedulerConfig(sequences, tokens, block_size, short=12)
    sizes = positions, world_size, 1, "pass-kv", limits, block_size, 1 << 20, 0.9, caching, 60.0
    return ServerConfig("no model", "float32", (None,), b"salt", *sizes)  # type: ignore[arg-type]


def choose(of: AddRequest | NewRequest, prompt: int, tokens: Sequence[int]) -> SampledToken:
    """Chooses the token that follows `tokens`, of which the first are a prompt."""
    logits = _logits(tokens)
    changed = of.penalties.apply(logits, tokens[:prompt], tokens[prompt:])
    token = of.sampling.choose(changed, of.choice, len(tokens))
    told = None if of.logprobs is None else TokenLogprobs.of(logits, token, of.logprobs)
    return SampledToken(of.number, token, told)


def _logits(tokens: Sequence[int]) -> torch.Tensor:
    seed = zlib.crc32(np.array(tokens, dtype=np.int32).tobytes())
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(VOCABULARY))


def right_scores(submit: AddRequest | NewRequest, start: int, end: int) -> dict[int, TokenLogprobs]:
    """Log-probabilities of a prompt's tokens from position `start + 1` to `end`, by position."""
    tokens, count = submit.tokens, submit.logprobs or 0
    return {
        position: TokenLogprobs.of(_logits(tokens[:position]), tokens[position], count)
        for position in range(start + 1, end + 1)
    }


def right_answer(submit: AddRequest) -> list[int]:
    """The answer of a sequence that is alone."""
    tokens, prompt, sampling = list(submit.tokens), len(submit.tokens), submit.sampling
    while len(tokens) - prompt < sampling.max_tokens:
        tokens.append(choose(submit, prompt, tokens).token)
        if tokens[-1] in sampling.stops and len(tokens) - prompt >= submit.penalties.fewest:
            break
    return tokens[prompt:]


@dataclass
class _Held:
    """A sequence as workers know it."""

    admitted: NewRequest
    tokens: list[int]
    blocks: list[tuple[int, int]] = field(default_factory=list)


class TokenWorkers:
    """All workers of an engine: what it sends to them.

    Args:
        settings: settings of the engine.

    Attributes:
        done: what all of them say of the last iteration.
        held: sequences that they know.
        admitted: times that each sequence began to run.
        under_way: whether a step has begun and not ended.
    """

    def __init__(self, settings: ServerConfig) -> None:
        self._size = settings.block_size
        self._decoder = decoder(ToWorker)
        self._rows: dict[tuple[int, int], list[int]] = {}
        self._next = 0
        self.done: list[ModelOutput] = []
        self.held: dict[int, _Held] = {}
        self.admitted: Counter[int] = Counter()
        self.under_way = False

    def send(self, message: ToWorker) -> None:
        """See `Workers`; the message is encoded, as on its way."""
        self._decoder.decode(encode(message))

    def start(self, iteration: ExecuteBatch, parts: Collection[int]) -> None:
        """See `Workers`; those without a part are told of it at once, too."""
        chosen, scores = self._run(self._decoder.decode(encode(iteration)))
        self.done = []
        for rank in sorted(parts):
            self.done.append(ModelOutput(rank, iteration.number, chosen, 1, 0, 0.0, 0.0, scores))
            chosen, scores = [], []

    def begin_step(self) -> None:
        """See `Workers`; a step that never ends would be taken to hang."""
        assert not self.under_way, "the step before has not ended"
        self.under_way = True

    def end_step(self) -> None:
        """See `Workers`."""
        assert self.under_way, "no step has begun"
        self.under_way = False

    def _run(self, iteration: ExecuteBatch) -> tuple[list[SampledToken], list[Scores]]:
        assert iteration.number == self._next, "an iteration is missing"
        self._next += 1
        for number in iteration.drop:
            del self.held[number]
        for admit in iteration.admit:
            self.held[admit.number] = _Held(admit, list(admit.tokens))
            self.admitted[admit.number] += 1
        for feed in iteration.feed:
            sequence = self.held[feed.number]
            if feed.token is not None:
                sequence.tokens.append(feed.token)
            sequence.blocks += zip(feed.ranks, feed.blocks, strict=True)
            for position in range(feed.start, feed.start + feed.count):
                block = sequence.blocks[position // self._size]
                rows = self._rows.setdefault(block, [-1] * self._size)
                rows[position % self._size] = sequence.tokens[position]
        chosen, scores = [], []
        for feed in iteration.feed:
            sequence = self.held[feed.number]
            if sequence.admitted.scored:
                end = min(feed.start + feed.count, sequence.admitted.prompt - 1)
                found = right_scores(sequence.admitted, feed.start, end)
                scores.append(Scores(feed.number, found))
            if feed.samples:
                rows = [row for block in sequence.blocks for row in self._rows[block]]
                seen = rows[: feed.start + feed.count]
                chosen.append(choose(sequence.admitted, sequence.admitted.prompt, seen))
        return chosen, [each for each in scores if each.tokens]


class _Wire:
    """Both sockets between an API process and its engine."""

    def __init__(self) -> None:
        self.to_engine: asyncio.Queue[bytes] = asyncio.Queue()
        self._to_api: asyncio.Queue[bytes] = asyncio.Queue()

    def from_engine(self, encoded: bytes) -> None:
        """Sends what the engine says."""
        self._to_api.put_nowait(encoded)

    async def send(self, encoded: bytes) -> None:
        """Sends to the engine, as a socket of zmq."""
        self.to_engine.put_nowait(encoded)

    async def recv(self) -> bytes:
        """Receives from the engine, likewise."""
        return await self._to_api.get()


class _EngineSide:
    """The engine's end of the wire, whose calls do not wait."""

    def __init__(self, wire: _Wire) -> None:
        self.send = wire.from_engine


class EngineHere(EngineClient):
    """A client whose engine runs on its own event loop.

    Args:
        settings: settings of the engine.
        metrics: numbers of the server, which are given those of the engine.
        blocks: blocks of each rank's pool.
        seconds: seconds of an iteration.
    """

    def __init__(
        self, settings: ServerConfig, metrics: Metrics, blocks: int, seconds: float
    ) -> None:
        super().__init__(settings, on_stats=lambda stats: setattr(metrics, "stats", stats))
        self._blocks, self._seconds = blocks, seconds

    async def start(self) -> None:
        self._decoder = decoder(FromEngine)
        wire = self._socket = _Wire()  # type: ignore[assignment]
        workers = TokenWorkers(self.settings)
        engine = EngineProcess(self.settings, _EngineSide(wire), workers)  # type: ignore[arg-type]
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(started))
        self._engine = asyncio.create_task(self._serve(engine, workers, wire))
        await started

    async def close(self) -> None:
        for task in (self._engine, self._reader):
            task.cancel()

    async def _serve(self, engine: EngineProcess, workers: TokenWorkers, wire: _Wire) -> None:
        read = decoder(ToEngine)
        try:
            engine.begin(self._blocks, 1)
            while True:
                busy = engine.start_iteration()
                await asyncio.sleep(self._seconds if busy else 0)
                while not busy or not wire.to_engine.empty():
                    engine.take(read.decode(await wire.to_engine.get()))
                    busy = True
                done, workers.done = workers.done, []
                for each in done:
                    engine.take_done(each)
        except Exception as error:
            wire.from_engine(encode(Dead(f"{type(error).__name__}: {error}")))
            raise


@contextmanager
def api_here(
    keys: tuple[str, ...] = (),
    chat_template: str | None = CHAT,
    positions: int = 64,
    sequences: int = 8,
    seconds: float = 0.0,
) -> Iterator[str]:
    """A server's API over HTTP, in a thread of this process; gives its URL.

    Args:
        keys: API keys.
        chat_template: template of conversations.
        positions: most tokens of a sequence.
        sequences: most sequences that are answered or wait.
        seconds: seconds of an iteration.
    """
    listening = Address("127.0.0.1", 0).bind()
    host, port = listening.getsockname()
    metrics = Metrics()
    sizes = positions, VOCABULARY, frozenset({259})
    model = ApiModel(("small",), chat_tokenizer(), *sizes, {}, chat_template, Random(0))
    client = EngineHere(token_settings(positions=positions), metrics, positions, seconds)
    app = make_app(model, client, metrics, Bounds(sequences, keys))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))

    async def serve() -> None:
        await client.start()
        await server.serve(sockets=[listening])
        await client.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join()
