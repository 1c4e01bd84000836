"""Converted models are trained with `--distca` on two ranks, and come back as what was trained."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from distca.inference.models import FAMILIES as SERVED
from support.forks import ROOT
from support.pretraining import LOSS, run_command
from support.small_families import CONFIGS, save_family
from support.whole_runs import write_documents

RUN = """
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --lr-decay-style constant
    --split 100,0,0 --log-interval 1 --eval-iters 0 --seq-length 256 --max-position-embeddings 512
    --train-iters 20 --finetune --distca --distca-max-document-length 512
""".split()


def distca(*arguments: object) -> str:
    """What a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "distca", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FAMILIES = [name for name in CONFIGS if "," not in name]
FAMILIES.append("deepseek_v2, uncompressed queries")
SHORT = ("qwen3", "mixtral")


@pytest.mark.parametrize(
    "family",
    [each if each in SHORT else pytest.param(each, marks=pytest.mark.full) for each in FAMILIES],
)
def test_twenty_steps_from_a_converted_model(tmp_path: Path, family: str) -> None:
    from safetensors.torch import load_file

    save_family(family, tmp_path / "model")
    corpus = write_documents(tmp_path / "corpus", [400, *[40] * 30] * 4)
    start, save = tmp_path / "start", tmp_path / "save"
    sample = ["--check", "5,3,300,17,42"]
    flags, said = distca(
        "convert", tmp_path / "model", "--to", start, "--float32", *sample
    ).splitlines()
    assert said.startswith("5 tokens: logits differ by at most ")
    flags = [*shlex.split(flags), *RUN, "--data-path", corpus, "--load", str(start)]
    flags += ["--tokenizer-type", "HuggingFaceTokenizer", "--save", str(save)]
    output = run_command(2, [*flags, "--tokenizer-model", str(start / "tokenizer")])
    losses = [float(loss) for _, loss in LOSS.findall(output)]
    assert len(losses) == 20
    # The first of a model with random weights, on documents with a structure.
    assert losses[0] > 5
    assert losses[-1] < losses[0] - 1
    said = distca("convert", "--checkpoint", save, "--to", tmp_path / "back", *sample)
    assert said.startswith("5 tokens: logits differ by at most ")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["model_type"] == family.partition(",")[0]
    if config["model_type"] in SERVED:
        answer = ["--prompt", "w5 w3", "--max-tokens", "3", "--dtype", "float32", "--check"]
        assert "3 of 3 tokens the same: equal" in distca("generate", tmp_path / "back", *answer)
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("model", "back"))
    assert {*before} == {*after}
    assert all((before[name] != after[name]).any() for name in before)
