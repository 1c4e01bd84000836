"""The learning rate after each iteration, by formulas and by Megatron's scheduler.

Megatron-LM counts in samples: a warm-up of so many iterations is as many global batches of samples,
and after each step the scheduler goes on by a global batch. `test_resuming.py` has what the loop
does with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_patches.flags.distca import add_distca_arguments
from megatron_patches.flags.megatron import parse_args
from megatron_patches.loop.lean.config import parameter_scheduler

GLOBAL_BATCH, LAST, PEAK = 8, 12, 3e-3
COMMON = f"""
    --num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2
    --global-batch-size {GLOBAL_BATCH} --train-iters {LAST} --lr {PEAK} --weight-decay 0.1
    --tokenizer-type NullTokenizer --vocab-size 250 --data-path unused --attention-dropout 0
""".split()


def decayed(done: float, lowest: float = 0.0, cosine: bool = False) -> float:
    """A rate on its way from the peak; `done` is the share of the way."""
    left = (1 + math.cos(math.pi * min(done, 1))) / 2 if cosine else 1 - min(done, 1)
    return lowest + left * (PEAK - lowest)


# Flags, what they mean to Megatron's scheduler in iterations, and the rate after an iteration.
CASES: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "--lr-decay-style constant --lr-warmup-iters 4": (
        {"lr_decay_style": "constant", "lr_warmup_steps": 4, "lr_decay_steps": LAST},
        lambda i: PEAK * min(i / 4, 1),
    ),
    "--lr-decay-style linear --lr-decay-iters 9 --min-lr 1e-3": (
        {"lr_decay_style": "linear", "lr_decay_steps": 9, "min_lr": 1e-3},
        lambda i: decayed(i / 9, 1e-3),
    ),
    "--lr-decay-style cosine --lr-warmup-iters 3 --lr-warmup-init 1e-4": (
        {
            "lr_decay_style": "cosine",
            "lr_warmup_steps": 3,
            "lr_decay_steps": LAST,
            "init_lr": 1e-4,
        },
        lambda i: (
            1e-4 + (PEAK - 1e-4) * i / 3 if i <= 3 else decayed((i - 3) / (LAST - 3), cosine=True)
        ),
    ),
    "--lr-decay-style linear --lr-warmup-fraction 0.25 --lr-decay-iters 8": (
        {"lr_decay_style": "linear", "lr_warmup_steps": 2.0, "lr_decay_steps": 8},
        lambda i: PEAK * i / 2 if i <= 2 else decayed((i - 2) / 6),
    ),
    "--lr-decay-style inverse-square-root --lr-warmup-iters 4": (
        {"lr_decay_style": "inverse-square-root", "lr_warmup_steps": 4, "lr_decay_steps": LAST},
        lambda i: PEAK * (i / 4 if i <= 4 else (4 / i) ** 0.5),
    ),
}


@pytest.mark.parametrize("flags", CASES)
def test_rates_by_iteration(flags: str) -> None:
    meaning, formula = CASES[flags]
    args = parse_args(add_distca_arguments, [*COMMON, *flags.split()], 2)
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    scheduler = parameter_scheduler(args, SimpleNamespace(param_groups=[ours]))  # type: ignore
    keywords = {"init_lr": 0.0, "max_lr": PEAK, "min_lr": 0.0, "lr_warmup_steps": 0} | meaning
    for name in ("lr_warmup_steps", "lr_decay_steps"):
        keywords[name] *= GLOBAL_BATCH
    reference = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[theirs]),
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=LAST * GLOBAL_BATCH,
        wd_incr_style="constant",
        **keywords,
    )
    assert ours == theirs
    for iteration in range(1, LAST + 1):
        scheduler.step(increment=GLOBAL_BATCH)
        reference.step(increment=GLOBAL_BATCH)
        assert ours == theirs == {"lr": ours["lr"], "weight_decay": 0.1}
        assert ours["lr"] == pytest.approx(formula(iteration), rel=1e-9, abs=1e-12)
