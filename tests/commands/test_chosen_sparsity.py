"""Flags by which a calibration and a bound choose what csps drops."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from distca.commands.chosen_sparsity import chosen_sparsity
from distca.commands.generate import build_parser
from distca.commands.main import main
from distca.commands.served_sparsity import near_to_far
from distca.cost.link import Links
from distca.inference.models import read_model
from distca.inference.sparsity_calibration import measured_on
from distca.schedule.serving.csps import Levels, Sparsity
from distca.schedule.serving.csps.calibration_file import CalibrationFile
from distca.schedule.serving.csps.degradation import GRID, Measured
from distca.schedule.serving.csps.pipeline import NearToFar
from support.commands import Command
from support.small_models import save_small_model

pytestmark = pytest.mark.usefixtures("forked_ranks")

RANKS = ["--context-parallel-size", "4", "--ranks-per-node", "2"]
CSPS = [*RANKS, "--prefill-strategy", "csps", "--micro-partitions", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return str(save_small_model("llama", folder, num_hidden_layers=4))


@pytest.fixture(scope="module")
def calibration(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A calibration by which a tenth of all attention is worth .01 nats and a tenth of needles."""
    levels, path = Levels(Links(2), 4), tmp_path_factory.mktemp("calibration") / "file.json"
    drops = np.linspace(0.1, 0.9, 6)
    samples = [Sparsity.of_drop_ratio(float(drop), 4, 2, 3) for drop in drops]
    mass = np.zeros((4, 2, 2, len(GRID)))
    mass[1:] = 0.2 * (1 - np.array(GRID))
    dropped = np.array([0.2 * (2 - sum(each.keys[1][0][1:])) * 2 for each in samples])
    degraded = {"kl": 0.1 * dropped, "recall_loss": dropped}
    measured = [Measured(2000, mass, degraded, 1.0) for _ in range(4)]  # type: ignore[arg-type]
    on = measured_on(read_model(model, torch.float32), levels, [[1]] * 4, 0)
    CalibrationFile(on, samples, measured).save(path)
    return str(path)


def test_the_least_latency_within_the_bound(
    model: str, calibration: str, capsys: pytest.CaptureFixture[str]
) -> None:
    served, kept = read_model(model, torch.float32), {}
    for bound in (["--max-degradation", "0"], ["--max-degradation", "0.02"], ["--max-ttft", "9"]):
        flags = [*CSPS, "--calibration", calibration, *bound, "--node-gb-per-s", "0.001"]
        args = build_parser().parse([model, *flags])
        chosen = partial(chosen_sparsity, args, served, 2000)
        found = near_to_far(args, served.windows, 2, 1, 4, 4, chosen)
        assert isinstance(found, NearToFar)
        assert found.levels == Levels(Links(2), 4)
        kept[bound[1]] = np.array(found.sparsity.keys)[1:3, :, 1:].mean()
    assert kept["0"] == 1 > kept["0.02"]
    assert kept["9"] == 1
    said = capsys.readouterr().err
    assert "100% of far keys are kept, at most 0 nats from dense attention" in said
    assert "prompts of 2,000 tokens have their first token after " in said
    args = build_parser().parse([model, *flags, "--micro-partitions", "3,5"])
    found = near_to_far(args, served.windows, 2, 1, 4, 4, partial(chosen_sparsity, args, served, 9))
    assert found is not None
    assert found.partitions == (3, 5)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-degradation", "0.1"], "--max-degradation 0.1 needs --calibration FILE: make one"),
        (["--calibration", "none.json", "--max-ttft", "1"], "no calibration none.json: make one"),
        (["--calibration", "FILE"], "--calibration needs a bound"),
        (["--calibration", "FILE", "--max-degradation", "-0.1"], "is none: give 0 or more"),
        (["--calibration", "FILE", "--max-ttft", "1e-9"], "the best possible is "),
        (["--calibration", "FILE", "--max-ttft", "1", "--max-recall-loss", "1"], "needs a bound"),
        (["--calibration", "FILE", "--max-ttft", "1", "--sparsity", "0.1"], "contradict: give one"),
        (
            ["--calibration", "FILE", "--max-ttft", "1", "--ranks-per-node", "4"],
            "a node in zigzag parts, not 4",
        ),
        (["--calibration", "FILE", "--max-ttft", "1", "--dtype", "bfloat16"], "of another model"),
        (["--calibration", "FILE", "--prefill-strategy", "auto"], "needs --prefill-strategy csps"),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    model: str,
    calibration: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    said: str,
) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([[1, 2, 3] * 200]))
    given = [flag.replace("FILE", calibration) for flag in flags]
    for command in (
        ["generate", model, "--prompt-ids", str(ids)],
        ["prefill", model, "--port", "1"],
    ):
        with pytest.raises(SystemExit):
            main([*command, *CSPS, *given])
        assert said in capsys.readouterr().err


def test_latency_against_degradation_is_shown_before_serving(
    calibration: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a described model, whose sizes are those that were measured."""
    simulate = Command("simulate", capsys)
    sizes = "--layers 4 --hidden-size 64 --heads 4 --kv-heads 2 --head-dim 16"
    flags = f"prefill --new-tokens 20000 --ffn-hidden-size 96 --node-gb-per-s 0.05 {sizes}".split()
    flags += [*CSPS, "--calibration", calibration]
    found = json.loads(simulate.run(*flags, "--json"))["choices"]
    assert found[0]["nats"] == 0 < found[-1]["nats"]
    assert found[0]["kept_keys"] == 1 > found[-1]["kept_keys"]
    for column, falls in (("seconds", True), ("kept_keys", True), ("nats", False)):
        values = [each[column] for each in found]
        assert values == sorted(values, reverse=falls)
    assert all(each["nats"] <= each["max_degradation"] for each in found)
    lines = simulate.run(*flags).splitlines()
    assert "csps, 20,000 tokens on 4 ranks of dgx-h100" in lines[0]
    assert len(lines) == len(found) + 3
    # What is listed within a bound is what is chosen and simulated within it.
    bound = ["--max-degradation", str(found[-1]["max_degradation"])]
    seconds = []
    for given in (["--max-degradation", "0"], bound):
        ran = json.loads(simulate.run(*flags, *given, "--json"))["simulated"]["csps"]
        seconds.append(ran["seconds"])
    assert seconds[1] < seconds[0]
    best, dense = (found[number]["seconds"] for number in (-1, 0))
    assert f"after {best:.3g} s, {dense:.3g} s with all" in simulate.errors
    assert "of the keys that travel" in Command("plan", capsys).run(*flags, *bound)
    for changed, why in (
        (["--kv-heads", "4"], "of 4 layers of 2 key-value heads (llama, 4 layers of 64), but"),
        (["--ranks-per-node", "4"], "2 a node in zigzag parts, not 4 ranks, 4 a node"),
        (["--prefill-strategy", "auto", "--micro-partitions", "2"], "needs --prefill-strategy csp"),
    ):
        assert why in simulate.refused(*flags, *changed)
    assert "needs a bound" in Command("plan", capsys).refused(*flags)
