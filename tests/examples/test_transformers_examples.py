"""The examples with transformers: on two ranks they have the losses of one."""

from __future__ import annotations

import functools
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.pretraining import run_script

pytest.importorskip("transformers")

STEPS = 2
EXAMPLES = Path(__file__).parents[2] / "examples"


@functools.cache
def losses(example: str, ranks: int, *more: str) -> list[float]:
    """The losses that an example prints."""
    code, printed = run_script(f"examples/{example}.py", ranks, ["--steps", str(STEPS), *more])
    assert code == 0, printed[-3000:]
    return [float(loss) for loss in re.findall(r"(?:'loss': '|: loss )(-?\d\.\d+)", printed)]


def test_fully_sharded() -> None:
    alone = losses("transformers_fsdp", 1)
    assert len(alone) == STEPS
    assert losses("transformers_fsdp", 2) == pytest.approx(alone, rel=1e-6)


def test_trainer() -> None:
    pytest.importorskip("accelerate")
    # It prints four digits. Two micro-batches of a step have the documents of one.
    for more in ((), ("--accumulate", "2")):
        found = losses("transformers_trainer", 2, *more)
        assert found == pytest.approx(losses("transformers_fsdp", 1), abs=1e-3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "cannot be smoothed: set label_smoothing_factor to 0"),
        ({"average_tokens_across_devices": False}, "set average_tokens_across_devices to True"),
    ],
)
def test_a_trainer_with_another_loss_is_refused(wrong: dict[str, Any], message: str) -> None:
    example = runpy.run_path(str(EXAMPLES / "transformers_trainer.py"), run_name="example")
    given = {"label_smoothing_factor": 0.0, "average_tokens_across_devices": True} | wrong
    with pytest.raises(ValueError, match=message):
        example["DistcaTrainer"](torch.nn.Identity(), SimpleNamespace(**given))


def test_rollouts() -> None:
    shared = losses("rollouts", 2)
    assert len(shared) == STEPS
    assert losses("rollouts", 2, "--least", "1000000") == pytest.approx(shared, abs=3e-6)


def test_trl_s_grpo() -> None:
    """Losses and norms of gradients are those of TRL alone, from the same samples."""
    pytest.importorskip("trl")
    found = []
    for more in ((), ("--plain",)):
        code, printed = run_script("examples/trl_grpo.py", 2, ["--steps", str(STEPS), *more])
        assert code == 0, printed[-3000:]
        found.append(re.findall(r"'(?:loss|grad_norm|reward)': '(-?\d+\.?\d*)'", printed))
    assert len(found[0]) == 3 * STEPS
    assert found[0] == found[1]
