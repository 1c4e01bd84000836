"""Answers of `distca generate` on one rank, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distca.attention import select_kernel
from distca.cost.step_memory import STEP_SLOTS
from distca.inference.generation import Generator
from distca.inference.model_runner import ModelRunner
from distca.inference.models import load_tokenizer, read_model
from distca.inference.pool_size import PoolSize, Sharing
from distca.inference.sampling import SamplingParams
from distca.runtime import Buffers, CoreAttention
from distca.transport import CollectiveTransport


class OneRank:
    """What a rank of `distca generate` has: a model, a pool, and a generator of answers.

    Args:
        folder: folder of the model.
    """

    def __init__(self, folder: Path) -> None:
        model = self._model = read_model(str(folder), torch.float32)
        self.tokenizer = load_tokenizer(str(folder))
        device, pool = torch.device("cpu"), PoolSize(64)
        buffers = Buffers(device, max(STEP_SLOTS, len(model.masks)))
        transport = CollectiveTransport(dist.group.WORLD, device)
        core = CoreAttention(transport, select_kernel("cpu", model.shape.head_dim), buffers)
        self._rank = ModelRunner(model, core, device, pool.blocks, pool.block_size)
        self._planner = pool.planner(model, Sharing(1, pool.block_size))

    def answers(
        self, prompts: Sequence[Sequence[int]], count: int, first: int = 0, **sampling: Any
    ) -> list[list[int]]:
        """Answers prompts together; `first` is the number of the first, by which tokens differ."""
        chosen = SamplingParams(count, stops=self._model.stops, **sampling)
        generator = Generator(self._model, self._rank, self._planner, "pass-kv", chosen)
        found = generator.answer(dict(enumerate(prompts, first)))
        for number in found:
            generator.drop(number)
        return [answer.token_ids for answer in found.values()]

    def text(self, prompt: str, count: int, choice: int = 0, **sampling: Any) -> str:
        """The answer to a text."""
        return self.texts([prompt], count, choice, **sampling)[0]

    def texts(
        self, prompts: Sequence[str], count: int, first: int = 0, **sampling: Any
    ) -> list[str]:
        """Answers to texts, together."""
        ids = [self.tokenizer.encode(prompt) for prompt in prompts]
        return [
            str(self.tokenizer.decode(answer, skip_special_tokens=True))
            for answer in self.answers(ids, count, first, **sampling)
        ]


@contextmanager
def one_rank(folder: Path) -> Iterator[OneRank]:
    """Makes this process a group of one rank while it answers."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield OneRank(folder)
    finally:
        dist.destroy_process_group()
