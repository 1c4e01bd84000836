"""The schedule of learning rate and weight decay of a checkpoint, and of the run that goes on."""

from __future__ import annotations

import contextlib
import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

logger = logging.getLogger(__name__)

_SET_BY = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "samples of the warm-up",
    "lr_decay_steps": "samples of the decay",
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "--weight-decay or --start-weight-decay",
    "end_wd": "--weight-decay or --end-weight-decay",
    "wd_incr_steps": "samples of the run",
    "wd_incr_style": "--weight-decay-incr-style",
}
"""What sets each value of a schedule, which counts in samples."""

_RATES = ("max_lr", "min_lr")


def schedule_of(args: Namespace) -> dict[str, Any]:
    """Returns the schedule that the flags make, as Megatron-LM's does before it has an optimizer.

    Source: `get_optimizer_param_scheduler` in megatron/training/training.py.
    """
    if args.train_iters:
        batch = args.global_batch_size
        decay = (args.lr_decay_iters or args.train_iters) * batch
        increase, warmup = args.train_iters * batch, args.lr_warmup_iters * batch
    else:
        decay = args.lr_decay_samples or args.train_samples
        increase, warmup = args.train_samples, args.lr_warmup_samples
    if args.lr_warmup_fraction is not None:
        warmup = args.lr_warmup_fraction * decay
    return {
        "max_lr": float(args.lr),
        "min_lr": args.min_lr,
        "lr_warmup_steps": warmup,
        "lr_decay_steps": decay,
        "lr_decay_style": args.lr_decay_style,
        "start_wd": args.start_weight_decay,
        "end_wd": args.end_weight_decay,
        "wd_incr_steps": increase,
        "wd_incr_style": args.weight_decay_incr_style,
    }


def check_schedule(
    saved: Mapping[str, Any], now: Mapping[str, Any], args: Namespace, path: str
) -> None:
    """Refuses another schedule than the checkpoint's, unless a flag says which one counts.

    Megatron-LM refuses it, too, by the first value that differs.

    Args:
        saved: schedule of the checkpoint.
        now: schedule of this run.
        args: flags of this run.
        path: folder of the checkpoint.

    Raises:
        ValueError: they differ.
    """
    if args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler:
        return
    different = [
        f"{set_by} {saved[name]} (now {now[name]})"
        for name, set_by in _SET_BY.items()
        if name in saved and saved[name] != now[name]
    ]
    if different:
        raise ValueError(
            f"{path} has another schedule than this run: {', '.join(dict.fromkeys(different))}: "
            "give the same values, or --override-opt_param-scheduler to go on with this run's, or "
            "--use-checkpoint-opt_param-scheduler to go on with the checkpoint's"
        )


@contextlib.contextmanager
def loading_other_rates(
    common: Mapping[str, Any], args: Namespace, optimizer: Any, scheduler: Any
) -> Iterator[None]:
    """Lets parameter groups load from a checkpoint of other learning rates.

    megatron-core finds a group in a checkpoint by its rates, too, and takes those it finds. So
    groups have the checkpoint's while they load, and with `--override-opt_param-scheduler` this
    run's after it.

    Args:
        common: what the checkpoint keeps beside tensors.
        args: flags of this run.
        optimizer: Megatron's optimizer.
        scheduler: Megatron's schedule of this run.
    """
    groups = groups_of(optimizer)
    own = [{name: group[name] for name in _RATES if name in group} for group in groups]
    for group in groups:
        if group.get("is_decoupled_lr", False):
            now = {"max_lr": args.decoupled_lr, "min_lr": args.decoupled_min_lr}
            saved = common["args"]
            was = {"max_lr": saved.decoupled_lr, "min_lr": saved.decoupled_min_lr}
        else:
            # A run may have gone on with another schedule than its flags'.
            now = {"max_lr": args.lr, "min_lr": args.min_lr}
            was = common["opt_param_scheduler"]
        group.update({name: was[name] for name in _RATES if group.get(name) == now[name]})
    yield
    if scheduler.override_opt_param_scheduler:
        for group, rates in zip(groups_of(optimizer), own, strict=True):
            group.update(rates)
        scheduler.step(0)
    style, steps = scheduler.lr_decay_style, scheduler.num_steps
    if args.rank == 0 and style != "constant" and steps >= scheduler.lr_decay_steps:
        logger.warning(
            "the schedule of the learning rate ends at %d samples, and %d are consumed: it stays "
            "at %s; a larger --lr-decay-iters or --lr-decay-samples with "
            "--override-opt_param-scheduler makes it longer",
            *(scheduler.lr_decay_steps, steps, scheduler.min_lr),
        )


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Returns the parameter groups of an optimizer; none of one without parameters."""
    return [] if optimizer.is_stub_optimizer else list(optimizer.param_groups)
