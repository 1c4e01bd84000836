"""Answers of a model: prompts and turns prefilled, tokens decoded, alike on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from distca.inference.finite import NotFiniteError
from distca.inference.model_runner import ModelRunner
from distca.inference.models import ServedModel
from distca.inference.pool_size import check_room
from distca.inference.sampling import UNUSABLE, SamplingParams, UnusableLogitsError
from distca.inference.step_planner import Step, StepPlanner
from distca.runtime import Trace
from distca.schedule.serving.layer_plans import PrefillStrategy
from distca.schedule.serving.partitions import Chain
from distca.schedule.serving.request import FinishReason


@dataclass
class Answer:
    """An answer to a prompt or to a turn.

    Attributes:
        token_ids: tokens of the answer, the one that stopped it included.
        finish_reason: "stop", or "length" if it had the most tokens.
        ttft_seconds: seconds from the begin of its prefill to its first token.
        bytes_moved: bytes that its steps moved between ranks, by their plans.
        logits: logits of each token where the first rank was told to keep them.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    ttft_seconds: float = 0.0
    bytes_moved: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


class Generator:
    """Generation on one rank. All ranks make the same calls, and have the same answers.

    Args:
        model: model that answers.
        rank: this rank's part of it.
        planner: planner of steps.
        strategy: what travels in prefills, or who chooses it.
        sampling: choice of tokens.
        keeps_logits: whether answers keep their logits.
        told: function that is told of each token, with its sequence.
        trace: timeline of the steps; None: there is none.
    """

    def __init__(
        self,
        model: ServedModel,
        rank: ModelRunner,
        planner: StepPlanner,
        strategy: PrefillStrategy,
        sampling: SamplingParams,
        keeps_logits: bool = False,
        told: Callable[[int, int], None] = lambda sequence, token: None,
        trace: Trace | None = None,
    ) -> None:
        self._model, self._rank, self._planner = model, rank, planner
        self._strategy, self._sampling, self._told = strategy, sampling, told
        self._keeps_logits = keeps_logits
        self._trace = trace or Trace(torch.device("cpu"))
        self.bytes_planned = 0

    def answer(self, new: Mapping[int, Sequence[int]]) -> dict[int, Answer]:
        """Prefills new tokens of sequences together, and decodes until all answers end.

        The keys and values of all tokens but the last of each answer are kept.

        Args:
            new: tokens of each sequence that follow those that are held, at least one.

        Raises:
            NoRoom: a pool is too small for their keys and values; nothing has run.
            NotFiniteError: no token can be chosen for a sequence, on any rank.
        """
        counts = {sequence: len(tokens) for sequence, tokens in new.items()}
        check_room(self._planner, self._model, counts, self._sampling.max_tokens)
        begin = time.perf_counter()
        answers = {sequence: Answer() for sequence in new}
        feed = {sequence: list(tokens) for sequence, tokens in new.items()}
        decodes = False
        while feed:
            step, chosen = self._step(feed, decodes, answers)
            feed = {}
            for sequence, token in chosen.items():
                answer = answers[sequence]
                if not answer.token_ids:
                    answer.ttft_seconds = time.perf_counter() - begin
                answer.token_ids.append(token)
                self._told(sequence, token)
                if token in self._sampling.stops:
                    answer.finish_reason = "stop"
                elif len(answer.token_ids) < self._sampling.max_tokens:
                    feed[sequence] = [token]
            if feed and not decodes:
                self._restripe(step, answers)
            decodes = True
        return answers

    def time_prefill(self, parts: Sequence[int]) -> tuple[float, float]:
        """Feeds a prompt of any tokens in parts of a chain, and forgets it.

        Args:
            parts: tokens of each rank's part, the first of the chain first; none at its end.

        Returns:
            CPU seconds of this process, and seconds until it has ended.
        """
        tokens = sum(parts)
        chain = Chain(len(parts), tuple(part / tokens for part in parts))
        ids = [number % self._model.vocab_size for number in range(tokens)]
        if dist.is_initialized():
            dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        step = self._planner.plan({0: tokens}, "pass-kv", decodes=False, sharding=chain)
        self._rank.run(step, {0: ids})
        found = time.process_time() - cpu, time.perf_counter() - wall
        self.drop(0)
        return found

    def drop(self, sequence: int) -> None:
        """Frees the keys and values of a sequence."""
        self._planner.drop(sequence)
        self._rank.drop(sequence)

    def _restripe(self, step: Step, answers: Mapping[int, Answer]) -> None:
        """Moves what a prefill has left unevenly, if that is asked for."""
        planned = self._planner.restripe(step)
        if planned is None:
            return
        move, blocks = planned
        model = self._model
        copies = len(model.windows) * model.tensor_parallel_size
        moved = (copies * move.bytes_by_sequence(model.shape)).tolist()
        for sequence, nbytes in zip(move.sequences, moved, strict=True):
            answers[sequence].bytes_moved += nbytes
        self.bytes_planned += sum(moved)
        with self._trace.span("restripe", "ticks", bytes_moved=sum(moved)):
            self._rank.restripe(move, blocks)

    def _step(
        self, feed: Mapping[int, list[int]], decodes: bool, answers: Mapping[int, Answer]
    ) -> tuple[Step, dict[int, int]]:
        counts = {sequence: len(tokens) for sequence, tokens in feed.items()}
        step = self._planner.plan(counts, "pass-q" if decodes else self._strategy, decodes)
        moved = step.bytes_by_sequence(self._model)
        for sequence, nbytes in zip(step.sequences, moved, strict=True):
            answers[sequence].bytes_moved += nbytes
        self.bytes_planned += sum(moved)
        name = f"{'decode' if decodes else 'prefill'}: {sum(counts.values())} tokens"
        with self._trace.span(name, "ticks", sequences=len(counts), bytes_moved=sum(moved)):
            logits = self._rank.run(step, feed)
        if self._keeps_logits:
            for sequence, row in self._shared(step, logits).items():
                answers[sequence].logits.append(row)
        chosen = self._chosen(step, logits)
        for sequence, token in chosen.items():
            if token < 0:
                where = self._rank.where_not_finite(step, feed)
                why = f"no token can be chosen, since the logits are {UNUSABLE[token]}{where}"
                raise NotFiniteError(sequence, why)
        return step, chosen

    def _chosen(self, step: Step, logits: Mapping[int, torch.Tensor]) -> dict[int, int]:
        """Chooses the next token of each sequence, on the rank that has its logits.

        A negative number is an index of `UNUSABLE`, from its end: no token can be chosen.
        """
        chosen = torch.zeros(len(step.sequences), dtype=torch.int64)
        for number, sequence in enumerate(step.sequences):
            if sequence in logits:
                position = self._planner.length(sequence)
                try:
                    chosen[number] = self._sampling.choose(logits[sequence], sequence, position)
                except UnusableLogitsError as error:
                    # All ranks learn it with the tokens, and look for the reason together.
                    chosen[number] = UNUSABLE.index(error.what) - len(UNUSABLE)
        return dict(zip(step.sequences, _summed(chosen).tolist(), strict=True))

    def _shared(self, step: Step, logits: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gives the logits of all sequences to all ranks."""
        table = torch.zeros(len(step.sequences), self._model.vocab_size)
        for number, sequence in enumerate(step.sequences):
            if sequence in logits:
                table[number] = logits[sequence].cpu()
        return dict(zip(step.sequences, _summed(table), strict=True))


def _summed(values: torch.Tensor) -> torch.Tensor:
    """Adds up values of the CPU, of which one rank alone has any."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        on_device = values.cuda() if dist.get_backend() == "nccl" else values
        dist.all_reduce(on_device)
        return on_device.cpu()
    return values
