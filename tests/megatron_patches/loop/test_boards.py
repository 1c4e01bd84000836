"""Boards: what TensorBoard and Weights & Biases are given."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_patches.loop.lean.boards import Boards


class FakeWandb(ModuleType):
    """The package as far as it is used; `calls` is what it was told."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[Any] = []

    def init(self, **given: Any) -> FakeWandb:
        self.calls.append(given)
        return self

    def log(self, figures: dict[str, float], step: int) -> None:
        self.calls.append((figures, step))

    def finish(self) -> None:
        self.calls.append("finished")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def flags(**given: Any) -> Namespace:
    names = "tensorboard_dir wandb_project wandb_exp_name wandb_entity wandb_save_dir save".split()
    return Namespace(**dict.fromkeys(names) | given)


def test_wandb(wandb: FakeWandb, tmp_path: Path) -> None:
    args = flags(wandb_project="p", wandb_exp_name="run", save=str(tmp_path))
    boards = Boards(args, is_writer=True)
    boards.add("lm loss", 2.0, 7)
    boards.add_by_samples("lm loss vs samples", 2.0, 99)
    boards.close()
    begun, *rest = wandb.calls
    assert (begun["project"], begun["name"], begun["entity"]) == ("p", "run", None)
    assert begun["dir"] == tmp_path / "wandb"
    assert begun["dir"].is_dir()
    assert begun["config"] == vars(args)
    assert rest == [({"lm loss": 2.0}, 7), "finished"]


def test_where_wandb_saves(wandb: FakeWandb, tmp_path: Path) -> None:
    given = str(tmp_path / "given")
    Boards(flags(wandb_project="p", wandb_save_dir=given, save="elsewhere"), is_writer=True)
    Boards(flags(wandb_project="p"), is_writer=True)
    assert [call["dir"] for call in wandb.calls] == [given, None]


def test_other_ranks_write_nothing(wandb: FakeWandb, tmp_path: Path) -> None:
    boards = Boards(flags(wandb_project="p", tensorboard_dir=str(tmp_path)), is_writer=False)
    boards.add("lm loss", 2.0, 7)
    boards.close()
    assert wandb.calls == []
    assert list(tmp_path.iterdir()) == []
