"""A real engine whose workers compute nothing, in this process: a block's rows hold their tokens.

The token that follows a sequence is drawn from logits that all rows of its blocks decide, so that
a wrong block, or one that another sequence was given too, gives a wrong answer.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from distca.inference.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from distca.inference.engine import Iteration
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
from support.small_models import VOCABULARY


def token_settings(
    block_size: int = 4,
    tokens: int = 32,
    sequences: int = 8,
    world_size: int = 2,
    caching: bool = True,
    positions: int = 96,
) -> EngineConfig:
    """Settings of an engine without a model; sequences of 12 tokens are long."""
    return EngineConfig(
        ModelConfig("no model", "float32", (None,), positions, 1 << 20, b"salt"),
        SchedulerConfig(sequences, tokens, block_size, threshold=12),
        ParallelConfig(world_size),
        CacheConfig(block_size, 1 << 20, prefix_caching=caching),
    )


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
    """All workers of an engine.

    Args:
        settings: settings of the engine.

    Attributes:
        held: sequences that they know.
        admitted: times that each sequence began to run.
    """

    def __init__(self, settings: EngineConfig) -> None:
        self._size = settings.cache.block_size
        self._decoder = decoder(ExecuteBatch)
        self._rows: dict[tuple[int, int], list[int]] = {}
        self._next = 0
        self.held: dict[int, _Held] = {}
        self.admitted: Counter[int] = Counter()

    def run(self, begun: Iteration) -> dict[int, ModelOutput]:
        """Runs an iteration, which is encoded as on its way; returns what its members say."""
        chosen, scores = self._run(self._decoder.decode(encode(begun.batch)))
        done = {}
        for rank in sorted(begun.members):
            told = ModelOutput(chosen, 0, scores)
            done[rank] = told
            chosen, scores = [], []
        return done

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
