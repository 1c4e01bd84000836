"""The flags' schedule is Megatron-LM's, and is held against a checkpoint's before ranks start."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from megatron.training import training

from megatron_patches.loop.preflight import check_checkpoint
from megatron_patches.loop.saved_schedule import schedule_of
from support.arguments import parse
from support.checkpoints import write_checkpoint

ITERATIONS, SAMPLES = "--train-iters 10", "--train-samples 900"


@pytest.mark.parametrize(
    ("length", "flags"),
    [
        (ITERATIONS, "--lr-warmup-iters 3 --global-batch-size 4"),
        (ITERATIONS, "--lr-warmup-fraction 0.25 --lr-decay-iters 8"),
        (
            ITERATIONS,
            "--lr-decay-style cosine --min-lr 1e-5 --weight-decay-incr-style linear "
            "--start-weight-decay 0.01 --end-weight-decay 0.1",
        ),
        (SAMPLES, "--lr-warmup-samples 30 --lr-decay-samples 800"),
        (SAMPLES, "--lr-warmup-fraction 0.5"),
    ],
)
def test_the_flags_make_megatrons_schedule(
    length: str, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parse(*flags.split(), length=length)
    theirs = copy.copy(args)
    monkeypatch.setattr(training, "get_args", lambda: theirs)
    monkeypatch.setattr(training, "update_train_iters", lambda args: None)
    group = {"lr": 0.0, "weight_decay": 0.0, "max_lr": args.lr, "min_lr": args.min_lr}
    optimizer = SimpleNamespace(param_groups=[group])
    state = training.get_optimizer_param_scheduler(optimizer).state_dict()
    ours = schedule_of(args)
    assert ours == {name: state[name] for name in ours}


def test_another_schedule_is_refused_before_ranks_start(tmp_path) -> None:
    saved = parse(length="--train-iters 20")
    folder = write_checkpoint(tmp_path, saved)
    common = {"args": saved, "iteration": 7, "opt_param_scheduler": schedule_of(saved)}
    torch.save(common, folder / "common.pt")
    load = ["--load", str(tmp_path)]
    check_checkpoint(parse(*load, length="--train-iters 20"))
    with pytest.raises(ValueError, match=r"another schedule .*samples of the decay 80 "):
        check_checkpoint(parse(*load, length="--train-iters 22"))
    for more in ("--override-opt_param-scheduler", "--finetune", "--no-load-optim", "--skip-train"):
        check_checkpoint(parse(*load, more, length="--train-iters 22"))
