"""Models answer on simulated GPUs as on CPUs, within budgets of launches and of waits."""

from __future__ import annotations

import json
import random
import sys
import tempfile
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


def _answers(
    folder: Path, ranks: int, models: list[str], packages: tuple[str, ...] = (), **more: str
) -> list[dict[str, Any]]:
    """What each rank found, of every family."""
    folder.mkdir()
    command = [sys.executable, "-m", "support.simgpu.answers"]
    told = [json.dumps([models, rank, ranks, str(folder), PROMPTS]) for rank in range(ranks)]
    Machine(ranks, packages=packages).run_ranks([[*command, each] for each in told], **more)
    return [json.loads((folder / f"rank {rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    built_or_skip()
    folder = tmp_path_factory.mktemp("models")
    return [str(save_small_model(family, folder)) for family in SERVED]


@pytest.fixture(scope="module", params=[1, 2])
def on_gpus(
    request: pytest.FixtureRequest, models: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, list[dict[str, Any]]]:
    """Ranks, each with a GPU, and what each of them found."""
    folder = tmp_path_factory.mktemp("gpus") / "answers"
    return request.param, _answers(folder, request.param, models)


@pytest.fixture(scope="module")
def on_cpus(
    on_gpus: tuple[int, Any], models: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What as many ranks answer on the CPU: in bfloat16 another split rounds otherwise."""
    folder = tmp_path_factory.mktemp("cpus") / "answers"
    return _answers(folder, on_gpus[0], models, CUDA_VISIBLE_DEVICES="")[0]


@pytest.mark.parametrize("family", SERVED)
def test_tokens_are_the_cpus_and_nothing_races(
    on_cpus: dict[str, Any], on_gpus: tuple[int, list[dict[str, Any]]], family: str
) -> None:
    for found in on_gpus[1]:
        assert found[family]["tokens"] == on_cpus[family]["tokens"]
        assert found[family]["races"] == []


@pytest.fixture(scope="module")
def by_packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[Any]]:
    """Models of two families, and what two ranks answer on the CPU. The second caps scores."""
    built_or_skip()
    folder = tmp_path_factory.mktemp("of packages")
    models = [str(save_small_model(family, folder)) for family in ("llama", "gemma2")]
    return models, _answers(folder / "on CPUs", 2, models, CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("package", ["flash-attn-3", "flash-attn-4"])
def test_tokens_are_the_cpus_with_other_packages(
    by_packages: tuple[list[str], list[Any]], tmp_path: Path, package: str
) -> None:
    models, expected = by_packages
    for found in _answers(tmp_path / "answers", 2, models, (package,)):
        for name, its in found.items():
            assert its["tokens"] == expected[0][name]["tokens"]
            assert its["races"] == []


def _most(steps: list[dict[str, Any]], kind: str) -> dict[str, int]:
    """The most launches and waits of the steps."""
    return {
        f"{kind} launches": max(step["launches"] for step in steps),
        f"{kind} syncs": max(sum(step["syncs"].values()) for step in steps),
    }


@pytest.mark.parametrize("family", SERVED)
def test_steps_keep_to_their_budgets(
    on_gpus: tuple[int, list[dict[str, Any]]], family: str
) -> None:
    """A change that costs more launches or waits shows as a larger number in `budgets.json`."""
    ranks, found = on_gpus
    steps = [found[rank][family]["steps"] for rank in range(ranks)]
    decodes = [step for its in steps for step in its[1:]]
    spent = _most([its[0] for its in steps], "prefill") | _most(decodes, "decode")
    budget = BUDGETS[f"{ranks} ranks"][family]
    over = {each: (spent[each], most) for each, most in budget.items() if spent[each] > most}
    assert not over, f"spent and most: {over}; the host waits: {decodes[-1]['syncs']}"


def test_the_command_answers_with_its_defaults(
    models: list[str], on_gpus: tuple[int, Any], on_cpus: dict[str, Any]
) -> None:
    """The processes that `distca generate` starts have the GPUs; bfloat16 is the default there."""
    command = [sys.executable, "-m", "distca", "generate", models[0], "--ignore-eos", "--json"]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as prompts:
        json.dump(PROMPTS, prompts)
        prompts.flush()
        flags = ["--prompt-ids", prompts.name, "--max-tokens", str(TOKENS)]
        ran = Machine(2).run([*command, *flags, "--context-parallel-size", str(on_gpus[0])])
    assert ran.returncode == 0, ran.stderr
    found = [answer["token_ids"] for answer in json.loads(ran.stdout)]
    assert found == on_cpus[SERVED[0]]["tokens"]
