"""Both loops with the installed megatron-core, against one reference, through checkpoints.

The reference is the lean loop without `--distca` on two ranks. Every other run loads what it saved
after two steps, and goes on at other parallel sizes, with or without `--distca`, in either loop:
its losses are those of the reference. Each document fills a rank's tokens, so that none is cut at
any parallel size; one more test has documents that span ranks.

Megatron-LM's own loop is in megatron-core's wheels from 0.17 on, for Python 3.12 and later:
`launch/test.sh --megatron VERSION` makes an environment for it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_patches.batches.blends import SPLITS
from megatron_patches.loop.job import DataIterators
from megatron_patches.loop.lean.training import Run
from support.pretraining import LOSS, ROOT, run_command
from support.whole_runs import write_documents

OWN_LOOP = importlib.util.find_spec("megatron.training") is not None
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
        feature: what it shows, as the table of `docs/loops.md` names it.
        flags: that turn it on.
        everywhere: whether it also runs without `--full` in the lean loop.
    """

    feature: str
    flags: str
    everywhere: bool = False


CELLS = (
    Cell("plain", ""),
    Cell("distca", "--distca"),
    Cell("no ping-pong", "--distca --no-distca-ping-pong"),
    Cell("TP 2, SP", "--distca --tensor-model-parallel-size 2 --sequence-parallel", True),
    Cell("PP 2", "--distca --pipeline-model-parallel-size 2"),
    Cell(
        "PP 2, interleaved",
        "--distca --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    Cell("distributed optimizer", "--distca --use-distributed-optimizer", True),
)


def train(loop: str, data: str, *flags: str) -> dict[int, float]:
    """Runs two ranks, and returns the losses by iteration."""
    arguments = ["--training-loop", loop, *FLAGS, "--data-path", data, *flags]
    output = run_command(2, arguments)
    return {int(number): float(loss) for number, loss in LOSS.findall(output)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents", [256] * 40)


@dataclass(frozen=True)
class Reference:
    """A run, and where it saved a checkpoint after two of its four steps."""

    losses: dict[int, float]
    checkpoints: Path


def reference_run(loop: str, data: str, folder: Path, *flags: str) -> Reference:
    save = ["--save", str(folder), "--save-interval", "2"]
    losses = train(loop, data, *save, *flags)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    shutil.rmtree(folder / "iter_0000004")
    return Reference(losses, folder)


@pytest.fixture(scope="module")
def reference(data: str, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference_run("lean", data, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def sharded_reference(data: str, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference_run("lean", data, tmp_path_factory.mktemp("sharded"), *SHARDED)


def assert_goes_on(losses: dict[int, float], reference: Reference) -> None:
    """Megatron-LM's first log line of a run is of its first step, the second a mean of both."""
    assert sorted(losses) == [3, 4]
    assert losses[3] == pytest.approx(reference.losses[3], rel=1e-6)
    mean = (reference.losses[3] + reference.losses[4]) / 2
    assert losses[4] in (
        pytest.approx(reference.losses[4], rel=1e-6),
        pytest.approx(mean, rel=1e-6),
    )


@pytest.mark.parametrize(
    ("loop", "cell"),
    [
        pytest.param(loop, cell, id=f"{loop}: {cell.feature}")
        for loop in ("lean", "megatron")
        for cell in CELLS
        if OWN_LOOP or loop == "lean"
    ],
)
def test_a_run_goes_on_as_the_reference_does(loop, cell, data, reference, sharded_reference, full):
    if loop == "lean" and not (cell.everywhere or full):
        pytest.skip("tests/training holds this against plain Megatron; --full runs it, too")
    flags = cell.flags.split()
    begun = sharded_reference if set(SHARDED) <= set(flags) else reference
    assert_goes_on(train(loop, data, "--load", str(begun.checkpoints), *flags), begun)


@pytest.mark.skipif(not OWN_LOOP, reason="megatron.training is not installed: Python 3.12 has it")
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_checkpoints_of_megatrons_loop_load_in_both(sharded, data, reference, tmp_path):
    flags = SHARDED if sharded else []
    begun = reference_run("megatron", data, tmp_path, *flags)
    assert begun.losses[1] == pytest.approx(reference.losses[1], rel=1e-6)
    begun = Reference(reference.losses, begun.checkpoints)
    load = ["--load", str(begun.checkpoints), "--distca", *flags]
    for loop in ("lean", "megatron"):
        assert_goes_on(train(loop, data, *load, "--pipeline-model-parallel-size", "2"), begun)


@pytest.mark.skipif(not OWN_LOOP, reason="megatron.training is not installed: Python 3.12 has it")
def test_both_loops_train_alike_on_documents_that_span_ranks(tmp_path):
    data = write_documents(tmp_path / "documents", [500, 130, 256, 70] * 20)
    flags = ["--distca", "--distca-max-document-length", "512"]
    lean, own = (train(loop, data, *flags) for loop in ("lean", "megatron"))
    # Megatron-LM's second line is a mean of two steps.
    own[2] = 2 * own[2] - own[1]
    assert own == pytest.approx(lean, rel=2e-6)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_each_model_chunk_has_an_iterator_and_one_alone_no_list(chunks):
    data = [DataIterators(*(iter([f"{which} {n}"]) for which in SPLITS)) for n in range(chunks)]
    found = Run(*[None] * 5, data, None).iterators("valid")
    assert [next(each) for each in ([found] if chunks == 1 else found)] == [
        f"valid {n}" for n in range(chunks)
    ]


def test_the_loop_of_megatron_is_asked_for_where_it_is_missing(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "found = u.find_spec\n"
        "u.find_spec = lambda n, p=None: None if n == 'megatron.training' else found(n, p)\n"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", "--training-loop", "megatron"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert re.search(r"^error: --training-loop megatron needs megatron.training", done.stderr, re.M)
