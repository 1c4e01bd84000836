"""Ranks that hold keys and values and have no weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.cost.volume import AttentionShape
from distca.inference.models import read_model
from distca.inference.sampling import Penalties, SamplingParams
from support.balanced import eager_tiles
from support.engines import one_process, run_on_a_rank, settings_of, tokens
from support.ranks import Ranks
from support.small_models import save_small_model


@pytest.mark.parametrize(
    ("family", "world_size", "servers", "blocks", "changes"),
    [
        ("llama", 3, 1, 60, {}),
        # Where only servers have room left, sequences still come to their ends.
        ("llama", 3, 2, 6, {"strategy": "pass-q"}),
        ("gemma3_text", 2, 1, 60, {"tensor_parallel_size": 2}),
        # All ranks share attention; the long prompts' blocks lie on servers, too.
        ("llama", 3, 1, 60, {"strategy": eager_tiles(AttentionShape(4, 2, 16, 4))}),
    ],
)
def test_answers_are_one_processs(
    ranks: Ranks,
    tmp_path: Path,
    family: str,
    world_size: int,
    servers: int,
    blocks: int,
    changes: dict[str, Any],
) -> None:
    path = str(save_small_model(family, tmp_path))
    settings = settings_of(path, world_size, 16, **changes)
    settings = replace(settings, scheduler=replace(settings.scheduler, servers=servers))
    submits = [
        (number, tokens(length, number), SamplingParams(max_tokens=10), Penalties())
        for number, length in enumerate([40, 6, 23, 57])
    ]
    answered = ranks.run(
        run_on_a_rank, settings, blocks, submits, 0, 0, world_size=settings.processes
    )[0]
    model = read_model(path, torch.float32)
    loaded = model.load(torch.device("cpu"), "eager")
    for submit in submits:
        assert answered.tokens[submit[0]] == one_process(loaded, submit), submit[0]
    size = settings.parallel.tensor_parallel_size
    computing = (world_size - servers) * size
    assert all(answered.weights[:computing])
    assert answered.weights[computing:] == [0] * (servers * size)
    assert answered.moved > 0
    assert answered.numbers["bytes_moved"] == answered.planned
    assert answered.ranks == [(blocks, 0, 0)] * world_size
