"""What is not finite of a run: one line says it, and the last checkpoint is good."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron_patches.loop.finite import names_of_not_finite
from support.pretraining import FLAGS, LOSS, TOKENIZER, run_script
from support.whole_runs import write_documents

SCRIPT = "tests/support/poisoned.py"
RERUN, REJECTED = 16, 17
"""Exit codes of Megatron-LM."""


EXPERTS = """
    --distca --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias
"""
BIAS = "the weight of decoder.layers.0.mlp.router.expert_bias is not finite on rank 1"


@dataclass(frozen=True)
class Case:
    """A run of four iterations on two ranks.

    Attributes:
        poison: what becomes NaN, from which iteration on, on which rank.
        code: exit code of a rank.
        said: what the line says.
        saved: iteration that is the latest checkpoint, of every second one and of a failed step;
            None: there is none.
        flags: further flags.
    """

    poison: str
    code: int
    said: str
    saved: int | None
    flags: str = "--distca"


CASES = (
    Case(
        "gradient@4@1",
        RERUN,
        "iteration 4: the gradient of decoder.layers.0.mlp.linear_fc2.weight is not finite on rank "
        "1: the step was not made. The state before it is saved",
        3,
    ),
    Case("gradient@4@1", 1, "iteration 4: the gradient of", 2, "--distca --rerun-mode disabled"),
    Case("loss@3@0", RERUN, "iteration 3: the loss is not finite on rank 0: ", 2, ""),
    Case(
        "loss@3@1",
        RERUN,
        "iteration 3: the loss is not finite on rank 1",
        2,
        "--distca --pipeline-model-parallel-size 2",
    ),
    Case(
        "weight@1@1",
        REJECTED,
        "iteration 1: the weight of decoder.layers.0.mlp.linear_fc1.weight is not finite on rank 1",
        None,
    ),
    Case("start@0@1", 2, "before the first step: the weight of output_layer.weight is not", None),
    Case(
        "row@4@0",
        REJECTED,
        "after iteration 4: the weight of embedding.word_embeddings.weight is not finite on rank 0",
        2,
        "",
    ),
    Case(
        "nothing@0@0",
        RERUN,
        "iteration 3: the gradient of embedding.word_embeddings.weight is not finite",
        2,
        "--distca --lr 1e30",
    ),
    Case("bias@3@1", REJECTED, f"iteration 3: {BIAS}: nothing was saved since", 2, EXPERTS),
    Case(
        "bias@2@1",
        REJECTED,
        f"after iteration 2: {BIAS}: nothing was saved since",
        None,
        f"{EXPERTS} --no-check-for-nan-in-loss-and-grad",
    ),
    Case("start_bias@0@1", 2, f"before the first step: {BIAS}: load another", None, EXPERTS),
    Case(
        "evaluation@2@1",
        REJECTED,
        "evaluation at iteration 2: the loss is not finite on rank 1: the run ends here, and has "
        "saved iteration 2 last",
        2,
        "--distca --pipeline-model-parallel-size 2 --eval-iters 1 --eval-interval 2",
    ),
    Case(
        "evaluation@0@0",
        REJECTED,
        "evaluation at iteration 0 on validation set: the loss is not finite on rank 0 (and on 1 "
        "more): the run ends here, and has saved nothing",
        None,
        "--distca --skip-train --eval-iters 1",
    ),
    Case(
        "nothing@0@0",
        REJECTED,
        "evaluation at iteration 1: the loss is not finite on rank 0 (and on 1 more): the run ends "
        "here, and has saved iteration 1 last",
        1,
        "--distca --lr 1e12 --lr-warmup-iters 0 --train-iters 1 --eval-iters 1 --eval-interval 1",
    ),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents", [500, 470, 130] * 20)


def train(data: str, folder: Path | None, poison: str, *flags: str) -> tuple[int, str]:
    given = [*TOKENIZER, *FLAGS, "--train-iters", "4", "--data-path", data]
    save = ["--save", str(folder), "--save-interval", "2"] if folder else []
    return run_script(SCRIPT, 2, [poison, *given, *save, *flags])


@pytest.mark.parametrize("case", CASES, ids=[f"{each.poison} {each.flags}" for each in CASES])
def test_one_line_says_what_is_not_finite_and_where(case: Case, data: str, tmp_path: Path) -> None:
    code, output = train(data, tmp_path, case.poison, *case.flags.split())
    errors = re.findall(r"^\[rank \d\] error: (.*)", output, re.MULTILINE)
    assert len(errors) == 1, output[-3000:]
    assert case.said in errors[0]
    assert code == case.code, output[-3000:]
    assert "Traceback" not in output
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    assert (int(tracker.read_text()) if tracker.exists() else None) == case.saved
    folders = {f"iter_{each:07d}" for each in {2, case.saved} if case.saved and each <= case.saved}
    assert {path.name for path in tmp_path.glob("iter_*")} == folders


@pytest.mark.parametrize("flags", ["", "--exit-interval 4 --train-iters 6"])
def test_weights_are_checked_after_the_last_step_that_nothing_saves(flags: str, data: str) -> None:
    code, output = train(data, None, "moment@4@1", "--distca", *flags.split())
    errors = re.findall(r"^\[rank \d\] error: (.*)", output, re.MULTILINE)
    assert len(errors) == 1, output[-3000:]
    assert errors[0].startswith("after the last iteration: the weight of ")
    assert "Traceback" not in output
    assert code == REJECTED


@pytest.mark.parametrize("flags", ["", "--distca"])
def test_what_is_saved_of_a_failed_step_goes_on(flags: str, data: str, tmp_path: Path) -> None:
    """Its micro-batches are made anew. On the same GPU Megatron-LM takes no other result."""
    *_, expected = train(data, tmp_path / "whole", "nothing@0@0", *flags.split())
    code, _ = train(data, tmp_path / "cut", "gradient@4@1", *flags.split())
    assert code == RERUN
    load = ["--load", str(tmp_path / "cut"), *flags.split()]
    code, output = train(data, tmp_path / "cut", "nothing@0@0", *load)
    assert code == RERUN
    assert "Got rescheduled on the same GPU" in output
    code, output = train(data, tmp_path / "cut", "nothing@0@0", *load, "--rerun-mode", "disabled")
    assert code == 0
    assert LOSS.findall(output) == LOSS.findall(expected)[-1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_names(dtype: torch.dtype, value: float) -> None:
    good = torch.full((3, 4), torch.finfo(dtype).max, dtype=dtype)
    bad = good.clone()
    bad[1, 2] = value
    others = [("empty", torch.empty(0)), ("numbers", torch.ones(2, dtype=torch.int64))]
    assert names_of_not_finite([("good", good), ("bad", bad), *others]) == ["bad"]
    assert names_of_not_finite([("good", -good), *others]) == []
    assert names_of_not_finite([]) == []
