"""Checkpoints by megatron-core's distributed checkpointing, in Megatron-LM's layout.

A checkpoint `SAVE/iter_0000010` is written under another name and renamed when it is whole; then
the tracker `latest_checkpointed_iteration.txt` is replaced. Whenever a run is killed, the tracker
names a whole checkpoint. A checkpoint has nothing of `--distca`, and tensors are stored by their
place in the model, so it loads at other parallel sizes, with or without `--distca`, and in
Megatron-LM's own loop, whose checkpoints load here.
"""

from __future__ import annotations

import logging
import os
import shutil
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from distca.checkpoints.stored_weights import abbreviated
from megatron_patches.batches.resuming import go_on_from
from megatron_patches.loop.checkpoint_folder import (
    TRACKER,
    and_another,
    checkpoint_name,
    exchange,
    explaining_loading,
    explaining_saving,
    latest_iteration,
    replaced_when_whole,
)
from megatron_patches.loop.kept_tokenizer import keep_tokenizer
from megatron_patches.loop.lean.random_states import (
    set_random_states,
    sharded_random_states,
    wanted_random_states,
)
from megatron_patches.loop.saved_arguments import check_shape, saved_arguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedState:
    """Progress of the run at a checkpoint."""

    iteration: int
    consumed_train_samples: int
    consumed_valid_samples: int


def save_checkpoint(
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    args: Namespace,
    state: LoadedState,
) -> None:
    """Saves the run. Collective over all ranks; returns when the checkpoint is whole.

    Args:
        model: model chunks of this rank, wrapped or not.
        optimizer: Megatron's optimizer; not used with `no_save_optim`.
        scheduler: Megatron's parameter scheduler; not used with `no_save_optim`.
        args: flags, of which `save`, `no_save_optim` and `no_save_rng` are used.
        state: progress of the run.

    Raises:
        ValueError: it cannot be written, with the reason.
    """
    root = Path(args.save)
    with explaining_saving(root):
        if dist.get_rank() == 0:
            keep_tokenizer(args)
        _save(root, state.iteration, _state_dict(model, optimizer, scheduler, args, state))
    if dist.get_rank() == 0:
        logger.info("saved checkpoint %s", checkpoint_name(root, state.iteration))


def _save(root: Path, iteration: int, state_dict: dict[str, Any]) -> None:
    """Saves a checkpoint under another name, then gives it its own."""
    final = checkpoint_name(root, iteration)
    unfinished = root / f".unfinished_{final.name}"
    if dist.get_rank() == 0:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(".unfinished_*"):
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished.mkdir()
    dist.barrier()
    dist_checkpointing.save(state_dict, str(unfinished), content_metadata=_METADATA)
    dist.barrier()
    if dist.get_rank() == 0:
        if final.exists():
            # The tracker may name it.
            exchange(unfinished, final)
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            os.replace(unfinished, final)
        with replaced_when_whole(root / TRACKER) as tracker:
            tracker.write(str(iteration))
    dist.barrier()


def load_checkpoint(
    model: list[Any], optimizer: Any, scheduler: Any, args: Namespace
) -> LoadedState | None:
    """Loads the latest checkpoint of `args.load`, or that of `args.ckpt_step`. Collective.

    Args:
        model: model chunks of this rank, wrapped or not.
        optimizer: Megatron's optimizer, or None to load the weights alone.
        scheduler: Megatron's parameter scheduler; not used where the optimizer is not loaded.
        args: flags, of which `load`, `ckpt_step`, `no_load_optim` and `no_load_rng` are used;
            `finetune` loads the weights alone. Those of `go_on_from` are set.

    Returns:
        Progress of the run; None where there is no checkpoint or with `finetune`.

    Raises:
        ValueError: the checkpoint is of another model, cut off, or missing with `--ckpt-step` or
            `--exit-on-missing-checkpoint`, or its tracker is corrupt.
    """
    iteration = args.ckpt_step
    if iteration is None:
        iteration = latest_iteration(args.load)
    elif not checkpoint_name(args.load, iteration).is_dir():
        raise ValueError(
            f"--ckpt-step {iteration}: {checkpoint_name(args.load, iteration)} is not there"
            f"{and_another(args.load)}"
        )
    if iteration is None:
        if args.exit_on_missing_checkpoint:
            raise ValueError(f"--load {args.load} has no checkpoint")
        logger.warning("--load %s has no checkpoint: starting from random weights", args.load)
        return None
    with explaining_loading(args.load, iteration):
        return _load(model, optimizer, scheduler, args, iteration)


