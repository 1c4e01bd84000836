"""Answers of an `LLM` on one rank, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distca.inference.llm import LLM, configure
from distca.inference.messages import AddRequest
from distca.inference.models import load_tokenizer, read_model
from distca.inference.sampling import SamplingParams


class OneRank:
    """A model, its tokenizer, and what answers.

    Args:
        folder: folder of the model.
    """

    def __init__(self, folder: Path) -> None:
        self._model = read_model(str(folder), torch.float32)
        self.tokenizer = load_tokenizer(str(folder))
        self._llm = LLM(configure(self._model))

    def answers(
        self, prompts: Sequence[Sequence[int]], count: int, first: int = 0, **sampling: Any
    ) -> list[list[int]]:
        """Answers prompts together; `first` is the number of the first, by which tokens differ."""
        chosen = SamplingParams(count, stops=self._model.stops, **sampling)
        requests = [AddRequest(n, n, list(ids), chosen) for n, ids in enumerate(prompts, first)]
        return [answer.token_ids for answer in self._llm.answer(requests).values()]

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
    try:
        yield OneRank(folder)
    finally:
        dist.destroy_process_group()
