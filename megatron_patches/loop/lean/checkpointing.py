"""Checkpoints by megatron-core's distributed checkpointing, in Megatron-LM's layout.

A checkpoint `SAVE/iter_0000010` is written under another name and renamed when it is whole; then
the tracker `latest_checkpointed_iteration.txt` is replaced. Whenever a run is killed, the tracker
names a whole checkpoint. A checkpoint has nothing of `--distca`, and tensors are stored by their
place in the model, so it loads at other parallel sizes, and with or without `--distca`.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_patches.batches.resuming import NOTED, go_on_from

logger = logging.getLogger(__name__)

_TRACKER = "latest_checkpointed_iteration.txt"

# Flags that give a checkpoint's tensors their shapes.
_SHAPE_FLAGS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "normalization",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "position_embedding_type",
)


@dataclass(frozen=True)
class LoadedState:
    """Progress of the run at a checkpoint."""

    iteration: int
    consumed_train_samples: int
    consumed_valid_samples: int


def checkpoint_name(root: str | Path, iteration: int) -> Path:
    """Returns the directory of an iteration's checkpoint."""
    return Path(root) / f"iter_{iteration:07d}"


def latest_iteration(root: str | Path) -> int | None:
    """Reads the iteration that the tracker names; None: there is no checkpoint.

    Raises:
        ValueError: the tracker is unreadable, or names a checkpoint that is not there.
    """
    tracker = Path(root) / _TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    if not text.isdigit():
        raise ValueError(f"{tracker} holds {text!r}, which is no iteration: write one of {root} in")
    if not checkpoint_name(root, int(text)).is_dir():
        raise ValueError(f"{tracker} names {checkpoint_name(root, int(text))}, which is not there")
    return int(text)


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
    """
    root = Path(args.save)
    final = checkpoint_name(root, state.iteration)
    unfinished = root / f".unfinished_{final.name}"
    if dist.get_rank() == 0:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in (*root.glob(".unfinished_*"), final):
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished.mkdir()
    dist.barrier()
    dist_checkpointing.save(_state_dict(model, optimizer, scheduler, args, state), str(unfinished))
    dist.barrier()
    if dist.get_rank() == 0:
        os.replace(unfinished, final)
        tracker = root / _TRACKER
        written = root / f".{_TRACKER}"
        with written.open("w") as file:
            file.write(str(state.iteration))
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, tracker)
        logger.info("saved checkpoint %s", final)
    dist.barrier()


def load_checkpoint(
    model: list[Any], optimizer: Any, scheduler: Any, args: Namespace
) -> LoadedState | None:
    """Loads the latest checkpoint of `args.load`. Collective over all ranks.

    Args:
        model: model chunks of this rank, wrapped or not.
        optimizer: Megatron's optimizer, or None to load the weights alone.
        scheduler: Megatron's parameter scheduler; not used where the optimizer is not loaded.
        args: flags, of which `load`, `no_load_optim` and `no_load_rng` are used; `finetune` loads
            the weights alone. Those of `go_on_from` are set.

    Returns:
        Progress of the run; None where there is no checkpoint or with `finetune`.

    Raises:
        ValueError: the checkpoint is of another shape, or missing with
            `--exit-on-missing-checkpoint`, or its tracker is corrupt.
    """
    iteration = latest_iteration(args.load)
    if iteration is None:
        if args.exit_on_missing_checkpoint:
            raise ValueError(f"--load {args.load} has no checkpoint")
        logger.warning("--load %s has no checkpoint: starting from random weights", args.load)
        return None
    path = str(checkpoint_name(args.load, iteration))
    common = dist_checkpointing.load_common_state_dict(path)
    _check_shape(common["args"], args, path)
    with_optimizer = not (args.no_load_optim or args.finetune or common["args"]["no_save_optim"])
    same_layout = common["layout"] == _layout()
    with_rng = not (args.no_load_rng or args.finetune or common["args"]["no_save_rng"])
    if not args.finetune:
        go_on_from(common["args"], args)
    if with_rng and not same_layout:
        logger.warning("the parallel sizes changed: random states are not loaded")
        with_rng = False
    wanted = _model_state(model)
    if with_optimizer:
        _fill_adam_state(optimizer)
        wanted["optimizer"] = optimizer.sharded_state_dict(
            dict(wanted), is_loading=True, metadata=_metadata()
        )
    if with_rng:
        wanted["rng_state"] = _sharded_rng(None)
    loaded = dist_checkpointing.load(wanted, path)
    for key, chunk in _chunks(model).items():
        chunk.load_state_dict(loaded[key])
    if with_optimizer:
        optimizer.load_state_dict(loaded["optimizer"])
        _unshare_adam_steps(optimizer)
        scheduler.load_state_dict(loaded["opt_param_scheduler"])
    elif optimizer is not None:
        # The float32 copies of bfloat16 weights follow the loaded weights.
        optimizer.reload_model_params()
    if with_rng:
        _set_rng(loaded["rng_state"])
    logger.info("loaded checkpoint %s", path)
    if args.finetune:
        return None
    return LoadedState(
        iteration, common["consumed_train_samples"], common["consumed_valid_samples"]
    )


def _layout() -> tuple[int, int, int]:
    return (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    )


def _metadata() -> dict[str, Any]:
    """Options of megatron-core's layout: the optimizer's state loads at other parallel sizes."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _chunks(model: list[Any]) -> dict[str, Any]:
    """Returns the bare model chunks by their keys in the checkpoint."""
    bare = []
    for chunk in model:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        bare.append(chunk)
    return {"model" if len(bare) == 1 else f"model{i}": chunk for i, chunk in enumerate(bare)}


