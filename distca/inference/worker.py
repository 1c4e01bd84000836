"""A worker: one process of a rank, which runs iterations in the order of their numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from distca.attention import select_kernel
from distca.cost.steps import STEP_SLOTS
from distca.inference.config import EngineConfig
from distca.inference.cuda_graphs import capture_for
from distca.inference.messages import AddRequest, Admitted, Iteration, ModelOutput, SampledToken
from distca.inference.model_runner import ModelRunner
from distca.inference.models import DTYPES, ServedModel, read_model
from distca.inference.sampling import (
    NO_LOGITS,
    NextLogits,
    TokenLogprobs,
    UnusableLogitsError,
    check_highest,
    take_likeliest,
)
from distca.inference.sequence_parallel import share_rows
from distca.inference.tensor_parallel import join_ranks
from distca.inference.transports import make_transport
from distca.plan.span import Int64s, expand_ranges
from distca.runtime import Buffers, CoreAttention, Trace
from distca.schedule.serving.iteration import BatchPlan, plan_iteration


class _Scoring:
    """Log-probabilities of a prompt's tokens, from the logits before each.

    Attributes:
        found: log-probabilities by position.
        failed: why some have none; None: all have.
    """

    def __init__(self, asked: AddRequest) -> None:
        self._asked, self.found = asked, dict[int, TokenLogprobs]()
        self.failed: str | None = None

    def __call__(self, positions: Int64s, logits: torch.Tensor) -> None:
        """Takes logits `[positions, vocabulary]`."""
        tokens, count = self._asked.tokens, self._asked.logprobs or 0
        for position, row in zip(positions.tolist(), logits, strict=True):
            if position + 1 < len(tokens):
                try:
                    logprobs = TokenLogprobs.of(row, tokens[position + 1], count)
                except UnusableLogitsError as error:
                    self.failed = str(error)
                    return
                self.found[position + 1] = logprobs


class Worker:
    """One process of a rank of a model.

    Args:
        config: configuration of the engine.
        device: device of the weights.
        trace: timeline of the iterations, or None.
        model: the model, if it is read by now; None: transformers' of the configuration.

    Attributes:
        runner: the model, and this rank's blocks.
        logits: logits of the tokens that this process chose in the last iteration, by sequence,
            float32 `[vocabulary]`.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        trace: Trace | None = None,
        model: ServedModel | None = None,
    ) -> None:
        self._config = config
        self._trace = trace or Trace(device)
        size = config.parallel.tensor_parallel_size
        dtype, trusted = DTYPES[config.model.dtype], config.model.trust_remote_code
        if model is None:
            model = read_model(config.model.path, dtype, size, trusted, checks_weights=False)
        timeout = timedelta(seconds=config.parallel.step_timeout)
        group, tensor_ranks = join_ranks(size, timeout)
        if config.parallel.split is not None:
            tensor_ranks = share_rows(tensor_ranks, config.parallel.split, device, timeout)
        self._process, self._rank = dist.get_rank(), group.rank()
        self._transport = make_transport(config.parallel.transport, group, device, timeout)
        kernel = select_kernel(device.type, model.shape.head_dim, model.softcap is not None)
        self._masks = model.masks
        buffers = Buffers(device, max(STEP_SLOTS, len(model.masks)))
        core = CoreAttention(self._transport, kernel, buffers, trace=self._trace)
        servers = config.scheduler.servers
        computes = self._rank < config.parallel.world_size - servers
        capture = capture_for(model, device, config.enforce_eager) if computes else None
        # Moves of blocks have buffers of their own.
        mover = (
            make_transport(config.parallel.transport, group, device, timeout)
            if config.moves_blocks
            else None
        )
        # The pool gets its size once it is known what weights leave of a device's memory.
        self.runner = ModelRunner(
            model,
            core,
            device,
            1,
            config.cache.block_size,
            tensor_ranks,
            capture,
            computes,
            mover,
            config.parallel.split,
        )
        self._sequences: dict[int, Admitted] = {}
        self._next, self._ran = 0, False
        self.logits = NO_LOGITS

    def forget(self) -> None:
        """Forgets all iterations and their sequences, so that the first comes again."""
        for number in self._sequences:
            self.runner.drop(number)
        self._sequences.clear()
        self._next, self._ran, self.logits = 0, False, NO_LOGITS
        self.runner.forget()

    def read_rows(
        self, number: int, layer: int, start: int, end: int
    ) -> tuple[Int64s, torch.Tensor, torch.Tensor]:
        """Reads the keys and values of a sequence that this rank holds.

        Args:
            number: number of the sequence, which has blocks for all the positions.
            layer: number of the layer.
            start: first position.
            end: end of the positions.

        Returns:
            The positions that lie on this rank, int64 `[rows]`, and their keys and values,
            `[rows, kv_heads, head_dim]`, copies of what the pool has.
        """
        blocks, size = self._sequences[number].request.blocks, self._config.cache.block_size
        begin, until = start // size, -(-end // size)
        own = np.flatnonzero(blocks.ranks[begin:until] == self._rank)
        numbers = np.array([each.number for each in blocks[begin:until]], dtype=np.int64)[own]
        index = own + begin
        first, last = np.maximum(index * size, start), np.minimum((index + 1) * size, end)
        positions = expand_ranges(first, last - first)
        slots = np.repeat(numbers, last - first) * size + positions % size
        pool = self.runner.attention.pool
        at = torch.from_numpy(slots).to(pool.keys.device)
        keys, values = (each.index_select(0, at) for each in pool.rows(layer))
        return positions, keys, values

    def execute(self, iteration: Iteration) -> ModelOutput | None:
        """Runs an iteration, which must be the next; None: this process has no part in it."""
        if self._process in iteration.members:
            return self._run(iteration)
        self._take_in(iteration)
        return None

    def _take_in(self, iteration: Iteration) -> None:
        """Takes in what an iteration changes: sequences, and this rank's blocks."""
        assert iteration.number == self._next, "an iteration is missing"
        self._next += 1
        self._ran, self.logits = False, NO_LOGITS
        self.runner.move(iteration.batch.moves)
        for number in iteration.drop:
            self._sequences.pop(number, None)
            self.runner.drop(number)
        self._sequences |= {each.asked.number: each for each in iteration.admitted}
        for feed in iteration.batch.feeds:
            if feed.new_blocks:
                own = [block.number for block in feed.new_blocks if block.rank == self._rank]
                self.runner.add_blocks(feed.sequence, own)
        moves = (m for m in iteration.batch.moves if self._rank in (m.source.rank, m.to.rank))
        for number in {move.sequence for move in moves} & self._sequences.keys():
            own = self._sequences[number].request.blocks.of_rank(self._rank)
            self.runner.set_blocks(number, own)

    def _run(self, iteration: Iteration) -> ModelOutput:
        sent = self.runner.bytes_sent
        self._take_in(iteration)
        config, feeds = self._config, iteration.batch.feeds
        plan = plan_iteration(
            feeds,
            self._masks,
            config.cache.block_size,
            config.parallel.world_size,
            config.parallel.strategy,
            config.parallel.head_groups,
        )
        scoring = {
            feed.sequence: _Scoring(sequence.asked)
            for feed in feeds
            if (sequence := self._sequences[feed.sequence]).request.scored
        }
        if self._rank in plan.members or not self._config.members_only:
            fed = {
                feed.sequence: self._sequences[feed.sequence].request.tokens[
                    feed.start : feed.start + feed.count
                ]
                for feed in feeds
            }
            with self._transport.checked(), self._trace.span(*_span(plan)):
                self.logits = self.runner.run_batch(plan, fed, scoring)
            self._ran = True
        sampled = [feed.sequence for feed in feeds if feed.samples and feed.sequence in self.logits]
        chosen = choose_tokens([self._sequences[number] for number in sampled], self.logits)
        chosen += [
            SampledToken(number, -1, failed=each.failed)
            for number, each in scoring.items()
            if each.failed is not None
        ]
        return ModelOutput(
            chosen,
            self.runner.bytes_sent - sent,
            {number: each.found for number, each in scoring.items() if each.found},
            self._bytes_by_sequence(plan),
        )

    def where_not_finite(self) -> str:
        """Says where the model stopped being finite in the last iteration. Collective.

        Returns:
            End of a sentence; empty if nothing is found.
        """
        return self.runner.where_not_finite(self._ran)

    def _bytes_by_sequence(self, plan: BatchPlan) -> dict[int, int]:
        """Bytes that an iteration moved for each sequence, which one process alone counts."""
        alone = self._config.processes == 1
        if not self._config.counts_bytes or not plan.members or alone:
            return {}
        if self._process != min(plan.members) * self._config.parallel.tensor_parallel_size:
            return {}
        return self.runner.bytes_by_sequence()


