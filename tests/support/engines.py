"""An engine and a worker on each rank of a test, which answer sequences that come and go."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from distca.inference.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from distca.inference.models import ServedModel, read_model
from distca.inference.sequence_parallel import split_model
from distca.schedule.serving.csps.layouts import LayoutChoice
from distca.schedule.serving.limits import SchedulerConfig
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


def run_on_a_rank(
    settings: EngineConfig, blocks: int, submits: list[Any], aborts: int, seed: int
) -> Answered:
    """Answers sequences that arrive over time, some aborted wherever they are then. Collective."""
    import torch.distributed as dist

    from distca.inference.engine import Engine
    from distca.inference.messages import AddRequest
    from distca.inference.worker import Worker

    worker = Worker(settings, torch.device("cpu"))
    worker.runner.resize_pool(blocks)
    engine = Engine(settings, blocks)
    chance = random.Random(seed)
    waiting = [AddRequest(*each) for each in submits]
    aborted = set(chance.sample(range(len(waiting)), aborts))
    told: Told = {}
    scores: dict[int, list[Any]] = {}
    failed: dict[int, str] = {}
    sent: list[int] = []
    moved = 0
    with _planned(settings) as planned:
        while True:
            for _ in range(chance.randint(0, 3)):
                if waiting:
                    sent.append(waiting[0].number)
                    engine.add(waiting.pop(0))
            begun = engine.schedule()
            done: dict[int, Any] = {}
            if begun is not None:
                moved += len(begun.batch.moves)
                done = _run(worker, begun)
            for number in sorted(aborted & {*sent}):
                # While an iteration is under way, and between two.
                if chance.random() < 0.4:
                    engine.abort(number)
                    aborted.discard(number)
            if begun is None:
                if not waiting and not aborted & {*sent}:
                    break
                continue
            outputs, lost = engine.finish(done)
            failed |= {each.number: str(each.failed) for each in lost}
            for output in outputs:
                told.setdefault(output.number, []).append(output.token)
                if output.scores:
                    scores[output.number] = output.scores
    cache = engine.cache
    cache.reset()
    ranks = [
        (cache.free(rank), cache.referenced(rank), cache.cached(rank))
        for rank in range(settings.parallel.world_size)
    ]
    weights, counted = ([0] * dist.get_world_size() for _ in range(2))
    dist.all_gather_object(weights, worker.runner.weight_bytes)
    dist.all_gather_object(counted, planned[0])
    nbytes = sum(counted) + moved * BLOCK * _moved_row_bytes(settings)
    return Answered(told, numbers_of(engine), ranks, scores, nbytes, weights, moved, failed)


def _run(worker: Any, begun: Any) -> dict[int, Any]:
    """Runs this process's part of an iteration; returns what all that have one have done."""
    import torch.distributed as dist

    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, worker.execute(begun))
    return {rank: each for rank, each in enumerate(said) if each is not None}


@contextmanager
def _planned(settings: EngineConfig) -> Iterator[list[int]]:
    """Adds up the bytes of the iterations' plans in which no rank before this one has a part."""
    import torch.distributed as dist

    from distca.cost.steps import stepped_bytes
    from distca.inference import worker
    from distca.plan import Mask

    model, total, plan_iteration = _model_of(settings), [0], worker.plan_iteration

    def recording(*arguments: Any) -> Any:
        plan = plan_iteration(*arguments)
        if dist.get_rank() != min(plan.members) * settings.parallel.tensor_parallel_size:
            return plan
        for layer, window in enumerate(model.windows):
            mask, moved = Mask(window), 0
            if plan.prefill is not None:
                of_layer = plan.prefill.plans.of(layer, mask)
                moved += stepped_bytes(of_layer, model.shape).total
            if plan.decode is not None:
                moved += int(plan.decode.bytes_by_sequence(mask, model.shape).sum())
            total[0] += moved * settings.parallel.tensor_parallel_size
        if settings.parallel.split is not None and plan.prefill is not None:
            shared = settings.parallel.split.share(int(plan.new_tokens.sum()))
            total[0] += 0 if shared is None else shared.bytes_moved
        return plan

    with mock.patch.object(worker, "plan_iteration", recording):
        yield total


def _model_of(settings: EngineConfig) -> ServedModel:
    return read_model(settings.model.path, torch.float32, settings.parallel.tensor_parallel_size)


def _moved_row_bytes(settings: EngineConfig) -> int:
    """Bytes of a row's keys and values in all layers, on all processes of a rank."""
    model = _model_of(settings)
    return len(model.windows) * model.shape.kv_row_bytes * settings.parallel.tensor_parallel_size


def numbers_of(engine: Any) -> dict[str, Any]:
    """Numbers of an engine and its scheduler."""
    scheduler, counts = engine.scheduler, engine.counts
    found = {name: getattr(scheduler, name) for name in ("preemptions", "looked_up", "found")}
    return found | {name: getattr(counts, name) for name in ("computed", "bytes_moved")}


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


def settings_of(
    path: str, world_size: int, chunk: int, layout: LayoutChoice | None = None, **changes: Any
) -> EngineConfig:
    model = read_model(path, torch.float32)
    if layout is not None:
        sliced = read_model(path, torch.float32, changes["tensor_parallel_size"])
        changes["split"] = split_model(sliced, layout)
    settings = EngineConfig(
        ModelConfig(path, "float32", model.windows, 96, model.vocab_size, b"salt"),
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=chunk, stripe=BLOCK, threshold=12),
        ParallelConfig(world_size, step_timeout=60.0),
        CacheConfig(BLOCK, 1 << 20),
    )
    return changed(settings, **changes)


def changed(settings: EngineConfig, **changes: Any) -> EngineConfig:
    """Replaces fields of a configuration, or of the part that has a field of that name."""
    for name, value in changes.items():
        if hasattr(settings, name):
            settings = replace(settings, **{name: value})
            continue
        (part,) = (
            each
            for each in ("model", "scheduler", "parallel", "cache")
            if hasattr(getattr(settings, each), name)
        )
        values = replace(getattr(settings, part), **{name: value})
        settings = replace(settings, **{part: values})
    return settings


def one_process(loaded: Any, submit: tuple) -> list[int]:
    """Tokens of a sequence as transformers' own attention has them, all fed again for each."""
    number, prompt, sampling, penalties = submit
    answer: list[int] = []
    while len(answer) < sampling.max_tokens:
        with torch.no_grad():
            logits = loaded(torch.tensor([prompt + answer])).logits[0, -1]
        changed = penalties.apply(logits, prompt, answer)
        answer.append(sampling.choose(changed, number, len(prompt) + len(answer)))
        if answer[-1] in (sampling.stops or ()):
            break
    return answer
