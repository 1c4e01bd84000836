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
from distca.inference.messages import AddRequest, Iteration, ModelOutput, SampledToken
from distca.inference.sampling import TokenLogprobs
from distca.schedule.serving.blocks import Block
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.request import Request
from support.small_models import VOCABULARY

Scores = dict[int, dict[int, TokenLogprobs]]
"""Log-probabilities of tokens of prompts by their positions, by sequence."""


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
        SchedulerConfig(sequences, tokens, block_size, threshold=12, prefix_caching=caching),
        ParallelConfig(world_size),
        CacheConfig(block_size, 1 << 20),
    )


def choose(of: AddRequest, prompt: int, tokens: Sequence[int]) -> SampledToken:
    """Chooses the token that follows `tokens`, of which the first are a prompt."""
    logits = _logits(tokens)
    changed = of.penalties.apply(logits, tokens[:prompt], tokens[prompt:])
    token = of.sampling.choose(changed, of.number, len(tokens))
    told = None if of.logprobs is None else TokenLogprobs.of(logits, token, of.logprobs)
    return SampledToken(of.number, token, told)


def _logits(tokens: Sequence[int]) -> torch.Tensor:
    seed = zlib.crc32(np.array(tokens, dtype=np.int32).tobytes())
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(VOCABULARY))


def right_scores(submit: AddRequest, start: int, end: int) -> dict[int, TokenLogprobs]:
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
        if tokens[-1] in (sampling.stops or ()) and len(tokens) - prompt >= submit.penalties.fewest:
            break
    return tokens[prompt:]


@dataclass
class _Held:
    """A sequence as workers know it."""

    asked: AddRequest
    request: Request
    blocks: list[Block] = field(default_factory=list)


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
        self._rows: dict[Block, list[int]] = {}
        self._next = 0
        self.held: dict[int, _Held] = {}
        self.admitted: Counter[int] = Counter()

    def run(self, begun: Iteration) -> dict[int, ModelOutput]:
        """Runs an iteration; returns what its members say."""
        chosen, scores = self._run(begun)
        done = {}
        for rank in sorted(begun.members):
            told = ModelOutput(chosen, 0, scores)
            done[rank] = told
            chosen, scores = [], {}
        return done

    def _run(self, iteration: Iteration) -> tuple[list[SampledToken], Scores]:
        assert iteration.number == self._next, "an iteration is missing"
        self._next += 1
        for number in iteration.drop:
            self.held.pop(number, None)
        for asked, request in iteration.admitted:
            self.held[asked.number] = _Held(asked, request)
            self.admitted[asked.number] += 1
        for feed in iteration.batch.feeds:
            sequence = self.held[feed.sequence]
            sequence.blocks += feed.new_blocks
            for position in range(feed.start, feed.start + feed.count):
                block = sequence.blocks[position // self._size]
                rows = self._rows.setdefault(block, [-1] * self._size)
                rows[position % self._size] = sequence.request.tokens[position]
        chosen, scores = [], Scores()
        for feed in iteration.batch.feeds:
            sequence = self.held[feed.sequence]
            prompt = len(sequence.asked.tokens)
            if sequence.request.scored:
                end = min(feed.start + feed.count, prompt - 1)
                scores[feed.sequence] = right_scores(sequence.asked, feed.start, end)
            if feed.samples:
                rows = [row for block in sequence.blocks for row in self._rows[block]]
                seen = rows[: feed.start + feed.count]
                chosen.append(choose(sequence.asked, prompt, seen))
        return chosen, {number: found for number, found in scores.items() if found}