def _model_state(model: list[Any]) -> dict[str, Any]:
    return {
        key: chunk.sharded_state_dict(metadata=_metadata()) for key, chunk in _chunks(model).items()
    }


def _state_dict(
    model: list[Any], optimizer: Any, scheduler: Any, args: Namespace, state: LoadedState
) -> dict[str, Any]:
    tensors = _model_state(model)
    saved: dict[str, Any] = dict(tensors)
    saved |= {
        "checkpoint_version": 3.0,
        "args": {name: getattr(args, name) for name in (*_SHAPE_FLAGS, *NOTED, "no_save_optim")}
        | {"no_save_rng": args.no_save_rng},
        "layout": _layout(),
        "iteration": state.iteration,
        "consumed_train_samples": state.consumed_train_samples,
        "consumed_valid_samples": state.consumed_valid_samples,
    }
    if not args.no_save_optim:
        saved["opt_param_scheduler"] = scheduler.state_dict()
        saved["optimizer"] = optimizer.sharded_state_dict(
            tensors, is_loading=False, metadata=_metadata()
        )
    if not args.no_save_rng:
        saved["rng_state"] = _sharded_rng(_rng_state())
    return saved


def _check_shape(saved: dict[str, Any], args: Namespace, path: str) -> None:
    different = [
        f"--{name.replace('_', '-')} {saved[name]} (now {getattr(args, name)})"
        for name in _SHAPE_FLAGS
        if saved[name] != getattr(args, name)
    ]
    if different:
        raise ValueError(
            f"{path} is a checkpoint of another model, trained with {', '.join(different)}"
        )


def _rng_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _set_rng(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _sharded_rng(state: dict[str, Any] | None) -> ShardedObject:
    """Describes random states as one object for each rank."""
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    return ShardedObject("rng_state", state, _layout(), place)


def _torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    return [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]


def _fill_adam_state(optimizer: Any) -> None:
    """Gives torch's Adam the state that it would make at its first step.

    The distributed optimizer loads into that state, and asserts that it exists.
    """
    for inner in _torch_optimizers(optimizer):
        if not isinstance(inner, torch.optim.Adam):
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter.data),
                        "exp_avg_sq": torch.zeros_like(parameter.data),
                    }


def _unshare_adam_steps(optimizer: Any) -> None:
    """Gives every parameter its own `step` tensor after loading.

    megatron-core loads one tensor for all of them, which torch's Adam then increments once for
    each parameter; some formats leave it at zero and keep the count in the parameter group.
    """
    for inner in _torch_optimizers(optimizer):
        if not isinstance(inner, torch.optim.Adam):
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                if "step" in state:
                    step = group.get("step", state["step"])
                    state["step"] = torch.tensor(float(step))