def _load(
    model: list[Any], optimizer: Any, scheduler: Any, args: Namespace, iteration: int
) -> LoadedState | None:
    """Loads the checkpoint of an iteration; see `load_checkpoint`."""
    path = str(checkpoint_name(args.load, iteration))
    if not dist_checkpointing.check_is_distributed_checkpoint(path):
        raise ValueError(
            f"{path} is no distributed checkpoint: save it by Megatron-LM with --ckpt-format "
            "torch_dist"
        )
    common = dist_checkpointing.load_common_state_dict(path)
    saved = saved_arguments(common, args)
    check_shape(saved, args, path)
    with_optimizer = not (args.no_load_optim or args.finetune or saved.no_save_optim)
    with_rng = not (args.no_load_rng or args.finetune or saved.no_save_rng)
    if not args.finetune:
        go_on_from(vars(saved), args)
    ranks = (*_layout(args), args.data_parallel_size)
    if with_rng and (*_layout(saved), saved.data_parallel_size) != ranks:
        logger.warning("the parallel sizes changed: random states are not loaded")
        with_rng = False
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or _METADATA
    _check_weights(model, metadata, path)
    wanted = _model_state(model, metadata)
    if with_optimizer:
        _check_resharding(metadata, saved, args, path)
        wanted["optimizer"] = optimizer.sharded_state_dict(
            dict(wanted), is_loading=True, metadata=_of_this_run(metadata)
        )
    if with_rng:
        wanted["rng_state"] = wanted_random_states(common)
    loaded = dist_checkpointing.load(wanted, path)
    for key, chunk in _chunks(model).items():
        chunk.load_state_dict(loaded[key])
    if with_optimizer:
        optimizer.load_state_dict(loaded["optimizer"])
        scheduler.load_state_dict(loaded["opt_param_scheduler"])
    elif optimizer is not None:
        # The float32 copies of bfloat16 weights follow the loaded weights.
        optimizer.reload_model_params()
    if with_rng:
        set_random_states(loaded["rng_state"])
    logger.info("loaded checkpoint %s", path)
    if args.finetune:
        return None
    return LoadedState(iteration, saved.consumed_train_samples, saved.consumed_valid_samples)


def _check_weights(model: list[Any], metadata: dict[str, Any], path: str) -> None:
    """Refuses a checkpoint with weights that no rank's model has. Collective.

    megatron-core itself refuses one that lacks weights.

    Args:
        model: model chunks of this rank.
        metadata: how the checkpoint's tensors are laid out.
        path: folder of the checkpoint.

    Raises:
        ValueError: weights would be dropped.
    """
    state = _model_state(model, metadata)
    apply_factories(state)
    mine = {each.key for each in nested_values(state) if isinstance(each, ShardedTensor)}
    of_ranks: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, mine)
    stored = {
        key for key in dist_checkpointing.load_tensors_metadata(path) if key.startswith(_WEIGHTS)
    }
    if dropped := sorted(stored.difference(*of_ranks)):
        raise ValueError(
            f"{path} is a checkpoint of another model: it has {abbreviated(dropped)}, which this "
            "run's model has not: give the flags that it was trained with"
        )


_WEIGHTS = ("embedding.", "decoder.", "output_layer.", "mtp.")
"""How names of weights begin, as opposed to those of the optimizer's and of random states."""


def _check_resharding(
    metadata: dict[str, Any], saved: Namespace, args: Namespace, path: str
) -> None:
    """Refuses an optimizer's state that cannot be loaded at these parallel sizes."""
    if metadata.get("distrib_optim_sharding_type") == "dp_reshardable" and _layout(
        saved
    ) != _layout(args):
        pipeline, tensor = _layout(saved)
        raise ValueError(
            f"{path} holds the optimizer's state for --tensor-model-parallel-size {tensor} and "
            f"--pipeline-model-parallel-size {pipeline} alone: give those, or --no-load-optim, or "
            "save with --dist-ckpt-optim-fully-reshardable"
        )


def _layout(args: Namespace) -> tuple[int, int]:
    """Returns the numbers of pipeline stages and of tensor-parallel ranks."""
    return args.pipeline_model_parallel_size, args.tensor_model_parallel_size


# Options of megatron-core's layout: the optimizer's state loads at other parallel sizes.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def _of_this_run(metadata: dict[str, Any]) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return metadata | {"dp_cp_group": group}


def _chunks(model: list[Any]) -> dict[str, Any]:
    """Returns the bare model chunks by their keys in the checkpoint."""
    bare = []
    for chunk in model:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        bare.append(chunk)
    return {"model" if len(bare) == 1 else f"model{i}": chunk for i, chunk in enumerate(bare)}


def _model_state(model: list[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        key: chunk.sharded_state_dict(metadata=_of_this_run(metadata))
        for key, chunk in _chunks(model).items()
    }


def _state_dict(
    model: list[Any], optimizer: Any, scheduler: Any, args: Namespace, state: LoadedState
) -> dict[str, Any]:
    """Returns what Megatron-LM's loop keeps, under its names."""
    tensors = _model_state(model, _METADATA)
    saved: dict[str, Any] = dict(tensors)
    saved |= {
        "checkpoint_version": 3.0,
        "args": _arguments_to_save(args, state),
        "iteration": state.iteration,
    }
    if not args.no_save_optim:
        saved["opt_param_scheduler"] = scheduler.state_dict()
        saved["optimizer"] = optimizer.sharded_state_dict(
            tensors, is_loading=False, metadata=_of_this_run(_METADATA)
        )
    if not args.no_save_rng:
        saved["rng_state"] = sharded_random_states()
    return saved


def _arguments_to_save(args: Namespace, state: LoadedState) -> Namespace:
    """Returns the flags that are plain values, which load without running code."""
    kept = {
        name: value
        for name, value in vars(args).items()
        if name != "rank" and isinstance(value, int | float | str | list | tuple | None)
    }
    kept |= {
        "consumed_train_samples": state.consumed_train_samples,
        "consumed_valid_samples": state.consumed_valid_samples,
        # Megatron-LM's word for data that the loop itself does not load.
        "dataloader_type": "external",
    }
    return Namespace(**kept)
