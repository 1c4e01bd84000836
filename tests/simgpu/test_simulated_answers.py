"""Models answer on simulated GPUs as on CPUs, within budgets of launches and of waits."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.simgpu.answers import TOKENS
from support.simgpu.machine import Machine, built_or_skip
from support.small_models import FAMILIES, VOCABULARY, save_small_model

# torch's own FlashAttention has no soft caps of scores.
SERVED = [family for family in FAMILIES if family != "gemma2"]
_DRAWN = random.Random(1)
PROMPTS = [[_DRAWN.randrange(VOCABULARY) for _ in range(length)] for length in (550, 803, 804)]
"""Blocks of 256 tokens of them lie on both of two ranks."""
BUDGETS: dict[str, dict[str, dict[str, int]]] = json.loads(
    (Path(__file__).parent / "budgets.json").read_text()
)
"""Most launches and waits of a rank in one step, by ranks and family."""


RANKS, PACKAGES = (1, 2), ("flash-attn-3", "flash-attn-4")

Job = tuple[Sequence[str], int, Sequence[str]]
"""Families, number of ranks, and packages of kernels that are installed."""
Found = list[dict[str, Any]] | str
"""What each rank found, of every family, or why one failed."""
BY_RANKS: dict[int, Job] = {ranks: (SERVED, ranks, ()) for ranks in RANKS}
# The second caps scores.
BY_PACKAGE: dict[str, Job] = {each: (("llama", "gemma2"), 2, (each,)) for each in PACKAGES}
ON_CPUS: dict[int, Job] = {ranks: (FAMILIES, ranks, ()) for ranks in RANKS}
"""What as many ranks answer on the CPU: in bfloat16 another split rounds otherwise."""


def _answers(jobs: Mapping[Any, Job], models: Path, **more: str) -> dict[Any, Found]:
    """What the ranks of each job found; all run in one process."""
    told = models / "jobs.json"
    its = [
        ([str(models / each) for each in families], ranks, packages)
        for families, ranks, packages in jobs.values()
    ]
    told.write_text(json.dumps([its, PROMPTS]))
    command = [sys.executable, "-m", "support.simgpu.answers", str(told)]
    ran = Machine(max(RANKS)).run(command, seconds=1200, **more)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return dict(zip(jobs, json.loads(ran.stdout), strict=True))


def _ranks(found: Found) -> list[dict[str, Any]]:
    """What each rank found; fails if one failed."""
    assert not isinstance(found, str), found
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each family."""
    built_or_skip()
    folder = tmp_path_factory.mktemp("models")
    assert all(save_small_model(family, folder) == folder / family for family in FAMILIES)
    return folder


@pytest.fixture(scope="module")
def on_gpus(models: Path) -> dict[Any, Found]:
    """What ranks with a GPU each found, by their number or by the package that is installed."""
    return _answers(BY_RANKS | BY_PACKAGE, models)


@pytest.fixture(scope="module")
def on_cpus(models: Path) -> dict[int, Found]:
    return _answers(ON_CPUS, models, CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("family", SERVED)
def test_tokens_are_the_cpus_and_nothing_races(
    on_cpus: dict[int, Found], on_gpus: dict[Any, Found], ranks: int, family: str
) -> None:
    for found in _ranks(on_gpus[ranks]):
        assert found[family]["tokens"] == _ranks(on_cpus[ranks])[0][family]["tokens"]
        assert found[family]["races"] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_tokens_are_the_cpus_with_other_packages(
    on_cpus: dict[int, Found], on_gpus: dict[Any, Found], package: str
) -> None:
    expected = _ranks(on_cpus[2])[0]
    for found in _ranks(on_gpus[package]):
        assert found.keys() == {"llama", "gemma2"}
        for family, its in found.items():
            assert its["tokens"] == expected[family]["tokens"]
            assert its["races"] == []


def _most(steps: list[dict[str, Any]], kind: str) -> dict[str, int]:
    """The most launches and waits of the steps."""
    return {
        f"{kind} launches": max(step["launches"] for step in steps),
        f"{kind} syncs": max(sum(step["syncs"].values()) for step in steps),
    }


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("family", SERVED)
def test_steps_keep_to_their_budgets(on_gpus: dict[Any, Found], ranks: int, family: str) -> None:
    """A change that costs more launches or waits shows as a larger number in `budgets.json`."""
    steps = [found[family]["steps"] for found in _ranks(on_gpus[ranks])]
    decodes = [step for its in steps for step in its[1:]]
    spent = _most([its[0] for its in steps], "prefill") | _most(decodes, "decode")
    budget = BUDGETS[f"{ranks} ranks"][family]
    over = {each: (spent[each], most) for each, most in budget.items() if spent[each] > most}
    assert not over, f"spent and most: {over}; the host waits: {decodes[-1]['syncs']}"


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_the_command_answers_with_its_defaults(
    models: Path, on_cpus: dict[int, Found], ranks: int
) -> None:
    """The processes that `distca generate` starts have the GPUs; bfloat16 is the default there."""
    command = [sys.executable, "-m", "distca", "generate", str(models / SERVED[0])]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as prompts:
        json.dump(PROMPTS, prompts)
        prompts.flush()
        flags = ["--prompt-ids", prompts.name, "--max-tokens", str(TOKENS), "--ignore-eos"]
        flags += ["--json", "--context-parallel-size", str(ranks)]
        ran = Machine(2).run([*command, *flags])
    assert ran.returncode == 0, ran.stderr
    found = [answer["token_ids"] for answer in json.loads(ran.stdout)]
    assert found == _ranks(on_cpus[ranks])[0][SERVED[0]]["tokens"]
