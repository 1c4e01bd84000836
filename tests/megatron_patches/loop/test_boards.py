"""What boards show: a test's losses have names of their own."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_patches import cpu
from megatron_patches.loop.evaluation import _renaming_on_boards


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
    with _renaming_on_boards():
        training.get_tensorboard_writer().add_scalar("lm loss validation ppl vs samples", 1.5, 3)
        training.get_tensorboard_writer().log({"lm loss validation": 1.0}, 7)
        assert training.get_wandb_writer() is None
    training.get_tensorboard_writer().add_scalar("lm loss validation", 2.5, 3)
    assert board.noted == [
        ("lm loss test ppl vs samples", 1.5, 3),
        ({"lm loss test": 1.0}, 7),
        ("lm loss validation", 2.5, 3),
    ]


def test_a_cpu_has_no_memory_of_a_gpu() -> None:
    """Which Megatron-LM looks up by name for `--log-memory-to-tensorboard`."""
    if cpu.without_cuda():
        assert cpu.TORCH_ON_CPU.cuda.memory_stats()["reserved_bytes.all.current"] == 0
