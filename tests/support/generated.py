"""`LLM` in the ranks of a test, which answers turns of conversations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from distca.inference.defaults import configure
from distca.inference.llm import LLM
from distca.inference.messages import AddRequest, Completion, RequestOutput
from distca.inference.models import ServedModel
from distca.inference.sampling import SamplingParams

Turns = list[dict[int, list[int]]]


@dataclass
class Generated:
    """What a rank has of the answers to turns.

    Attributes:
        turns: answers of each turn, by conversation.
        planned: bytes by the plans, all ranks together.
        sent: bytes that this rank sent, as counted.
        referenced: blocks that are still referenced at the end, all ranks together.
    """

    turns: list[dict[int, Completion]] = field(default_factory=list)
    planned: int = 0
    sent: int = 0
    referenced: int = 0

    def outputs(self, turns: Turns) -> list[RequestOutput]:
        """The turns with all tokens before each."""
        prompts = prompts_of(turns, self.turns)
        return [
            RequestOutput(prompt, [answers[number]])
            for one, answers in zip(prompts, self.turns, strict=True)
            for number, prompt in one.items()
        ]


def prompts_of(turns: Turns, answered: list[dict[int, Completion]]) -> Turns:
    """The tokens before each answer."""
    before: dict[int, list[int]] = {}
    found = []
    for new, answers in zip(turns, answered, strict=False):
        found.append({number: before.get(number, []) + ids for number, ids in new.items()})
        before |= {n: ids + answers[n].token_ids for n, ids in found[-1].items()}
    return found


def generate_on_a_rank(
    model: ServedModel, ranks: int, sampling: SamplingParams, turns: Turns, changes: dict[str, Any]
) -> Generated:
    """Answers all turns; those of one turn together."""
    # Small blocks, so that there are many; prompts are fed whole.
    settings = {"block_size": 4, "max_num_batched_tokens": 4096, "keeps_logits": True}
    llm = LLM(configure(model, ranks, cache_bytes=1 << 24, **(settings | changes)))
    found = Generated()
    before: dict[int, list[int]] = {}
    for new in turns:
        prompts = {number: before.get(number, []) + ids for number, ids in new.items()}
        requests = [AddRequest(n, ids, sampling) for n, ids in prompts.items()]
        answers = llm.answer(requests)
        before |= {number: ids + answers[number].token_ids for number, ids in prompts.items()}
        found.turns.append(answers)
    found.planned, found.sent = llm.bytes_planned, llm.bytes_sent
    found.referenced = sum(llm.engine.cache.referenced(rank) for rank in range(ranks))
    return found


def abort_on_a_rank(model: ServedModel) -> list[tuple[list[int], str]]:
    """Five answers on two ranks, three at a time. One rank alone aborts each of four.

    Returns:
        Tokens of the answers and why they ended; then those of a call in which nobody aborts.
    """
    llm = LLM(configure(model, 2, cache_bytes=1 << 24, max_num_seqs=3))
    told: list[int] = []

    def abort(number: int, token: int) -> None:
        told.append(number)
        moment = number, told.count(number)
        if dist.get_rank() == 1:
            if moment == (0, 1):
                # It waits.
                llm.abort(3)
            elif moment == (1, 2):
                llm.abort(1)
        elif moment == (2, 5):
            # The iteration that follows computes its last token.
            llm.abort(2)
        elif moment == (0, 6):
            # That was its last token.
            llm.abort(0)

    prompts = [[1, 2, 3], [4, 5] * 20, [6] * 35, [7, 8], [9] * 50]
    sampling = SamplingParams(max_tokens=6)
    done = llm.generate(prompts, sampling, on_token=abort)
    assert not sum(llm.engine.cache.referenced(rank) for rank in range(2))
    assert not llm.engine.scheduler.waiting + llm.engine.scheduler.running
    assert 3 not in told
    done += llm.generate(prompts, sampling)
    assert llm.bytes_planned > 0
    return [(each.outputs[0].token_ids, each.outputs[0].finish_reason) for each in done]


def ask_apart(model: ServedModel) -> tuple[list[str], list[list[int]]]:
    """Calls of two ranks that differ; then one that does not.

    Returns:
        Why each of the first ones was refused, and the tokens of the last.
    """
    rank, sampling = dist.get_rank(), SamplingParams(max_tokens=3)
    llm = LLM(configure(model, 2, cache_bytes=1 << 24))
    said: list[str] = []
    for prompts, how, more in (
        ([[1, 2, 3 + rank]], sampling, {}),
        ([[1, 2]] * (1 + rank), sampling, {}),
        ([[1]], SamplingParams(max_tokens=2 + rank), {}),
        ([[1]], sampling, {"n": 1 + rank}),
    ):
        try:
            llm.generate(prompts, how, **more)
        except ValueError as error:
            said.append(str(error))
    answered = llm.generate([[1, 2, 3], [4, 5]], sampling)
    return said, [each.outputs[0].token_ids for each in answered]
