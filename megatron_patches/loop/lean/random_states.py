"""Random states in checkpoints, in Megatron-LM's layout: one object for each stage and TP rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject


def sharded_random_states() -> ShardedObject:
    """Describes the random states of all data-parallel ranks as one object. Collective."""
    group = parallel_state.get_data_parallel_group()
    states: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(states, _states(), group=group)
    return _sharded(states)


def wanted_random_states(common: dict[str, Any]) -> ShardedObject:
    """Describes the random states that are to be loaded.

    Args:
        common: what a checkpoint keeps beside tensors.
    """
    if "layout" not in common:
        return _sharded(None)
    # Up to version 0.1 the lean loop kept one object for each rank.
    place = (*_place(), parallel_state.get_data_parallel_rank())
    return ShardedObject("rng_state", None, common["layout"], place)


def set_random_states(loaded: Any) -> None:
    """Sets the random states of this rank.

    Args:
        loaded: states of all data-parallel ranks, or of one that stands for all, as Megatron-LM
            saves them; or this rank's, as the lean loop did up to version 0.1.
    """
    if isinstance(loaded, dict):
        names = zip(_OLD_NAMES, _NAMES, strict=True)
        state = {new: loaded[old] for old, new in names}
    elif len(loaded) == dist.get_world_size(parallel_state.get_data_parallel_group()):
        state = loaded[parallel_state.get_data_parallel_rank()]
    else:
        state = loaded[0]
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    tracked = state["rng_tracker_states"]
    if torch.cuda.is_available():
        own = torch.cuda.get_rng_state()
        # A checkpoint made on CPUs has their states, which are longer.
        if state["cuda_rng_state"] is None or state["cuda_rng_state"].shape != own.shape:
            return
        torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)


_NAMES = (
    "random_rng_state",
    "np_rng_state",
    "torch_rng_state",
    "cuda_rng_state",
    "rng_tracker_states",
)
_OLD_NAMES = ("python", "numpy", "torch", "cuda", "tracker")


def _states() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    states = (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        torch.cuda.get_rng_state() if cuda else torch.get_rng_state(),
        tensor_parallel.get_cuda_rng_tracker().get_states(),
    )
    return dict(zip(_NAMES, states, strict=True))


def _place() -> tuple[int, int]:
    return (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )


def _sharded(states: list[Any] | None) -> ShardedObject:
    sizes = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", states, sizes, _place(), replica_id=replica)
