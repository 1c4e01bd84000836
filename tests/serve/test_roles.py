"""Prefill and decode apart, on live ranks: answers are one process's, whatever is handed over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.inference.models import read_model
from distca.inference.sampling import Penalties, SamplingParams
from distca.schedule.serving.cdsp import Coefficients, ImprovementRates, PrefillModel
from distca.serve.engine.settings import ServerConfig
from distca.serve.handoff.engine import RolesEngine
from distca.serve.handoff.settings import Roles
from support.engines import BLOCK, one_process, settings_of
from support.ranks import Ranks
from support.role_workers import Played, Seen, serve_on_a_rank, tokens
from support.small_models import VOCABULARY, save_small_model

# Two ranks are worth it from 21 tokens on. So slow that what ranks really take changes no plan.
TIMES = PrefillModel(
    "here",
    "small",
    {1: Coefficients(0, 10.0, 0, 0), 2: Coefficients(100.0, 5.0, 0, 0)},
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {family: str(save_small_model(family, folder)) for family in ("llama", "gemma3_text")}


def settings_apart(
    path: str,
    prefill: int,
    decode: int,
    tensor: int = 1,
    prefix_caching: bool = False,
    **roles: Any,
) -> ServerConfig:
    given = {"strategy": "cdsp", "times": TIMES, "rates": ImprovementRates({0.0: 0.0})} | roles
    return settings_of(
        path,
        prefill + decode,
        64,
        prefix_caching=prefix_caching,
        roles=Roles(prefill, decode, tensor, smallest_chunk=BLOCK, **given),
    )


def prompts(*lengths: int) -> list[tuple]:
    """Requests of such prompts, the third one drawn, the fourth one of one token."""
    submits = []
    for number, length in enumerate(lengths):
        drawn = {"temperature": 0.8, "seed": number, "top_k": 20} if number == 2 else {}
        sampling = SamplingParams(max_tokens=1 if number == 3 else 4 + number, **drawn)
        penalties = Penalties(0.5, 0.5, 1.3) if number == 1 else Penalties()
        submits.append((number, 0, tokens(length, number, VOCABULARY), sampling, penalties))
    return submits


def run(ranks: Ranks, folder: Path, settings: ServerConfig, played: Played, changes=None) -> Seen:
    found = ranks.run(
        serve_on_a_rank,
        settings,
        str(folder),
        played,
        changes,
        world_size=settings.processes,
        timeout=300,
    )
    return found[0]


def check(path: str, played: Played, seen: Seen) -> None:
    """Every answer is one process's, and no block is left."""
    loaded = read_model(path, torch.float32).load(torch.device("cpu"), "eager")
    for submit in played.submits:
        assert seen.told[submit[0]] == one_process(loaded, submit), submit[0]
    assert not any(rank.referenced for rank in seen.stats.ranks)


@pytest.mark.parametrize(
    ("family", "prefill", "decode", "tensor"), [("llama", 3, 1, 1), ("gemma3_text", 2, 1, 2)]
)
def test_answers_are_one_processs(
    ranks: Ranks, models, tmp_path: Path, family: str, prefill: int, decode: int, tensor: int
) -> None:
    """Chunks on one rank and then two, of overlapping groups; from TP 1 to TP 2."""
    settings = settings_apart(models[family], prefill, decode, tensor)
    played = Played(prompts(17, 75, 50, 9, 71, 1))
    seen = run(ranks, tmp_path, settings, played)
    check(models[family], played, seen)
    grown = [
        [len(group) for _, _, group in pieces] for pieces in seen.chunks.values() if len(pieces) > 1
    ]
    assert grown
    assert all(sizes == [1, 2] for sizes in grown)
    moved = seen.moved
    row = 2 * 3 * 2 * 16 * 4
    rows = [pieces[0][1] for pieces in seen.chunks.values() if len(pieces) > 1]
    assert moved == sum(each // BLOCK // 2 * BLOCK for each in rows) * row


def drop_a_chunk() -> Callable[[], None]:
    """Lets the rows of first chunks count, but not land."""
    from distca.serve.handoff.landing import Landing

    take = Landing.take

    def broken(self: Any, rows: Any, frames: Any, pool: Any) -> Any:
        blocks = dict(self._blocks)
        if rows.chunk == 0:
            self._blocks.clear()
        found = take(self, rows, frames, pool)
        self._blocks.update(blocks)
        return found

    Landing.take = broken  # type: ignore[method-assign]

    def undo() -> None:
        Landing.take = take  # type: ignore[method-assign]

    return undo


def test_a_dropped_chunk_is_noticed(ranks: Ranks, models, tmp_path: Path) -> None:
    settings = settings_apart(models["llama"], 2, 1)
    played = Played(prompts(17, 75))
    seen = run(ranks, tmp_path, settings, played, drop_a_chunk)
    with pytest.raises(AssertionError):
        check(models["llama"], played, seen)


def test_with_one_backend_requests_decode_in_the_order_of_their_first_offers(
    ranks: Ranks, models, tmp_path: Path
) -> None:
    settings = settings_apart(models["llama"], 2, 1, backends=1)
    played = Played(prompts(*[33] * 8))
    seen = run(ranks, tmp_path, settings, played)
    check(models["llama"], played, seen)
    begun = [sequence >> 8 for sequence in seen.chunks if sequence >> 8 != 3]
    assert [number for number in seen.decoding if number != 3] == begun


def test_prefixes_are_found_on_prefill_ranks(ranks: Ranks, models, tmp_path: Path) -> None:
    """A prefix that one rank holds is shared with a prompt that grows to two, half of it moves, and
    it is handed over with the first chunk; nobody writes to what others may find."""
    settings = settings_apart(models["llama"], 2, 1, prefix_caching=True)
    one, other = (tokens(count, count, VOCABULARY) for count in (18, 50))
    asked = [one, one + other, one, one + other, one + other[:30]]
    submits = [
        (number, 0, prompt, SamplingParams(max_tokens=3), Penalties())
        for number, prompt in enumerate(asked)
    ]
    played = Played(submits, in_turn=True)
    seen = run(ranks, tmp_path, settings, played)
    check(models["llama"], played, seen)
    pieces = {sequence >> 8: found for sequence, found in seen.chunks.items()}
    assert [pieces[number][0][0] for number in range(5)] == [0, 16, 16, 64, 44]
    assert [len(pieces[number][0][2]) for number in range(3)] == [1, 2, 1]
    assert seen.moved >= 8 * 2 * 3 * 2 * 16 * 4
    assert seen.stats.looked_up == sum(map(len, asked))
    assert seen.stats.found == 16 + 16 + 64 + 44
    assert sum(rank.cached for rank in seen.stats.ranks) == 17


def test_pools_that_hold_no_longest_prompt_are_refused(models) -> None:
    engine = RolesEngine(settings_apart(models["llama"], 2, 1), None, None)  # type: ignore[arg-type]
    for blocks, whose in (((11, 24), "each of 2 prefill ranks"), ((12, 23), "a decode rank")):
        with pytest.raises(ValueError, match=f"{whose}.*--kv-cache-memory-bytes"):
            engine.begin(*blocks, 1, None)  # type: ignore[arg-type]
