"""Many requests of all lengths, whose prompts lie on one rank each, are answered right."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from distca.cost.volume import AttentionShape
from distca.inference.models import read_model
from distca.inference.sampling import Penalties, SamplingParams
from distca.schedule.serving.limits import SchedulerConfig
from support.balanced import eager_tiles
from support.engines import BLOCK, one_process, run_on_a_rank, settings_of, tokens
from support.ranks import Ranks
from support.small_models import save_small_model

LONGEST = 88


def requests(count: int, seed: int) -> list[tuple]:
    """Prompts of one token, short and long ones; some begin as others do."""
    chance, found = random.Random(seed), []
    for number in range(count):
        length = chance.choice((1, chance.randint(2, 12), chance.randint(2, LONGEST)))
        shared = tokens(LONGEST, chance.randint(0, 4))
        begins = chance.choice((0, chance.randint(0, length)))
        prompt = [*shared[:begins], *tokens(length, 100 + number)[begins:]]
        sampling = SamplingParams(max_tokens=chance.randint(1, 6))
        found.append((number, prompt, sampling, Penalties()))
    return found


@pytest.mark.parametrize(
    ("family", "world_size", "blocks"),
    [("gemma3_text", 2, 60), ("llama", 3, 14), ("gpt_oss", 4, 60)],
)
def test_all_are_answered_as_by_one_process(
    ranks: Ranks, tmp_path: Path, full: bool, family: str, world_size: int, blocks: int
) -> None:
    """Bytes are as planned, under windows and with sinks, and where blocks run out and prompts
    spill over to other ranks. Iterations feed chunks of prompts and decoded tokens together."""
    path = str(save_small_model(family, tmp_path))
    limits = SchedulerConfig(12, 72, BLOCK, LONGEST + 9, equal_shares=True)
    strategy = eager_tiles(AttentionShape(4, 2, 16, 4), tolerance=0.05)
    settings = settings_of(path, world_size, 72, scheduler=limits, strategy=strategy)
    submits = requests(1000 if full else 60, world_size)
    arguments = settings, blocks, submits, 0, world_size
    answered = ranks.run(run_on_a_rank, *arguments, world_size=world_size, timeout=550)[0]
    loaded = read_model(path, torch.float32).load(torch.device("cpu"), "eager")
    for submit in submits:
        assert answered.tokens[submit[0]] == one_process(loaded, submit), submit[0]
    assert answered.ranks == [(blocks, 0, 0)] * world_size
    assert answered.numbers["bytes_moved"] == answered.planned > 0
    assert answered.numbers["found"] > 0
    assert (answered.numbers["preemptions"] > 0) == (blocks < 20)