def _span(plan: BatchPlan) -> tuple[str, str]:
    """Name and lane of an iteration on the timeline."""
    parts = []
    if plan.prefill is not None:
        parts.append(f"prefill: {int(plan.prefill.new.tokens_per_rank().sum())} tokens")
    if plan.decode is not None:
        parts.append(f"decode: {len(plan.decode.sequences)} tokens")
    return ", ".join(parts), "ticks"


def choose_tokens(sequences: Sequence[Admitted], logits: NextLogits) -> list[SampledToken]:
    """Chooses the token that follows each sequence; says why none can be chosen, if so."""
    plain = {asked.number for asked, _ in sequences if asked.takes_likeliest}
    likeliest = _likeliest(plain, logits)
    return [
        likeliest.get(asked.number) or _choose(asked, request.tokens, logits[asked.number])
        for asked, request in sequences
    ]


def _likeliest(numbers: Collection[int], logits: NextLogits) -> dict[int, SampledToken]:
    """Takes the likeliest tokens of some sequences at once; returns them by sequence."""
    if not numbers:
        return {}
    order, rows = logits.together(numbers)
    chosen = {}
    for number, high, token in zip(order, *take_likeliest(rows), strict=True):
        try:
            check_highest(high)
            chosen[number] = SampledToken(number, token)
        except UnusableLogitsError as error:
            chosen[number] = SampledToken(number, -1, failed=str(error))
    return chosen


def _choose(asked: AddRequest, tokens: Sequence[int], logits: torch.Tensor) -> SampledToken:
    """Chooses the token that follows `tokens`, a prompt and the answer so far."""
    prompt, answer = asked.tokens, tokens[len(asked.tokens) :]
    changed = asked.penalties.apply(logits, prompt, answer)
    try:
        token = asked.sampling.choose(changed, asked.number, len(tokens))
        if asked.logprobs is None:
            return SampledToken(asked.number, token)
        return SampledToken(asked.number, token, TokenLogprobs.of(logits, token, asked.logprobs))
    except UnusableLogitsError as error:
        return SampledToken(asked.number, -1, failed=str(error))
