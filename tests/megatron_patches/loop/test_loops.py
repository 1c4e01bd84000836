"""Runs that go on from a checkpoint of a plain one, with the installed megatron-core.

The reference is a run without `--distca` on two ranks. Every other run loads what it saved after
two steps, and goes on at other parallel sizes, with or without `--distca`: its losses are those of
the reference. Each document fills a rank's tokens, so that none is cut at any parallel size; one
more test has documents that span ranks.

`launch/test.sh --megatron VERSION` makes an environment for another version.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.pretraining import LOSS, ROOT, run_command, separate
from support.whole_runs import write_documents

FLAGS = """
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --kv-channels 16
    --group-query-attention --num-query-groups 2 --normalization RMSNorm --swiglu
    --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 4
    --seq-length 256 --max-position-embeddings 256 --distca-max-document-length 256
    --lr 3e-3 --min-lr 3e-4
    --lr-decay-style cosine --lr-warmup-iters 1 --weight-decay 0.1 --train-iters 4
    --tokenizer-type NullTokenizer --vocab-size 100 --make-vocab-size-divisible-by 64
    --split 100,0,0
    --log-interval 1 --eval-iters 0
""".split()
SHARDED = ["--use-distributed-optimizer"]


@dataclass(frozen=True)
class Cell:
    """A run that goes on from the reference.

    Attributes:
        feature: what it shows, as `docs/moving_a_job.md` lists it.
        flags: that turn it on.
    """

    feature: str
    flags: str


CELLS = (
    Cell("plain", ""),
    Cell("distca", "--distca"),
    Cell("no ping-pong", "--distca --no-distca-ping-pong"),
    Cell("TP 2, SP", "--distca --tensor-model-parallel-size 2 --sequence-parallel"),
    Cell("PP 2", "--distca --pipeline-model-parallel-size 2"),
    Cell(
        "PP 2, interleaved",
        "--distca --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    Cell("distributed optimizer", "--distca --use-distributed-optimizer"),
)


def train(data: str, *flags: str) -> dict[int, float]:
    """Runs two ranks, and returns the losses by iteration."""
    output = run_command(2, [*FLAGS, "--data-path", data, *flags])
    return separate({int(number): float(loss) for number, loss in LOSS.findall(output)})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents", [256] * 40)


@dataclass(frozen=True)
class Reference:
    """A run, and where it saved a checkpoint after two of its four steps."""

    losses: dict[int, float]
    checkpoints: Path


def reference_run(data: str, folder: Path, *flags: str) -> Reference:
    losses = train(data, "--save", str(folder), "--save-interval", "2", *flags)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    shutil.rmtree(folder / "iter_0000004")
    return Reference(losses, folder)


@pytest.fixture(scope="module")
def reference(data: str, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference_run(data, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def sharded_reference(data: str, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference_run(data, tmp_path_factory.mktemp("sharded"), *SHARDED)


@pytest.mark.parametrize("cell", CELLS, ids=[cell.feature for cell in CELLS])
def test_a_run_goes_on_as_the_reference_does(cell, data, reference, sharded_reference):
    flags = cell.flags.split()
    begun = sharded_reference if set(SHARDED) <= set(flags) else reference
    expected = {step: begun.losses[step] for step in (3, 4)}
    found = train(data, "--load", str(begun.checkpoints), *flags)
    assert found == pytest.approx(expected, rel=2e-6)


def test_documents_that_span_ranks(tmp_path):
    """Two ranks with `--distca` train as one with the window of both does without."""
    data = write_documents(tmp_path / "documents", [500, 130, 256, 70] * 20)
    spans = ["--distca-max-document-length", "512", "--max-position-embeddings", "512"]
    distca = train(data, "--distca", *spans)
    window = ["--seq-length", "512", "--global-batch-size", "2", "--attention-backend", "unfused"]
    output = run_command(1, [*FLAGS, "--data-path", data, *spans, *window])
    plain = separate({int(number): float(loss) for number, loss in LOSS.findall(output)})
    assert distca == pytest.approx(plain, rel=2e-6)


def test_the_loop_of_megatron_is_asked_for_where_it_is_missing(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "found = u.find_spec\n"
        "u.find_spec = lambda n, p=None: None if n == 'megatron.training' else found(n, p)\n"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", "--distca"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert re.search(r"^error: Megatron-LM's loop is not installed: pip install", done.stderr, re.M)
