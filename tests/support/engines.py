"""An engine and its workers in the ranks of a test, which answer sequences as they are told."""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from distca.inference.models import ServedModel, read_model
from distca.inference.sequence_parallel import split_model
from distca.schedule.serving.csps.layouts import LayoutChoice
from distca.schedule.serving.limits import SchedulerConfig
from distca.serve.engine.settings import ServerConfig
from support.small_models import VOCABULARY

BLOCK = 4
Told = dict[int, list[int]]


@dataclass
class Answered:
    """What an engine made of sequences.

    Attributes:
        tokens: tokens by sequence.
        numbers: the engine's numbers at the end.
        ranks: free, referenced and cached blocks of each rank, after a reset of the cache.
        scores: log-probabilities of prompts' tokens, by sequence.
        planned: bytes of all plans and moves, all ranks together.
        weights: bytes of weights of each process.
        moved: blocks that changed their rank.
        failed: why the model could not answer sequences, by sequence.
    """

    tokens: Told
    numbers: dict[str, Any]
    ranks: list[tuple[int, int, int]]
    scores: dict[int, list[Any]] = field(default_factory=dict)
    planned: int = 0
    weights: Sequence[int] = ()
    moved: int = 0
    failed: dict[int, str] = field(default_factory=dict)


class Here:
    """Stands for the API's socket and for all workers, of which this rank has one."""

    def __init__(self, worker: Any) -> None:
        import torch.distributed as dist

        from distca.serve.engine.backlog import Backlog

        self.worker, self._backlog = worker, Backlog(dist.get_world_size())
        self.said: list[Any] = []
        self.done: list[Any] = []
        self.moved = 0

    def send(self, message: Any) -> None:
        """What the engine says to the API process, encoded, or to the workers."""
        from distca.inference.messages import decoder, encode
        from distca.serve.engine.messages import FromEngine, ToWorker

        if isinstance(message, bytes):
            self.said.append(decoder(FromEngine).decode(message))
            return
        self.worker.take(decoder(ToWorker).decode(encode(message)))

    def start(self, iteration: Any, parts: Container[int]) -> None:
        """See `Workers`."""
        import torch.distributed as dist

        from distca.inference.messages import decoder
        from distca.serve.engine.messages import ToWorker

        self.moved += len(iteration.moves)
        done = None
        for rank, encoded in self._backlog.tell(iteration, parts):
            if rank == dist.get_rank():
                done = self.worker.take(decoder(ToWorker).decode(encoded))
        said = [None] * dist.get_world_size()
        dist.all_gather_object(said, done)
        self.done = [each for each in said if each is not None]

    def begin_step(self) -> None:
        """See `Workers`."""

    def end_step(self) -> None:
        """See `Workers`."""


def run_on_a_rank(
    settings: ServerConfig, blocks: int, submits: list[Any], aborts: int, seed: int
) -> Answered:
    """Answers sequences, some aborted wherever they are then."""
    import torch.distributed as dist

    from distca.inference.messages import AddRequest
    from distca.serve.engine.engine import EngineProcess
    from distca.serve.engine.messages import Abort, Outputs, Refused, ResetCache
    from distca.serve.engine.worker import WorkerProcess

    here = Here(WorkerProcess(settings, torch.device("cpu")))
    engine = EngineProcess(settings, here, here)  # type: ignore[arg-type]
    engine.begin(blocks, 1)
    chance = random.Random(seed)
    waiting = [AddRequest(*each) for each in submits]
    aborted = set(chance.sample(range(len(waiting)), aborts))
    told: Told = {}
    scores: dict[int, list[Any]] = {}
    failed: dict[int, str] = {}

    def heard() -> None:
        for message in here.said:
            if isinstance(message, Refused) and message.fails:
                failed[message.number] = message.message
            if isinstance(message, Outputs):
                for output in message.outputs:
                    told.setdefault(output.number, []).append(output.token)
                    if output.scores:
                        scores[output.number] = output.scores
        here.said.clear()

    sent: list[int] = []
    with _planned(settings) as planned:
        while True:
            for _ in range(chance.randint(0, 3)):
                if waiting:
                    sent.append(waiting[0].number)
                    engine.take(waiting.pop(0))
            busy = engine.start_iteration()
            for number in sorted(aborted & {*sent}):
                # While an iteration is under way, and between two.
                if chance.random() < 0.4:
                    engine.take(Abort(number))
                    aborted.discard(number)
            if not busy and not waiting and not aborted & {*sent}:
                break
            done, here.done = here.done, []
            for each in done:
                engine.take_done(each)
            heard()
    engine.take(ResetCache())
    stats = here.said[-1].stats
    ranks = [(each.free, each.referenced, each.cached) for each in stats.ranks]
    weights, counted = ([0] * dist.get_world_size() for _ in range(2))
    dist.all_gather_object(weights, here.worker.loaded().weight_bytes)
    dist.all_gather_object(counted, planned[0])
    nbytes = sum(counted) + here.moved * BLOCK * _moved_row_bytes(settings)
    return Answered(told, numbers_of(stats), ranks, scores, nbytes, weights, here.moved, failed)


