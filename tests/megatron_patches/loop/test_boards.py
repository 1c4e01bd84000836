"""What boards show: a test's losses have names of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_patches import cpu
from megatron_patches.hooks import LOOP
from megatron_patches.loop.evaluation import Evaluation, save_then_evaluate


class Board:
    """A writer of TensorBoard and of Weights & Biases."""

    def __init__(self) -> None:
        self.noted: list[Any] = []

    def add_scalar(self, *figure: Any) -> None:
        self.noted.append(figure)

    def log(self, figures: dict[str, float], step: int) -> None:
        self.noted.append((figures, step))


def test_a_test_has_names_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import training

    board = Board()
    monkeypatch.setattr(training, "get_tensorboard_writer", lambda: board)
    monkeypatch.setattr(training, "get_wandb_writer", lambda: None)
    args = SimpleNamespace(
        full_validation=True,
        multiple_validation_sets=True,
        consumed_valid_samples=0,
        exit_signal_handler=False,
    )
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    run: Any = SimpleNamespace(evaluation=Evaluation())
    rows = [hook for hook in LOOP if hook.name in ("get_tensorboard_writer", "get_wandb_writer")]
    assert len(rows) == 2

    def log(prefix: str, *_: Any) -> None:
        training.get_tensorboard_writer().add_scalar("lm loss validation ppl vs samples", 1.5, 3)
        training.get_tensorboard_writer().log({"lm loss validation": 1.0}, 7)
        assert training.get_wandb_writer() is None
        if prefix == "ends":
            raise ValueError(prefix)

    evaluate = save_then_evaluate(log, run)
    for hook in rows:
        hook.apply(run)
    try:
        evaluate("iteration 3 on validation set", None, [], [], 3)
        evaluate("iteration 3 on test set", None, [], [], 3)
        with pytest.raises(ValueError, match="ends"):
            evaluate("ends", None, [], [], 3)
    finally:
        for hook in rows:
            hook.undo()
    of_validation = [
        ("lm loss validation ppl vs samples", 1.5, 3),
        ({"lm loss validation": 1.0}, 7),
    ]
    of_test = [("lm loss test ppl vs samples", 1.5, 3), ({"lm loss test": 1.0}, 7)]
    assert board.noted == [*of_validation, *of_test, *of_validation]


def test_a_cpu_has_no_memory_of_a_gpu() -> None:
    """Which Megatron-LM looks up by name for `--log-memory-to-tensorboard`."""
    if cpu.without_cuda():
        assert cpu.TORCH_ON_CPU.cuda.memory_stats()["reserved_bytes.all.current"] == 0
