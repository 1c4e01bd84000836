"""The main loop of a server's API process: it starts the engine, serves, drains and ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import logging.config
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn

from distca.serve.api.app import Bounds, make_app
from distca.serve.api.engine_client import EngineClient, EngineError
from distca.serve.api.metrics import Metrics
from distca.serve.api.model import ApiModel
from distca.serve.engine.messages import Stats
from distca.serve.engine.settings import ServerConfig

logger = logging.getLogger("uvicorn.error")

_SECONDS_TO_TELL = 2.0
"""Seconds that requests have to be told of the engine's end."""

_LOG_SECONDS = 10.0


@dataclass(frozen=True)
class Address:
    """Where a server listens.

    Attributes:
        host: name or address.
        port: number of the port.
    """

    host: str
    port: int

    def bind(self) -> socket.socket:
        """Takes the port, before any other work.

        Raises:
            ValueError: it is in use, or not ours.
        """
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            taken = socket.socket(family, kind, protocol)
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
            taken.listen(2048)
        except OSError as error:
            raise ValueError(
                f"cannot listen on {self.host}:{self.port}: {error.strerror or error}: choose "
                "another --host or --port"
            ) from error
        return taken


class _Server(uvicorn.Server):
    """A server that ends with its own status, rather than by the signal that asked for it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drains at a signal; another one ends it at once."""
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self._ask)
        yield

    def _ask(self) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def log_lines() -> None:
    """Logs as the API process does, where there is none."""
    logging.config.dictConfig(uvicorn.config.LOGGING_CONFIG)


async def serve(
    listening: socket.socket,
    model: ApiModel,
    settings: ServerConfig,
    bounds: Bounds,
    access_log: bool,
) -> str | None:
    """Serves until a signal asks for the end, or the engine ends.

    Args:
        listening: socket that requests come to.
        model: model that answers.
        settings: settings of the engine.
        bounds: bounds of what is taken in.
        access_log: whether each request is logged.

    Returns:
        Why the engine ended; None: it was asked to.
    """
    metrics = Metrics()

    def take(stats: Stats) -> None:
        metrics.stats = stats

    client = EngineClient(settings, on_stats=take)
    config = uvicorn.Config(
        make_app(model, client, metrics, bounds), log_level="info", access_log=access_log
    )
    server = _Server(config)
    ends: list[asyncio.Future[None]] = []
    client.on_dead = lambda why: ends.append(asyncio.ensure_future(_end(server)))
    try:
        with server.capture_signals():
            begin = time.monotonic()
            if (nodes := settings.nodes).count > 1:
                where = f"{nodes.address}:{nodes.port}"
                logger.info("waiting for %d other nodes at %s", nodes.count - 1, where)
            starting = asyncio.create_task(client.start())
            while not starting.done() and not server.should_exit:
                await asyncio.wait({starting}, timeout=0.1)
            if not starting.done():
                return None
            try:
                starting.result()
            except EngineError as error:
                return str(error)
            logger.info(
                "%s on %d ranks loaded in %.1f s: %d blocks of %d tokens a rank, %.1f MB",
                model.names[0],
                settings.world_size,
                time.monotonic() - begin,
                metrics.stats.ranks[0].free if metrics.stats else 0,
                settings.block_size,
                client.block_bytes * (metrics.stats.ranks[0].free if metrics.stats else 0) / 1e6,
            )
            host, port = listening.getsockname()[:2]
            logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
            lines = asyncio.create_task(_log(metrics))
            await server.serve(sockets=[listening])
            lines.cancel()
            return client.dead
    finally:
        await client.close()


async def _end(server: uvicorn.Server) -> None:
    """Ends a server whose engine has ended, once its requests were told."""
    server.should_exit = True
    await asyncio.sleep(_SECONDS_TO_TELL)
    server.force_exit = True


async def _log(metrics: Metrics) -> None:
    """Logs what the engine does, now and then, while it does something."""
    before, then = metrics.stats, time.monotonic()
    while True:
        await asyncio.sleep(_LOG_SECONDS)
        stats, now = metrics.stats, time.monotonic()
        if stats is None or before is None or stats.iterations == before.iterations:
            continue
        held = sum(each.referenced for each in stats.ranks)
        total = sum(each.free + each.referenced + each.cached for each in stats.ranks)
        looked_up = stats.looked_up - before.looked_up
        logger.info(
            "Throughput: %.1f tokens/s fed, Running: %d reqs, Waiting: %d reqs, KV cache usage: "
            "%.1f%%, Prefix cache hit rate: %.1f%%",
            (stats.computed - before.computed) / (now - then),
            stats.running,
            stats.waiting,
            100 * held / total,
            100 * (stats.found - before.found) / looked_up if looked_up else 0.0,
        )
        before, then = stats, now
