"""Weights of a checkpoint that no rank's model has, which megatron-core would drop in silence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from distca.checkpoints.stored_weights import abbreviated

_WEIGHTS = ("embedding.", "decoder.", "output_layer.", "mtp.")
"""How names of weights begin, as opposed to those of the optimizer's and of random states."""


def refuse_dropped_weights(model: Sequence[Any], checkpoint: Path) -> None:
    """Refuses a checkpoint with weights that no rank's model has. Collective.

    megatron-core itself refuses one that lacks weights. One of another format is left to the loop.

    Args:
        model: model chunks of this rank, wrapped or not.
        checkpoint: folder of an iteration.

    Raises:
        ValueError: weights would be dropped.
    """
    path = str(checkpoint)
    if not dist_checkpointing.check_is_distributed_checkpoint(path):
        return
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = (dist_checkpointing.load_content_metadata(path) or {}) | {"dp_cp_group": group}
    mine = set()
    for chunk in model:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        state = chunk.sharded_state_dict(metadata=metadata)
        apply_factories(state)
        mine |= {each.key for each in nested_values(state) if isinstance(each, ShardedTensor)}
    of_ranks: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, mine)
    stored = {
        key for key in dist_checkpointing.load_tensors_metadata(path) if key.startswith(_WEIGHTS)
    }
    if dropped := sorted(stored.difference(*of_ranks)):
        raise ValueError(
            f"{path} is a checkpoint of another model: it has {abbreviated(dropped)}, which "
            "this run's model does not have: give the flags that it was trained with"
        )
