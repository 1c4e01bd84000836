"""The engine's answers are one process's, however iterations, blocks and ranks come together."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from distca.cost.link import Links
from distca.cost.volume import AttentionShape
from distca.inference.machine import Machine
from distca.inference.models import read_model
from distca.inference.sampling import Penalties, SamplingParams
from distca.schedule.serving.cdsp import Coefficients, PrefillModel, Search
from distca.schedule.serving.cdsp.growing import GrowingGroups
from distca.schedule.serving.csps import Levels, Sparsity
from distca.schedule.serving.csps.pipeline import NearToFar
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.partitions import Chain
from support.balanced import eager_tiles
from support.engines import BLOCK, changed, one_process, run_on_a_rank, settings_of, tokens
from support.ranks import Ranks
from support.small_models import save_small_model

CHAIN = Chain(3, (0.5, 0.3, 0.2))
TIMES = PrefillModel(
    "any", "any", {n: Coefficients(5.0 * (n - 1), 1 / n, 0.0, 0.0) for n in (1, 2, 4)}
)
GROWING = GrowingGroups(Search(TIMES, smallest_chunk=BLOCK))
"""Ten tokens are as soon computed by one rank as by two."""
SLOW_LINKS = Machine.described(False, 0.001, None).selector(
    "simulated", AttentionShape(2, 1, 16, 4), 2
)
"""Chooses for each iteration what travels, as if anything took long."""
TILES = eager_tiles(AttentionShape(4, 2, 16, 4))
OWN_PROMPTS = SchedulerConfig(8, 48, BLOCK, 97, equal_shares=True)
"""Each rank has its own prompts, and an equal share of an iteration."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {family: str(save_small_model(family, folder)) for family in ("llama", "gemma3_text")}


def requests() -> list[tuple]:
    """Sequences of all lengths, some of which begin alike, drawn and greedy."""
    shared = tokens(29, 0)
    submits = []
    for number, length in enumerate([40, 1, 3, 31, 17, 35, 8, 44]):
        prompt = (
            (shared + tokens(60, number + 1))[:length] if number % 2 else tokens(length, number)
        )
        sampling = SamplingParams(max_tokens=3 + number)
        penalties = Penalties()
        if number in (2, 5):
            sampling = replace(sampling, temperature=0.8, seed=number, top_k=20, top_p=0.9)
        if number in (3, 5):
            penalties = Penalties(0.5, 0.5, 1.3, ((7, 3.0),), 2, frozenset({9}))
        submits.append((number, prompt, sampling, penalties))
    return submits


