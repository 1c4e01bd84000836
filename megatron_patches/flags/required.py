"""Checks of what a run needs, and of flags that contradict each other, before Megatron-LM looks.

Megatron-LM finds these by an assertion without words, by a traceback once the model is built, or
not at all.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from megatron_patches.flags.contradictions import check_contradictions

_PATHS = (
    "save",
    "load",
    "pretrained_checkpoint",
    "tensorboard_dir",
    "data_path",
    "data_cache_path",
)
"""Flags that mean nothing when they are empty, as where a script's variable is not set."""


def check_required(args: Namespace) -> None:
    """Checks a command line for what is missing or contradicts itself.

    Args:
        args: parsed arguments, before Megatron-LM checks them.

    Raises:
        ValueError: the message says which flag to give or to remove.
    """
    for name in _PATHS:
        value = vars(args)[name]
        if value == "" or (isinstance(value, list) and "" in value):
            raise ValueError(
                f"--{name.replace('_', '-')} is empty: give a path, or leave the flag out"
            )
    if args.load is not None and Path(args.load).is_file():
        raise ValueError(
            f"--load {args.load} is a file: give the folder that --save named, with its tracker"
        )
    runs = args.train_iters is not None or args.train_samples is not None
    given = {
        "--micro-batch-size": args.micro_batch_size is not None,
        "--lr": args.lr is not None or args.skip_train,
        "--train-iters or --train-samples": runs,
    }
    if missing := [flags for flags, is_given in given.items() if not is_given]:
        raise ValueError(f"give {', '.join(missing)}: there is no default")
    if args.num_experts is not None and args.moe_router_topk > args.num_experts:
        raise ValueError(
            f"--moe-router-topk {args.moe_router_topk} is more than --num-experts "
            f"{args.num_experts}: a token goes to different experts"
        )
    check_contradictions(args)
    _check_schedule(args)


def _check_schedule(args: Namespace) -> None:
    """Checks what Megatron-LM's scheduler of learning rates asserts when the model is built."""
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise ValueError(
            "--override-opt_param-scheduler takes the schedule of the flags, and "
            "--use-checkpoint-opt_param-scheduler the checkpoint's: remove one of the two"
        )
    if args.skip_train:
        return
    unit = "iters" if args.train_samples is None else "samples"
    warmup = vars(args)[f"lr_warmup_{unit}"]
    flag = f"lr_decay_{unit}" if vars(args)[f"lr_decay_{unit}"] is not None else f"train_{unit}"
    decay = vars(args)[flag]
    if args.lr_warmup_fraction is None and warmup >= decay:
        raise ValueError(
            f"--lr-warmup-{unit} {warmup} must be less than --{flag.replace('_', '-')} {decay}"
        )