@contextmanager
def _planned(settings: ServerConfig) -> Iterator[list[int]]:
    """Adds up the bytes of the iterations' plans in which no rank before this one has a part."""
    import torch.distributed as dist

    from distca.cost.step_bytes import stepped_bytes
    from distca.inference import worker
    from distca.plan import Mask

    model, total, plan_iteration = _model_of(settings), [0], worker.plan_iteration

    def recording(*arguments: Any) -> Any:
        plan = plan_iteration(*arguments)
        if dist.get_rank() != min(plan.members) * settings.tensor_parallel_size:
            return plan
        for layer, window in enumerate(model.windows):
            mask, moved = Mask(window), 0
            if plan.chunks is not None:
                of_layer = plan.chunks.plans.of(layer, mask)
                moved += stepped_bytes(of_layer, model.shape).total
            if plan.decode is not None:
                moved += int(plan.decode.bytes_by_sequence(mask, model.shape).sum())
            total[0] += moved * settings.tensor_parallel_size
        if settings.split is not None and plan.chunks is not None:
            shared = settings.split.share(int(plan.new_tokens.sum()))
            total[0] += 0 if shared is None else shared.bytes_moved
        return plan

    with mock.patch.object(worker, "plan_iteration", recording):
        yield total


def _model_of(settings: ServerConfig) -> ServedModel:
    return read_model(settings.model, torch.float32, settings.tensor_parallel_size)


def _moved_row_bytes(settings: ServerConfig) -> int:
    """Bytes of a row's keys and values in all layers, on all processes of a rank."""
    model = _model_of(settings)
    return len(model.windows) * model.shape.kv_row_bytes * settings.tensor_parallel_size


def numbers_of(stats: Any) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in stats.__struct_fields__ if name != "ranks"}


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


def settings_of(
    path: str, world_size: int, chunk: int, layout: LayoutChoice | None = None, **changes: Any
) -> ServerConfig:
    model = read_model(path, torch.float32)
    if layout is not None:
        sliced = read_model(path, torch.float32, changes["tensor_parallel_size"])
        changes["split"] = split_model(sliced, layout)
    limits = SchedulerConfig(sequences=8, tokens=chunk, stripe=BLOCK, short=12)
    settings = ServerConfig(
        path,
        "float32",
        model.windows,
        b"salt",
        96,
        world_size,
        1,
        "pass-kv",
        limits,
        BLOCK,
        1 << 20,
        0.9,
        True,
        60.0,
    )
    return replace(settings, **changes)


def one_process(loaded: Any, submit: tuple) -> list[int]:
    """Tokens of a sequence as transformers' own attention has them, all fed again for each."""
    _, choice, prompt, sampling, penalties = submit
    answer: list[int] = []
    while len(answer) < sampling.max_tokens:
        with torch.no_grad():
            logits = loaded(torch.tensor([prompt + answer])).logits[0, -1]
        changed = penalties.apply(logits, prompt, answer)
        answer.append(sampling.choose(changed, choice, len(prompt) + len(answer)))
        if answer[-1] in sampling.stops:
            break
    return answer
