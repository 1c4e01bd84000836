"""A model that answers prompts, on one process or on several that make the same calls.

    llm = LLM(configure(read_model("path/to/model", torch.float32)))
    [answered] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8))
    answered.outputs[0].token_ids

On several ranks `torchrun` starts the program. Each process makes one `LLM`, and all make the same
calls. Each has its own engine. All engines decide the same, so processes send each other only what
an iteration brought: tokens, log-probabilities and counts.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from distca.inference.config import EngineConfig
from distca.inference.engine import Engine
from distca.inference.finite import NotFiniteError
from distca.inference.messages import (
    AddRequest,
    Completion,
    Iteration,
    ModelOutput,
    OnToken,
    Output,
    RequestOutput,
    SampledToken,
    check_tokens,
    whole_numbers,
)
from distca.inference.processes import Processes
from distca.inference.profiled_room import agreed_room
from distca.inference.sampling import NO_PENALTIES, Penalties, SamplingParams
from distca.inference.worker import Worker
from distca.runtime import Trace
from distca.schedule.serving.cdsp.groups import Ranks
from distca.schedule.serving.partitions import Chain


class LLM:
    """A model that answers prompts. All processes make the same calls, and have the same answers.

    Prompts run together as far as there is room (continuous batching); long ones are fed in
    chunks. A later prompt that begins as an earlier one did finds its keys and values.

    Args:
        config: configuration of the engine.
        trace: timeline of this process, or None.

    Raises:
        ValueError: there are not as many processes as the configuration has.
    """

    def __init__(self, config: EngineConfig, trace: Trace | None = None) -> None:
        self._config, self._processes = config, Processes(config)
        self._worker = Worker(config, self._processes.device, trace)
        blocks = agreed_room(self._worker, config, self._processes)
        self._worker.runner.resize_pool(blocks)
        self._engine = Engine(config, blocks)
        # Answers that this process ends with the iteration under way, or the next.
        self._aborts: set[int] = set()
        self._answering = False
        self._failed = False
        self._lock = threading.Lock()
        self.bytes_planned = 0
        leave = weakref.WeakMethod(self._leave)
        atexit.register(lambda: (there := leave()) and there())

    def _leave(self) -> None:
        """Ends the threads of process groups, before the interpreter ends.

        Gloo's threads may still hold tensors of the last exchange. If they let go of them while the
        interpreter ends, it aborts. Not after a failure: threads may then wait for a dead process.
        """
        if not self._failed:
            # Groups, and with them their threads, end with the last reference.
            del self._worker, self._engine
            gc.collect()
            self._processes.leave()

    @property
    def engine(self) -> Engine:
        """Requests and blocks, the same on all processes. It is there to be read."""
        return self._engine

    @property
    def bytes_sent(self) -> int:
        """Bytes that this process has sent to others, as its transports counted them."""
        return self._worker.runner.bytes_sent

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
        n: int = 1,
        on_token: OnToken | None = None,
        *,
        penalties: Penalties = NO_PENALTIES,
        logprobs: int | None = None,
        prompt_logprobs: bool = False,
    ) -> list[RequestOutput]:
        """Answers prompts. Collective.

        Args:
            prompts: token ids of each, at least one.
            sampling: choice of tokens; None: the likeliest, up to 64.
            n: answers to each prompt, which is computed once for all of them; at least 1.
            on_token: function that is called with each token and `n` times the prompt's number plus
                the answer's. It may `abort` answers.
            penalties: changes of logits, and fewest tokens of an answer. Without `stops` of their
                own they have those of `sampling`.
            logprobs: number of likeliest tokens whose log-probabilities each answer has, beside
                those of its own tokens; None: it has none.
            prompt_logprobs: whether answers have log-probabilities of their prompts' tokens. The
                prefix cache is not used for such prompts.

        Returns:
            The prompts with their answers, in their order.

        Raises:
            ValueError: the model cannot be fed a prompt (it is empty, too long with its answer, or
                has a token outside of the vocabulary), its keys and values could never be held, or
                a number is out of range; nothing has run.
            NotFiniteError: no token can be chosen for an answer, on any rank.
        """
        sampling = sampling or SamplingParams()
        # Before processes wait for each other: from here on a thread may abort.
        self._take_aborts()
        given = self._checked(prompts, sampling, n, penalties, logprobs)
        if sampling.stops is None:
            sampling = replace(sampling, stops=self._config.model.stops)
        # Sets are written in any order.
        stops = sorted(sampling.stops or ()), sorted(penalties.stops)
        numbers = [replace(each, stops=frozenset()) for each in (sampling, penalties)]
        self._check_calls((given, stops, numbers, n, logprobs, prompt_logprobs))
        if penalties.fewest and not penalties.stops:
            penalties = replace(penalties, stops=sampling.stops or frozenset())
        requests = []
        for number, prompt in enumerate(given):
            for choice in (*range(1, n), 0):
                # The answer that computes the prompt is added last.
                one, leader = n * number + choice, n * number if choice else None
                requests.append(
                    AddRequest(
                        one,
                        prompt,
                        sampling,
                        penalties,
                        logprobs,
                        leader,
                        scored=prompt_logprobs and leader is None,
                    )
                )
        completions = self.answer(requests, on_token)
        return [
            RequestOutput(prompt, [completions[n * number + choice] for choice in range(n)])
            for number, prompt in enumerate(given)
        ]

    def abort(self, number: int) -> None:
        """Ends an answer early, as it is then: `on_token` may call this, or another thread once
        `generate` has begun.

        One process is enough, since processes tell each other with the next iteration. All of them
        end the answer there, and `on_token` hears no more of it. What has ended stays as it is.

        Args:
            number: number of the answer, with which `on_token` is called.

        Raises:
            ValueError: it is not a whole number.
        """
        if not isinstance(number, int) or isinstance(number, bool):
            raise ValueError(
                f"{number!r} is not the number of an answer: give the one that on_token gets"
            )
        with self._lock:
            self._aborts.add(number)

    def _take_aborts(self) -> set[int]:
        """Returns what this process wants to abort, once."""
        with self._lock:
            taken, self._aborts = self._aborts, set()
        return taken

    def answer(
        self, requests: Sequence[AddRequest], on_token: OnToken | None = None
    ) -> dict[int, Completion]:
        """Answers requests. Collective; see `generate`.

        Args:
            requests: requests, each with a number of its own.
            on_token: function that is called with each token.

        Returns:
            Answers by the requests' numbers.

        Raises:
            RuntimeError: `on_token` asks for answers itself.
        """
        if self._answering:
            raise RuntimeError("on_token cannot call generate: wait until the first call returns")
        self._answering = True
        try:
            return self._answer(requests, on_token)
        except BaseException as error:
            # A process that refuses a prompt has sent nothing.
            self._failed = not isinstance(error, ValueError)
            # The next call uses the same numbers.
            for request in requests:
                self._engine.abort(request.number)
            if self._engine.busy:
                self._engine.finish({})
            raise
        finally:
            self._answering = False
            # Those of answers that have ended.
            self._take_aborts()

    def _checked(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        n: int,
        penalties: Penalties,
        logprobs: int | None,
    ) -> list[list[int]]:
        """Returns the prompts, once all that is asked for is known to be possible."""
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"{n} answers to each prompt: ask for a whole number of at least 1")
        if sampling.max_tokens < 1:
            raise ValueError(f"{sampling.max_tokens} tokens of an answer: ask for at least 1")
        if logprobs is not None and not (isinstance(logprobs, int) and logprobs >= 0):
            raise ValueError(f"log-probabilities of {logprobs} tokens: ask for at least 0")
        model = self._config.model
        given = [whole_numbers(each, f"prompt {at}") for at, each in enumerate(prompts)]
        for number, prompt in enumerate(given):
            check_tokens(model, prompt, sampling.max_tokens, f"prompt {number}")
        named = {"penalties": penalties.tokens, "stops": sampling.stops or frozenset()}
        for name, tokens in named.items():
            for token in sorted(tokens):
                if not 0 <= token < model.vocab_size:
                    raise ValueError(
                        f"{name} name the token {token}, but the vocabulary has "
                        f"{model.vocab_size:,} tokens"
                    )
        return given

    def _check_calls(self, call: object) -> None:
        """Refuses a call that is not every process's. Collective."""
        if self._processes.count == 1:
            return
        digests = self._processes.gather(hashlib.sha256(repr(call).encode()).digest())
        others = [rank for rank, each in enumerate(digests) if each != digests[0]]
        if others:
            raise ValueError(
                f"process {others[0]} asks for other answers than process 0: all processes make "
                "the same calls, with the same prompts"
            )

    def _answer(
        self, requests: Sequence[AddRequest], on_token: OnToken | None
    ) -> dict[int, Completion]:
        begin = time.perf_counter()
        for request in requests:
            self._engine.add(request)
        answers = {request.number: Completion() for request in requests}
        left = set(answers)
        while left:
            outputs, aborted = self._iterate(answers)
            for number in aborted:
                answers[number].finish_reason = "abort"
            left -= aborted
            for output in outputs:
                answer = answers[output.number]
                if not answer.token_ids:
                    answer.ttft_seconds = time.perf_counter() - begin
                answer.token_ids.append(output.token)
                if output.logprobs is not None:
                    answer.logprobs.append(output.logprobs)
                answer.prompt_logprobs += output.scores
                if on_token is not None:
                    on_token(output.number, output.token)
                if output.finish is not None:
                    answer.finish_reason = output.finish
                    left.discard(output.number)
        return answers

    def time_prefill(self, parts: Sequence[int]) -> tuple[float, float]:
        """Feeds a prompt of any tokens over a chain of ranks, and forgets it. Collective.

        Args:
            parts: tokens of each rank's part, the first of the chain first; none at its end. They
                are cut between blocks.

        Returns:
            CPU seconds of this process, and seconds until it has ended.
        """
        tokens = sum(parts)
        return self._timed(tokens, Chain(len(parts), tuple(part / tokens for part in parts)), None)

    def time_group(self, ranks: int, tokens: int) -> float:
        """Feeds a prompt of any tokens to the first ranks, and forgets it. Collective.

        Args:
            ranks: number of ranks.
            tokens: tokens of the prompt.

        Returns:
            Seconds until it has ended.
        """
        assert self._config.scheduler.growing is not None, "groups grow"
        return self._timed(tokens, None, frozenset(range(ranks)))[1]

    def _timed(self, tokens: int, chain: Chain | None, group: Ranks | None) -> tuple[float, float]:
        """Feeds a prompt, and forgets it; returns CPU seconds of this process, and seconds."""
        self._engine.cache.reset()
        self._processes.wait_for_all()
        cpu, wall = time.process_time(), time.perf_counter()
        prompt = [n % 2 for n in range(tokens)]
        self._engine.add(AddRequest(0, prompt, SamplingParams(1), chain=chain, group=group))
        outputs: list[Output] = []
        while not outputs:
            outputs, _ = self._iterate({0: Completion()})
        return time.process_time() - cpu, time.perf_counter() - wall

    def _iterate(self, answers: Mapping[int, Completion]) -> tuple[list[Output], set[int]]:
        """Runs an iteration; returns the tokens that it brought, and whose answers it aborted."""
        begun = self._engine.schedule()
        assert begun is not None, "requests wait, and nothing can be fed"
        done, aborted = self._run(begun)
        moved = Counter[int]()
        for move in begun.batch.moves:
            size = self._config.parallel.tensor_parallel_size
            moved[move.sequence] += self._worker.runner.block_bytes * size
        for each in done.values():
            moved.update(each.planned_bytes)
        self.bytes_planned += moved.total()
        for number, nbytes in moved.items():
            answers[number].bytes_moved += nbytes
        if self._config.keeps_logits:
            for number, row in self._shared_logits(begun).items():
                answers[number].logits.append(row)
        outputs, failed = self._engine.finish(done)
        if failed:
            self._raise(failed[0])
        return outputs, aborted

    def _run(self, begun: Iteration) -> tuple[dict[int, ModelOutput], set[int]]:
        """Runs this process's part; returns what all processes with a part have done, and aborts
        what any of them wants to."""
        done = self._worker.execute(begun)
        said = self._processes.gather((done, self._take_aborts()))
        wanted = set[int]().union(*(numbers for _, numbers in said))
        aborted = {number for number in sorted(wanted) if self._engine.abort(number)}
        return {rank: each for rank, (each, _) in enumerate(said) if each is not None}, aborted

    def _shared_logits(self, begun: Iteration) -> dict[int, torch.Tensor]:
        """Gives the logits of all tokens that are chosen to all processes."""
        sampled = [feed.sequence for feed in begun.batch.feeds if feed.samples]
        own = self._worker.logits
        width = torch.tensor(max((len(row) for row in own.values()), default=0))
        table = torch.zeros(len(sampled), int(self._processes.reduce(width, dist.ReduceOp.MAX)))
        for row, number in zip(table, sampled, strict=True):
            if number in own:
                row.copy_(own[number])
        return dict(zip(sampled, self._processes.reduce(table), strict=True))

    def _raise(self, failed: SampledToken) -> None:
        """Says for which request no token can be chosen, and why. Collective."""
        raise NotFiniteError(failed.number, f"{failed.failed}{self._worker.where_not_finite()}")
