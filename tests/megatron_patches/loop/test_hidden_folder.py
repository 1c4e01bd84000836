"""Hidden folders of conversions that were ended or killed, and of those that are under way."""

from __future__ import annotations

import os
import signal
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_patches.loop.from_hugging_face import set_first_weights
from megatron_patches.loop.hidden_folder import hidden_folder
from support.forks import forking
from support.small_models import save_small_model


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def make_slowly(beside: Path) -> None:
    """Has a folder until the process is killed."""
    with hidden_folder(beside, 300) as (folder, _):
        (folder / "checkpoint").mkdir()
        (folder / "checkpoint" / "weights").write_text("x")
        signal.pause()


def test_a_killed_job_s_folder_goes_and_a_working_one_s_stays(tmp_path: Path) -> None:
    beside, kind = tmp_path / "model.megatron", forking()
    killed, working = (kind.Process(target=make_slowly, args=(beside,)) for _ in range(2))
    try:
        killed.start()
        wait_for(lambda: len([*tmp_path.glob(".*/checkpoint/weights")]) == 1)
        left = names(tmp_path)
        working.start()
        wait_for(lambda: len([*tmp_path.glob(".*/checkpoint/weights")]) == 2)
        killed.kill()
        killed.join()
        assert {*left} < {*names(tmp_path)}
        with hidden_folder(beside, 300) as (folder, _):
            there = names(tmp_path)
        assert len(there) == 2
        assert folder.name in there
        assert not {*left} & {*there}
        assert names(tmp_path) == [name for name in there if name != folder.name]
    finally:
        for each in (killed, working):
            each.kill()
            each.join()


@pytest.mark.parametrize("machine", ["another", "", None], ids=["another", "no locks", "no sign"])
@pytest.mark.parametrize("age", [200, 400])
def test_folders_of_other_machines_stay_while_they_give_signs(
    tmp_path: Path, machine: str | None, age: float
) -> None:
    other = tmp_path / ".model.megatron.abc"
    other.mkdir()
    (other / "weights").write_text("x")
    if machine is not None:
        (other / "in use").write_text(machine)
    then = time.time() - age
    for each in (*other.iterdir(), other):
        os.utime(each, (then, then))
    (tmp_path / ".model.megatron.beat").touch()
    with hidden_folder(tmp_path / "model.megatron", 300):
        pass
    assert names(tmp_path) == [*[other.name] * (age < 300), ".model.megatron.beat"]


def convert_first(folder: Path) -> None:
    os.setpgrp()
    # As the ranks of a run have it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    values = {"load": None, "ckpt_step": None, "pretrained_checkpoint": None, "bf16": True}
    set_first_weights(Namespace(**values, rank=0, from_hf=str(folder)), {**os.environ})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_conversion_that_is_ended_leaves_nothing(tmp_path: Path, number: int) -> None:
    model = save_small_model("llama", tmp_path)
    before = names(model.parent)
    process = forking().Process(target=convert_first, args=(model,))
    process.start()
    try:
        wait_for(lambda: [*model.parent.glob(".*/checkpoint")] != [])
        assert len(names(model.parent)) == len(before) + 2
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_for(lambda: listed.read_text() != "")
        (child,) = listed.read_text().split()
        os.kill(int(process.pid or 0), number)
        process.join(30)
        assert process.exitcode == -number
    finally:
        process.kill()
        process.join()
    assert names(model.parent) == before
    wait_for(lambda: not Path(f"/proc/{child}").exists())
