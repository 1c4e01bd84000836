"""The runs of inference that are recorded: small ones, of all ways to share a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recording.inference import record_engine, record_turns

Call = tuple[Any, ...]
"""A function that records, and its arguments."""


@dataclass(frozen=True)
class InferenceMix:
    """A run.

    Attributes:
        name: as it is chosen and reported.
        world_size: processes.
        family: family of the model.
        make: makes the call of every rank from the folders of the model and of the run.
    """

    name: str
    world_size: int
    family: str
    make: Callable[[str, Path], Call]

    def call(self, folder: Path) -> Call:
        """What each rank calls.

        Args:
            folder: folder of its own, in which the model is made.
        """
        from support.small_models import save_small_model

        return self.make(str(save_small_model(self.family, folder)), folder)


def _requests(scored: int | None, answers: int) -> list[tuple]:
    """Prompts of all lengths, some of which begin alike, drawn and greedy.

    Args:
        scored: number of the prompt of which the scores are asked for.
        answers: answers to the first prompt, which is computed once.
    """
    from distca.inference.sampling import Penalties, SamplingParams
    from support.engines import tokens

    shared, found = tokens(29, 0), []
    for number, length in enumerate([40, 1, 3, 31, 17, 35, 8, 44]):
        prompt = tokens(length, number)
        if number % 2:
            prompt = (shared + tokens(60, number + 1))[:length]
        sampling, penalties = SamplingParams(max_tokens=3 + number), Penalties()
        if number in (2, 5):
            sampling = replace(sampling, temperature=0.8, seed=number, top_k=20, top_p=0.9)
        if number in (3, 5):
            penalties = Penalties(0.5, 0.5, 1.3, ((7, 3.0),), 2, frozenset({9}))
        found.append((number, prompt, sampling, penalties, None, None, number == scored))
    for choice in range(1, answers):
        sampling = SamplingParams(max_tokens=4, temperature=0.7, seed=choice)
        found.append((100 + choice, found[0][1], sampling, Penalties(), None, 0, False))
    return found


def _engine(
    ranks: int,
    chunk: int,
    blocks: int,
    aborts: int = 0,
    scored: int | None = None,
    answers: int = 1,
    settings: Callable[[str], dict[str, Any]] = lambda model: {},
) -> Callable[[str, Path], Call]:
    def make(model: str, _: Path) -> Call:
        from support.engines import settings_of

        told = settings_of(model, ranks, chunk, **settings(model))
        return record_engine, told, blocks, _requests(scored, answers), aborts

    return make


def _chain(_: str) -> dict[str, Any]:
    from distca.schedule.serving.limits import SchedulerConfig
    from distca.schedule.serving.partitions import Chain
    from support.engines import BLOCK

    return {"scheduler": SchedulerConfig(8, 16, BLOCK, 12, chain=Chain(3, (0.5, 0.3, 0.2)))}


def _sparse(ranks: int, kept: float) -> Callable[[str], dict[str, Any]]:
    """Keys from near to far, of which a part is dropped."""

    def settings(path: str) -> dict[str, Any]:
        return {"strategy": _near_to_far(path, ranks, 1 - kept)}

    return settings


def _near_to_far(path: str, ranks: int, drop: float) -> Any:
    import torch

    from distca.cost.link import Links
    from distca.inference.models import read_model
    from distca.schedule.serving.csps import Levels, Sparsity
    from distca.schedule.serving.csps.pipeline import NearToFar

    model = read_model(path, torch.float32)
    sizes = len(model.windows), model.kv_heads
    sparsity = Sparsity.of_drop_ratio(drop, *sizes, drop_of_queries=drop / 2)
    return NearToFar(Levels(Links(2), ranks), sparsity, model.windows, (2,))


def _turns(
    strategy: str,
    ranks: int,
    tensor: int = 1,
    chain: tuple[float, ...] | None = None,
    drop: float | None = None,
    **changes: Any,
) -> Callable[[str, Path], Call]:
    """Three turns: a long prompt, one of a token, one of fewer than ranks, and what follows."""

    def make(path: str, _: Path) -> Call:
        import torch

        from distca.inference.models import read_model
        from distca.inference.sampling import SamplingParams
        from distca.schedule.serving.partitions import Chain
        from support.engines import tokens

        turns = [
            {0: tokens(150, 0), 1: tokens(1, 1), 2: tokens(2, 2)},
            {0: tokens(40, 3), 1: tokens(1, 4)},
            {1: tokens(90, 5), 2: tokens(5, 6)},
        ]
        how: dict[str, Any] = {"strategy": strategy, **changes}
        if chain is not None:
            how["chain"] = Chain(ranks, chain)
        if drop is not None:
            near = _near_to_far(path, ranks, drop)
            how |= {"strategy": near, "chain": near.levels}
        model = read_model(path, torch.float32, tensor)
        return record_turns, (model, ranks, SamplingParams(max_tokens=6), turns, how)

    return make


def _growing(_: str) -> dict[str, Any]:
    from distca.schedule.serving.cdsp import Coefficients, PrefillModel, Search
    from distca.schedule.serving.cdsp.growing import GrowingGroups
    from distca.schedule.serving.limits import SchedulerConfig
    from support.engines import BLOCK

    # Ten tokens are as soon computed by one rank as by two.
    of_ranks = {n: Coefficients(5.0 * (n - 1), 1 / n, 0.0, 0.0) for n in (1, 2, 4)}
    growing = GrowingGroups(Search(PrefillModel("any", "any", of_ranks), smallest_chunk=BLOCK))
    return {"scheduler": SchedulerConfig(8, 48, BLOCK, 12, growing=growing)}


INFERENCE_MIXES: Sequence[InferenceMix] = (
    InferenceMix("engine, CP2, chunks, preemption", 2, "llama", _engine(2, 16, 7)),
    InferenceMix("engine, CP3, pass-Q, answers, scores, aborts", 3, "llama", _engine(
        3, 64, 60, aborts=2, scored=3, answers=3, settings=lambda _: {"strategy": "pass-q"})),
    InferenceMix("engine, CP3, chain", 3, "llama", _engine(3, 16, 60, settings=_chain)),
    InferenceMix("engine, CP2, windows, shm, no prefix cache", 2, "gemma3_text", _engine(
        2, 512, 60, settings=lambda _: {"prefix_caching": False, "transport": "shm"})),
    InferenceMix("engine, CP2, TP2, all-gather", 4, "qwen2", _engine(
        2, 64, 60, settings=lambda _: {"tensor_parallel_size": 2, "strategy": "all-gather"})),
    InferenceMix("engine, CP3, heads scattered", 3, "llama", _engine(
        3, 64, 60, settings=lambda _: {"strategy": "sp-ntp", "head_groups": 4})),
    InferenceMix("engine, TP2, rows shared", 2, "llama", _engine(
        1, 16, 60, settings=lambda _: {"tensor_parallel_size": 2, "layout": "sp-tp"})),
    InferenceMix("engine, CP4, near to far, half dropped", 4, "llama", _engine(
        4, 64, 60, answers=2, settings=_sparse(4, 0.5))),
    InferenceMix("turns, CP3, pass-KV, sinks", 3, "gpt_oss", _turns("pass-kv", 3, stripe=16)),
    InferenceMix("turns, CP2, TP2, pass-Q, soft cap", 4, "gemma2", _turns("pass-q", 2, tensor=2)),
    InferenceMix("turns, CP4, chain, evened out", 4, "gemma3_text", _turns(
        "pass-kv", 4, chain=(0.1, 0.4, 0.15, 0.35), evens_out=True)),
    InferenceMix("turns, CP3, near to far, .7 dropped", 3, "llama", _turns(
        "pass-kv", 3, drop=0.7)),
    InferenceMix("turns, CP2, experts, all-gather", 2, "qwen3_moe", _turns("all-gather", 2)),
    InferenceMix("engine, CP4, growing groups", 4, "llama", _engine(4, 48, 60, settings=_growing)),
)  # fmt: skip
