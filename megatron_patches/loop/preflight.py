"""All that flags name, tried before the model is built: files to read, and places to write to.

A rank may be alone with a problem, as on a machine that lacks the data: so all ranks tell each
other what they found, one of them logs it, and all end.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch.distributed as dist

from megatron_patches.batches.blends import SPLITS
from megatron_patches.batches.dataset_factory import check_documents
from megatron_patches.batches.tree_memory import check_tree_memory
from megatron_patches.checkpoint_data import read_common_state
from megatron_patches.flags.batch_sizes import BatchSizes
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.memory import machine_memory
from megatron_patches.flags.parallel import ParallelSizes
from megatron_patches.flags.planning import schedule_config
from megatron_patches.flags.sizes import checkpoint_bytes
from megatron_patches.loop.checkpoint_folder import (
    RELEASE,
    find_corruption,
    loaded_checkpoint,
    refuse_lost_tracker,
    refuse_to_overwrite,
    suggest_checkpoint,
)
from megatron_patches.loop.failure_report import PATIENCE
from megatron_patches.loop.save_lock import LOCK, SaveLock
from megatron_patches.loop.saved_arguments import check_model, loads_optimizer, saved_arguments
from megatron_patches.loop.saved_schedule import check_schedule, schedule_of
from megatron_patches.loop.saved_vocabulary import check_vocabulary
from megatron_patches.versions import newer_flag

logger = logging.getLogger(__name__)

INTEGRITY = "integrity.json"
"""File of a checkpoint with the checksums of its files, which `--verify-integrity` writes."""


def preflight(
    config: DistcaConfig, args: Namespace, environment: Mapping[str, str]
) -> AbstractContextManager[SaveLock | None]:
    """Tries what the flags name and locks `--save`. Collective.

    Args:
        config: our flags.
        args: Megatron-LM's arguments with its derived values, and the tokenizer's `vocab_size`.
        environment: variables, in which a launcher names the job.

    Returns:
        The lock of `--save` on the first rank, to be held until the run ends.

    Raises:
        SystemExit: something cannot be used, which the first rank has logged.
    """
    held: AbstractContextManager[SaveLock | None] = contextlib.nullcontext()

    def take() -> None:
        nonlocal held
        if args.rank == 0:
            check_boards(args)
            check_trace(config)
            if args.save is not None:
                held = lock_save(Path(args.save), checkpoint_bytes(args), environment)
        if args.rank == args.world_size - 1:
            check_metrics(config)

    memory = machine_memory(environment, config.dedicated)
    _together(lambda: check_read(config, args, memory))
    _together(lambda: check_same_skips(args))
    _together(take)
    if args.save is not None:
        _together(lambda: check_save_is_shared(Path(args.save), args.rank))
    return held


def check_alone(config: DistcaConfig, args: Namespace) -> None:
    """Tries what the flags name from one process, before any rank starts.

    Args:
        config: our flags.
        args: Megatron-LM's arguments with its derived values, and the tokenizer's `vocab_size`.

    Raises:
        ValueError: something cannot be used, at least on this machine.
    """
    check_read(config, args)
    check_boards(args)
    check_trace(config)
    check_metrics(config)
    check_tracker(args)
    if args.save is not None:
        _try_folder(f"--save {args.save}", Path(args.save))
        check_room(Path(args.save), checkpoint_bytes(args))


def check_read(config: DistcaConfig, args: Namespace, memory: int | None = None) -> None:
    """Tries what is read: the data, the checkpoint and the profile.

    Args:
        config: our flags.
        args: Megatron-LM's arguments with its derived values, and the tokenizer's `vocab_size`.
        memory: bytes that a rank has; None: trees are not held against it.

    Raises:
        ValueError: one of them is missing, corrupt, or of another run's shape, or the run would
            overwrite another's checkpoints.
    """
    evaluates = bool(args.eval_iters or args.full_validation)
    splits = SPLITS if evaluates else SPLITS[:1]
    check_documents(config, args, splits)
    if memory is not None and config.documents.share_prefixes:
        check_tree_memory(config, args, splits, memory)
    if config.enabled and config.scheduling.profile is not None:
        sizes = ParallelSizes.from_args(args, config.head_parallel)
        schedule_config(config, args, sizes.servers(config.dedicated))
    if args.load is not None:
        check_checkpoint(args)
    check_first_weights(args)
    if config.enabled and args.save is not None:
        refuse_to_overwrite(args.save, args.load)


def check_first_weights(args: Namespace) -> None:
    """Checks that `--pretrained-checkpoint`, if the run starts from it, has this run's vocabulary.

    Raises:
        ValueError: it has embeddings of other tokens, or of another padding.
    """
    first = args.pretrained_checkpoint
    continues = args.load is not None and loaded_checkpoint(args.load, args.ckpt_step) is not None
    path = None if first is None or continues else loaded_checkpoint(first, None)
    if path is not None and (path / ".metadata").exists():
        check_vocabulary(Namespace(), args, path)


def check_checkpoint(args: Namespace) -> None:
    """Checks that the checkpoint of `--load` is there, whole, and of this run's model.

    One of another format than distributed checkpoints' is left to the loop.

    Raises:
        ValueError: it isn't, or holds what only running code could make.
    """
    path = loaded_checkpoint(args.load, args.ckpt_step)
    if path is None:
        refuse_lost_tracker(args.load)
        if args.exit_on_missing_checkpoint and not args.pretrained_checkpoint:
            raise ValueError(
                f"--load {args.load} has no checkpoint: give another folder, or leave out "
                "--exit-on-missing-checkpoint"
            )
        return
    if not (path / ".metadata").exists():
        return
    found = find_corruption(path)
    if found is not None:
        raise ValueError(f"{found}{suggest_checkpoint(args.load, path)}")
    if path.name == RELEASE:
        # Megatron-LM loads the weights alone.
        args = Namespace(**vars(args) | {"finetune": True})
    try:
        common = read_common_state(path)
    except ValueError as error:
        raise ValueError(f"{error}{suggest_checkpoint(args.load, path)}") from error
    if newer_flag(args, "verify_integrity") and not (path / INTEGRITY).exists():
        raise ValueError(
            f"{path} was saved without --verify-integrity and has no checksums: leave the flag out "
            "to load it"
        )
    if path.name == RELEASE and "args" not in common:
        check_vocabulary(Namespace(), args, path)
        return
    of_run = saved_arguments(common)
    check_model(of_run, args, str(path))
    check_vocabulary(of_run, args, path)
    if path.name != RELEASE:
        check_progress(common["iteration"], of_run.consumed_train_samples, args, str(path))
        if "opt_param_scheduler" in common and loads_optimizer(args) and not args.skip_train:
            check_schedule(common["opt_param_scheduler"], schedule_of(args), args, str(path))


def check_progress(iteration: int, consumed: int, args: Namespace, path: str) -> None:
    """Checks that a checkpoint is not beyond the end of the run, and warns where it is the end.

    Args:
        iteration: iteration of the checkpoint.
        consumed: number of training samples consumed before it.
        args: flags of this run.
        path: folder of the checkpoint.

    Raises:
        ValueError: it is beyond.
    """
    if args.finetune or args.skip_train:
        return
    if args.train_samples is None:
        flag, end = f"--train-iters {args.train_iters}", args.train_iters
        done, left = iteration, args.train_iters - iteration
    else:
        flag, end = f"--train-samples {args.train_samples}", args.train_samples
        done, left = consumed, BatchSizes.from_args(args).iterations(end, consumed)
    if done > end:
        raise ValueError(
            f"{path} has done {done:,}, more than {flag}: raise it to train on, or give "
            "--skip-train to evaluate"
        )
    if left == 0 and args.rank == 0:
        logger.warning("%s has done %s: nothing is left to train", path, flag)


def check_trace(config: DistcaConfig) -> None:
    """Tries the file of the timeline, if one is written.

    Raises:
        ValueError: it cannot be.
    """
    if config.enabled and config.trace is not None:
        _try_file("--distca-trace", config.trace.path)


def check_metrics(config: DistcaConfig) -> None:
    """Tries the file of the metrics, if one is written.

    Raises:
        ValueError: it cannot be.
    """
    if config.metrics is not None:
        _try_file("--distca-metrics", config.metrics)


def _try_file(flag: str, path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder: give the name of a file")
    try:
        if path.exists():
            path.open("a").close()
    except OSError as error:
        raise _unusable(f"{flag} {path}", error) from error
    _try_folder(f"{flag} {path}", path.parent)


def check_boards(args: Namespace) -> None:
    """Tries the folders of TensorBoard and Weights & Biases.

    Raises:
        ValueError: one of them cannot be written to.
    """
    for flag, applies in (
        ("tensorboard_dir", True),
        ("wandb_save_dir", args.wandb_project),
    ):
        folder = vars(args)[flag]
        if folder and applies:
            _try_folder(f"--{flag.replace('_', '-')} {folder}", Path(folder))


def check_tracker(args: Namespace) -> None:
    """Tries the file of rejected results, to which Megatron-LM appends on every rank.

    Raises:
        ValueError: it cannot be written to.
    """
    if args.result_rejected_tracker_filename is not None:
        path = Path(args.result_rejected_tracker_filename)
        _try_file("--result-rejected-tracker-filename", path)


def check_same_skips(args: Namespace) -> None:
    """Checks that all ranks skip the same iterations, which each has read for itself. Collective.

    Raises:
        ValueError: they don't, since they see different files of rejected results.
    """
    mine = sorted({*args.iterations_to_skip})
    of_ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    if any(each != mine for each in of_ranks):
        raise ValueError(
            f"--result-rejected-tracker-filename {args.result_rejected_tracker_filename} makes "
            "ranks skip different iterations: give a file that all machines share"
        )


def _try_folder(flag: str, folder: Path) -> None:
    """Makes a folder and a file in it, which goes at once."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _unusable(flag, error) from error


