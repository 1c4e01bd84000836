"""Prefills that a server measures before it takes requests, if it was given no times."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import zmq

from distca.inference.messages import encode
from distca.schedule.serving.blocks import BlockPool
from distca.schedule.serving.cdsp import Prefill, PrefillModel
from distca.schedule.serving.cdsp.prefill_blocks import Piece, PrefillBlocks
from distca.schedule.serving.prefix_cache import PrefixCache
from distca.serve.engine.settings import ServerConfig
from distca.serve.engine.workers import Workers
from distca.serve.handoff.messages import ChunkDone, Forget, RunChunk
from distca.serve.handoff.settings import Roles

_PARTS = (32, 16, 8)
"""Lengths of the prompts: parts of the most positions."""


def hardware() -> str:
    """Names the device that prefills run on."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def measure_prefills(
    settings: ServerConfig, roles: Roles, blocks: int, workers: Workers, poller: zmq.Poller
) -> PrefillModel:
    """Measures prompts of three lengths on 1, 2, 4, ... ranks, and fits their times.

    Args:
        settings: settings of the engine.
        roles: which ranks prefill.
        blocks: blocks of a prefill rank.
        workers: workers, of which nothing else is asked meanwhile.
        poller: poller that notices what they say.
    """
    held = PrefillBlocks(PrefixCache(BlockPool(roles.prefill, blocks, settings.block_size)))
    measured = []
    prompts = list(_prompts(settings, roles, blocks))
    for number, (degree, tokens) in enumerate(prompts):
        piece = Piece(0, tokens, frozenset(range(degree)))
        assert held.reserve(number, [piece])
        given = held.begin(number, piece).blocks
        step = RunChunk(
            # Steps of requests begin at 0.
            number - len(prompts),
            number,
            0,
            [0] * tokens,
            [block.rank for block in given],
            [block.number for block in given],
            [],
            None,
        )
        for rank in range(degree):
            workers.post(rank, encode(step))
            workers.post(rank, encode(Forget(number)))
        seconds: list[float] = []
        while len(seconds) < degree:
            poller.poll(1000)
            done = (each for each in workers.receive() if isinstance(each, ChunkDone))
            seconds += (each.seconds for each in done)
        held.release(number)
        # The first prompt of a degree warms up.
        measured.append(Prefill(degree, tokens, max(seconds)))
    kept = [each for number, each in enumerate(measured) if number % (len(_PARTS) + 1)]
    found = PrefillModel.fit(kept, hardware(), settings.model)
    if roles.keep_times is not None:
        found.save(Path(roles.keep_times))
    return found


def _prompts(settings: ServerConfig, roles: Roles, blocks: int) -> Iterator[tuple[int, int]]:
    """Degrees and tokens to measure, of each degree one to warm up first."""
    most = min(settings.positions, blocks * settings.block_size)
    lengths = [max(most // part, number + 1) for number, part in enumerate(_PARTS)]
    degree = 1
    while degree <= roles.prefill:
        for tokens in (lengths[0], *lengths):
            yield degree, tokens
        degree *= 2
