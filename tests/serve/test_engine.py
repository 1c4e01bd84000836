"""The engine's answers are one process's, however iterations, blocks and ranks come together."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from distca.schedule.serving.partitions import Chain
from distca.schedule.serving.scheduler import Limits
from distca.serve.engine.settings import EngineSettings
from distca.serve.models import ServedModel, read_model
from distca.serve.sampling import Penalties, Sampling
from support.ranks import Ranks
from support.small_models import VOCABULARY, save_small_model

BLOCK = 4
CHAIN = Chain(3, (0.5, 0.3, 0.2))
Told = dict[int, list[int]]


class Here:
    """Stands for the API's socket and for all workers, of which this rank has one."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.said: list[Any] = []
        self.done: list[Any] = []

    def send(self, message: Any) -> None:
        """What the engine says to the API process, encoded, or to the workers."""
        from distca.serve.engine.messages import FromEngine, ToWorker, decoder, encode

        if isinstance(message, bytes):
            self.said.append(decoder(FromEngine).decode(message))
            return
        import torch.distributed as dist

        message = decoder(ToWorker).decode(encode(message))
        if hasattr(message, "blocks"):
            self.worker.begin(message.blocks)
            return
        self.done = [None] * dist.get_world_size()
        dist.all_gather_object(self.done, self.worker.run(message))

    def begin_step(self) -> None:
        """See `Workers`."""

    def end_step(self) -> None:
        """See `Workers`."""


def run_on_a_rank(
    settings: EngineSettings, blocks: int, submits: list[Any], aborts: int, seed: int
) -> tuple[Told, Any, list[tuple[int, int, int]]]:
    """Answers sequences, some aborted wherever they are then.

    Returns:
        Tokens by sequence; the engine's numbers at the end; each rank's blocks after a reset.
    """
    from distca.serve.engine.engine import Engine
    from distca.serve.engine.messages import Abort, Outputs, ResetCache, Submit
    from distca.serve.engine.worker import Worker

    here = Here(Worker(settings, torch.device("cpu")))
    engine = Engine(settings, here, here)  # type: ignore[arg-type]
    engine.begin(blocks, 1)
    chance = random.Random(seed)
    waiting = [Submit(*each) for each in submits]
    aborted = set(chance.sample(range(len(waiting)), aborts))
    told: Told = {}

    def heard() -> None:
        for message in here.said:
            if isinstance(message, Outputs):
                for output in message.outputs:
                    told.setdefault(output.number, []).append(output.token)
        here.said.clear()

    sent: list[int] = []
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
    return told, numbers_of(stats), ranks


def numbers_of(stats: Any) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in stats.__struct_fields__ if name != "ranks"}


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {family: str(save_small_model(family, folder)) for family in ("llama", "gemma3_text")}


def settings_of(path: str, world_size: int, chunk: int, **changes: Any) -> EngineSettings:
    model = read_model(path, torch.float32)
    limits = Limits(sequences=8, tokens=chunk, stripe=BLOCK, short=12)
    settings = EngineSettings(
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


def one_process(model: ServedModel, loaded: Any, submit: tuple) -> list[int]:
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


def requests() -> list[tuple]:
    """Sequences of all lengths, some of which begin alike, drawn and greedy."""
    shared = tokens(29, 0)
    submits = []
    for number, length in enumerate([40, 1, 3, 31, 17, 35, 8, 44]):
        prompt = (
            (shared + tokens(60, number + 1))[:length] if number % 2 else tokens(length, number)
        )
        sampling = Sampling(max_tokens=3 + number)
        penalties = Penalties()
        if number in (2, 5):
            sampling = replace(sampling, temperature=0.8, seed=number, top_k=20, top_p=0.9)
        if number in (3, 5):
            penalties = Penalties(0.5, 0.5, 1.3, ((7, 3.0),), 2, frozenset({9}))
        submits.append((number, number % 3, prompt, sampling, penalties))
    return submits


@pytest.mark.parametrize(
    ("family", "world_size", "chunk", "blocks", "changes"),
    [
        # Pools for 1.5 prompts: sequences give up their blocks.
        ("llama", 2, 16, 7, {}),
        ("llama", 3, 64, 60, {"strategy": "pass-q"}),
        ("llama", 3, 16, 60, {"limits": Limits(8, 16, BLOCK, 12, chain=CHAIN)}),
        ("gemma3_text", 2, 512, 60, {"prefix_caching": False}),
        ("llama", 2, 64, 60, {"tensor_parallel_size": 2}),
    ],
)
def test_answers_are_one_processs(
    ranks: Ranks,
    models: dict[str, str],
    family: str,
    world_size: int,
    chunk: int,
    blocks: int,
    changes: dict[str, Any],
) -> None:
    path = models[family]
    settings = settings_of(path, world_size, chunk, **changes)
    submits = requests()
    results = ranks.run(
        run_on_a_rank, settings, blocks, submits, 0, 0, world_size=settings.processes
    )
    told, stats, after = results[0]
    model = read_model(path, torch.float32)
    loaded = model.load(torch.device("cpu"), "eager")
    for submit in submits:
        assert told[submit[0]] == one_process(model, loaded, submit), submit[0]
    assert after == [(blocks, 0, 0)] * world_size
    assert (stats["preemptions"] > 0) == (blocks == 7)
    assert (stats["found"] > 0) == settings.prefix_caching
    assert (stats["bytes_moved"] > 0) == (world_size > 1)


def test_a_short_prompt_on_an_idle_server_moves_nothing(ranks: Ranks, models) -> None:
    settings = settings_of(models["llama"], 2, 64)
    submits = [(0, 0, tokens(6, 1), Sampling(max_tokens=4), Penalties())]
    (told, stats, _), _ = ranks.run(run_on_a_rank, settings, 20, submits, 0, 0, world_size=2)
    assert len(told[0]) == 4
    assert stats["bytes_moved"] == 0


def test_a_storm_of_aborts_leaves_no_block(ranks: Ranks, models, full: bool) -> None:
    """Half of all sequences are aborted at some moment; the others' answers are right."""
    count, seeds = (2000, range(10)) if full else (60, range(1))
    for seed in seeds:
        chance = random.Random(seed)
        submits = [
            (
                number,
                0,
                tokens(chance.randint(1, 30), chance.randint(0, 5)),
                Sampling(max_tokens=chance.randint(1, 6)),
                Penalties(),
            )
            for number in range(count)
        ]
        settings = settings_of(models["llama"], 2, 32)
        arguments = settings, 14, submits, count // 2, seed
        told, _, after = ranks.run(run_on_a_rank, *arguments, world_size=2, timeout=550)[0]
        assert after == [(14, 0, 0)] * 2
        ended = [s for s in submits if len(told.get(s[0], ())) == s[3].max_tokens]
        assert count // 2 <= len(ended) < count
        model = read_model(models["llama"], torch.float32)
        loaded = model.load(torch.device("cpu"), "eager")
        for submit in ended[:: len(ended) // 20]:
            assert told[submit[0]] == one_process(model, loaded, submit)