def _unusable(flag: str, error: OSError) -> ValueError:
    return ValueError(
        f"{flag} cannot be written to ({error.strerror}: {error.filename}): give another place"
    )


def lock_save(folder: Path, needed: int, environment: Mapping[str, str]) -> SaveLock:
    """Makes and locks the folder of `--save`, which needs room for a checkpoint.

    Args:
        folder: folder of `--save`.
        needed: bytes of a checkpoint.
        environment: variables, in which a launcher names the job.

    Raises:
        ValueError: it cannot be written to, another job does, or there is no room.
    """
    try:
        lock = SaveLock.take(folder, environment)
    except OSError as error:
        raise _unusable(f"--save {folder}", error) from error
    check_room(folder, needed)
    return lock


def check_room(folder: Path, needed: int) -> None:
    """Checks that the existing folder of `--save` has room for a checkpoint.

    Args:
        folder: folder of `--save`.
        needed: bytes of a checkpoint.

    Raises:
        ValueError: it has not.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        left = [path for path in sorted(folder.glob("iter_*")) if find_corruption(path)]
        room = "make room, or give another folder"
        if left:
            names = ", ".join(path.name for path in left)
            room = f"remove what saves that failed have left ({names}), or give another folder"
        raise ValueError(
            f"--save {folder} has {free / 1e9:.2f} GB free, but a checkpoint of this model takes "
            f"at least {needed / 1e9:.2f} GB: {room}"
        )


def check_save_is_shared(folder: Path, rank: int) -> None:
    """Checks that this rank sees the folder of `--save` that the first one made, and may write.

    Raises:
        ValueError: it doesn't, or may not.
    """
    if rank == 0:
        return
    if not (folder / LOCK).exists():
        raise ValueError(
            f"--save {folder} is not the folder that the first rank sees: every machine writes "
            "a part of a checkpoint, so give a folder that all of them share"
        )
    _try_folder(f"--save {folder}", folder)


def _together(check: Callable[[], None]) -> None:
    """Runs a check on all ranks; where it failed on any, one logs why and all end. Collective."""
    try:
        check()
        problem = None
    except ValueError as error:
        problem = str(error)
    found: list[tuple[str, str | None]] = [("", None)] * dist.get_world_size()
    dist.all_gather_object(found, (socket.gethostname(), problem))
    problems = [(rank, host, text) for rank, (host, text) in enumerate(found) if text is not None]
    if not problems:
        return
    rank, host, text = problems[0]
    if dist.get_rank() == 0:
        alone = "" if rank == 0 else f"rank {rank} on {host}: "
        logger.critical("error: %s%s", alone, text)
    # No rank leaves while another may still be reading what it sent.
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    if dist.get_rank() != 0:
        # torchrun shows last the failure that it saw first: the one that says why.
        time.sleep(PATIENCE)
    sys.exit(2)
