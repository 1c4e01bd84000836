"""What is replaced in how Megatron-LM's own loop saves and loads checkpoints.

Its folder of an iteration gets its files one by one, and the tracker names it when all are written.
"""

from __future__ import annotations

import contextlib
import functools
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from megatron.core.rerun_state_machine import EXIT_CODE_FAILED_ON_RESULT_VALIDATION

from megatron_patches.checkpoint_data import read_common_state
from megatron_patches.loop.checkpoint_folder import (
    RELEASE,
    TRACKER,
    explaining_loading,
    explaining_saving,
    loaded_checkpoint,
    replaced_when_whole,
)
from megatron_patches.loop.dropped_weights import refuse_dropped_weights
from megatron_patches.loop.finite import check_weights
from megatron_patches.loop.kept_tokenizer import keep_tokenizer
from megatron_patches.loop.save_lock import SaveLock
from megatron_patches.loop.saved_arguments import loads_optimizer
from megatron_patches.loop.saved_schedule import check_schedule, loading_other_rates
from megatron_patches.pipeline.progress import Progress


class Running(Protocol):
    """A run that notes how far this rank is, and holds the lock of `--save` on the first rank."""

    progress: Progress
    save_lock: SaveLock | None


def explain_saving(theirs: Callable[..., Any], run: Running) -> Callable[..., Any]:
    """Saves a checkpoint with its tokenizer; an error says why it cannot be saved."""

    @functools.wraps(theirs)
    def save_checkpoint(iteration: int, model: Any, *args: Any, **named: Any) -> Any:
        from megatron.training import get_args

        run.progress.enter("the saving of a checkpoint")
        check_weights(
            model,
            f"after iteration {iteration}",
            "nothing was saved since the last checkpoint",
            EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
        )
        args_of_run = get_args()
        with explaining_saving(args_of_run.save):
            if run.save_lock is not None:
                run.save_lock.renew()
            if dist.get_rank() == 0:
                kind, tokenizer = args_of_run.tokenizer_type, args_of_run.tokenizer_model
                keep_tokenizer(kind, tokenizer, Path(args_of_run.save))
            # The micro-batches of a step that is to run again are read anew, not kept.
            return theirs(iteration, model, *args, **named | {"train_data_iterator": None})

    return save_checkpoint


def explain_loading(theirs: Callable[..., Any], run: Running) -> Callable[..., Any]:
    """Loads a checkpoint; an error says what is wrong with it."""

    @functools.wraps(theirs)
    def load_checkpoint(
        ddp_model: Any, optimizer: Any, opt_param_scheduler: Any, *more: Any, **named: Any
    ) -> Any:
        from megatron.training import get_args

        args = get_args()
        run.progress.enter("the loading of a checkpoint")
        root, iteration = args.load, args.ckpt_step
        given = ddp_model, optimizer, opt_param_scheduler, *more
        if root is None:
            return theirs(*given, **named)
        with explaining_loading(root, iteration), contextlib.ExitStack() as loading:
            checkpoint = loaded_checkpoint(root, iteration)
            if checkpoint is not None:
                refuse_dropped_weights(ddp_model, checkpoint)
                with_schedule = opt_param_scheduler is not None and loads_optimizer(args)
                if with_schedule and checkpoint.name != RELEASE:
                    loading.enter_context(
                        _loading_schedule(checkpoint, args, optimizer, opt_param_scheduler)
                    )
            return theirs(*given, **named)

    return load_checkpoint


def _loading_schedule(
    checkpoint: Path, args: Namespace, optimizer: Any, scheduler: Any
) -> AbstractContextManager[None]:
    """Checks the schedule of a checkpoint, whose rates may be others."""
    if not (checkpoint / ".metadata").exists():
        # Another format is left to the loop.
        return contextlib.nullcontext()
    common = read_common_state(checkpoint)
    check_schedule(common["opt_param_scheduler"], scheduler.state_dict(), args, str(checkpoint))
    return loading_other_rates(common, args, optimizer, scheduler)


def whole_tracker(theirs: Callable[..., Any], _: object) -> Callable[..., Any]:
    """Opens a file as Megatron-LM does, but a tracker is replaced when the new one is whole."""

    @functools.wraps(theirs)
    def open_file(path: Any, mode: str = "r", *more: Any) -> Any:
        if mode == "w" and Path(path).name == TRACKER and Path(path).parent.is_dir():
            return replaced_when_whole(Path(path))
        return theirs(path, mode, *more)

    return open_file


class WholeTracker:
    """Files of one or many storages, as 0.19's loop opens them, but a tracker is replaced.

    Args:
        theirs: megatron-core's `maybe_msc`.
    """

    def __init__(self, theirs: Any, _: object) -> None:
        self._theirs = theirs
        self.open = whole_tracker(theirs.open, _)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)