@pytest.mark.parametrize(
    ("family", "world_size", "chunk", "blocks", "changes"),
    [
        # Pools for 1.5 prompts: sequences give up their blocks.
        ("llama", 2, 16, 7, {}),
        ("llama", 3, 64, 60, {"strategy": "pass-q"}),
        ("llama", 3, 16, 60, {"scheduler": SchedulerConfig(8, 16, BLOCK, 12, chain=CHAIN)}),
        ("llama", 4, 48, 60, {"scheduler": SchedulerConfig(8, 48, BLOCK, 12, growing=GROWING)}),
        ("gemma3_text", 3, 32, 7, {"scheduler": SchedulerConfig(8, 32, BLOCK, 0, growing=GROWING)}),
        ("gemma3_text", 2, 512, 60, {"prefix_caching": False, "transport": "shm"}),
        ("llama", 2, 64, 60, {"tensor_parallel_size": 2, "strategy": SLOW_LINKS}),
        ("llama", 3, 64, 60, {"strategy": "sp-ntp", "head_groups": 4}),
        ("llama", 3, 48, 7, {"strategy": TILES, "scheduler": OWN_PROMPTS}),
        ("gemma3_text", 4, 48, 60, {"strategy": TILES, "scheduler": OWN_PROMPTS}),
        # A long prompt is shared by all ranks, beside short ones that are not.
        ("llama", 2, 64, 60, {"strategy": TILES, "transport": "shm"}),
        ("llama", 1, 16, 60, {"tensor_parallel_size": 2, "layout": "sp-ntp"}),
        ("gemma3_text", 1, 64, 60, {"tensor_parallel_size": 2, "layout": "sp-tp"}),
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
    told, stats, after = results[0].tokens, results[0].numbers, results[0].ranks
    model = read_model(path, torch.float32)
    loaded = model.load(torch.device("cpu"), "eager")
    for submit in submits:
        assert told[submit[0]] == one_process(loaded, submit), submit[0]
    assert after == [(blocks, 0, 0)] * world_size
    assert (stats["preemptions"] > 0) == (blocks == 7)
    assert (stats["found"] > 0) == settings.scheduler.prefix_caching
    assert (stats["bytes_moved"] > 0) == (settings.processes > 1)
    assert stats["bytes_moved"] == results[0].planned


def test_long_prompts_drop_keys_and_short_ones_none(ranks: Ranks, models) -> None:
    """Both decode in one batch, in which queries travel to keys; bytes are as planned."""
    model = read_model(models["llama"], torch.float32)
    loaded = model.load(torch.device("cpu"), "eager")
    levels = Levels(Links(2), 3)
    settings = settings_of(
        models["llama"], 3, 12, scheduler=SchedulerConfig(4, 12, BLOCK, 12, chain=levels)
    )
    begin, sampling = tokens(44, 3), SamplingParams(max_tokens=6)
    # Of a long prompt's chunks of 12 tokens each has blocks of all ranks.
    prompts = [begin, begin[:11], tokens(5, 4), begin[:40], begin[:9]]
    submits = [(n, prompt, sampling, Penalties()) for n, prompt in enumerate(prompts)]
    expected = [one_process(loaded, submit) for submit in submits]
    moved = []
    for drop in (0.0, 0.7):
        sparsity = Sparsity.of_drop_ratio(drop, len(model.windows), model.shape.kv_heads)
        strategy = NearToFar(levels, sparsity, model.windows)
        how = changed(settings, strategy=strategy)
        answered = ranks.run(run_on_a_rank, how, 60, submits, 0, 0, world_size=3)[0]
        assert answered.numbers["bytes_moved"] == answered.planned
        exact = [not drop or len(prompt) < 12 for prompt in prompts]
        for number, tells in enumerate(exact):
            assert not tells or answered.tokens[number] == expected[number]
        moved.append(answered.planned)
    assert 0 < moved[1] < 0.9 * moved[0]


def test_a_short_prompt_on_an_idle_server_moves_nothing(ranks: Ranks, models) -> None:
    settings = settings_of(models["llama"], 2, 64)
    submits = [(0, tokens(6, 1), SamplingParams(max_tokens=4), Penalties())]
    answered, _ = ranks.run(run_on_a_rank, settings, 20, submits, 0, 0, world_size=2)
    assert len(answered.tokens[0]) == 4
    assert answered.numbers["bytes_moved"] == 0


def test_a_storm_of_aborts_leaves_no_block(ranks: Ranks, models, full: bool) -> None:
    """Half of all sequences are aborted at some moment; the others' answers are right."""
    count, seeds = (2000, range(10)) if full else (60, range(1))
    for seed in seeds:
        chance = random.Random(seed)
        submits = [
            (
                number,
                tokens(chance.randint(1, 30), chance.randint(0, 5)),
                SamplingParams(max_tokens=chance.randint(1, 6)),
                Penalties(),
            )
            for number in range(count)
        ]
        settings = settings_of(models["llama"], 2, 32)
        arguments = settings, 14, submits, count // 2, seed
        answered = ranks.run(run_on_a_rank, *arguments, world_size=2, timeout=550)[0]
        told, after = answered.tokens, answered.ranks
        assert after == [(14, 0, 0)] * 2
        ended = [s for s in submits if len(told.get(s[0], ())) == s[2].max_tokens]
        assert count // 2 <= len(ended) < count
        model = read_model(models["llama"], torch.float32)
        loaded = model.load(torch.device("cpu"), "eager")
        for submit in ended[:: len(ended) // 20]:
            assert told[submit[0]] == one_process(loaded, submit)
