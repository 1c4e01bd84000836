"""Least memory that a run needs on a rank, held against what the machine has.

It is a lower bound, so that nothing that would run is refused: sizes that are beyond all memory end
a run before anything is allocated, and not by the kernel's killing it.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from megatron_patches.flags.sizes import ModelSizes, optimizer_bytes

_TOKEN_BYTES = 8


@dataclass(frozen=True)
class LeastMemory:
    """Least bytes on a rank, by what holds them.

    Attributes:
        weights: weights, in their own dtype.
        gradients: gradients, in the weights' dtype; none with `--skip-train`.
        optimizer: the optimizer's state of each weight.
        activations: a micro-batch's tokens and the inputs of its layers, kept for the backward
            pass, and its logits.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))

    def __str__(self) -> str:
        each = (f"{each.name} {getattr(self, each.name) / 1e9:,.1f}" for each in fields(self))
        return ", ".join(each)


def machine_memory(environment: Mapping[str, str], servers: int = 0) -> int:
    """Returns the bytes that a rank has: those of its GPU, or its share of the machine's.

    Args:
        environment: variables of the launcher, which say how many processes the machine has.
        servers: number of processes that hold no model.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    processes = int(environment.get("LOCAL_WORLD_SIZE", 1)) - servers
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // max(processes, 1)


def check_memory(args: Namespace, memory: int) -> None:
    """Checks that a rank's memory holds what the run needs at least.

    Args:
        args: Megatron-LM's arguments with its derived values.
        memory: bytes that a rank has.

    Raises:
        ValueError: it does not.
    """
    needed = least_memory(args)
    if needed.total > memory:
        raise ValueError(
            f"a rank needs at least {needed.total / 1e9:,.1f} GB of memory (GB of {needed}), but "
            f"has {memory / 1e9:,.1f} GB: make the model, --seq-length or --micro-batch-size "
            "smaller, or share the model out over more ranks (--tensor-model-parallel-size, "
            "--pipeline-model-parallel-size)"
        )


def least_memory(args: Namespace) -> LeastMemory:
    """Returns the least memory that a rank needs.

    Matrices count in full, divided by the ranks that share them; biases and norms do not count, nor
    do buffers, or what attention and the layers keep inside.

    Args:
        args: Megatron-LM's arguments with its derived values.
    """
    sizes = ModelSizes.from_args(args)
    parameters = _parameters(
        sizes,
        args.tensor_model_parallel_size,
        args.expert_model_parallel_size * args.expert_tensor_parallel_size,
        args.pipeline_model_parallel_size,
        args.max_position_embeddings if args.position_embedding_type == "learned_absolute" else 0,
    )
    replicas = args.data_parallel_size
    shared = replicas if args.use_megatron_fsdp or args.use_torch_fsdp2 else 1
    weight = 1 if args.fp8 else sizes.dtype_bytes
    gradients = optimizer = 0
    if not args.skip_train:
        gradients = parameters * weight // shared
        over = replicas if args.use_distributed_optimizer else shared
        if not args.optimizer_cpu_offload:
            optimizer = parameters * optimizer_bytes(args) // over
    kept_layers = args.num_layers // args.pipeline_model_parallel_size
    if args.skip_train or args.recompute_granularity == "full":
        kept_layers = min(kept_layers, 1)
    shards = args.tensor_model_parallel_size
    elements = kept_layers * sizes.hidden_size // (shards if args.sequence_parallel else 1)
    if args.pipeline_model_parallel_size == 1:
        elements += sizes.vocabulary // shards
    tokens = args.seq_length * args.micro_batch_size // args.context_parallel_size
    activations = tokens * (_TOKEN_BYTES + elements * sizes.dtype_bytes)
    return LeastMemory(parameters * weight // shared, gradients, optimizer, activations)


def _parameters(
    sizes: ModelSizes, shards: int, expert_shards: int, stages: int, positions: int
) -> int:
    """Counts the parameters of a rank, the mean of the stages.

    Args:
        sizes: sizes of the model.
        shards: ranks that share a dense matrix.
        expert_shards: ranks that share a layer's experts.
        stages: pipeline stages.
        positions: rows of the embedding of positions.
    """
    experts = 0
    if sizes.experts is not None:
        experts = round(sizes.layers * sizes.experts.share * sizes.expert_parameters)
    dense = sizes.parameters - experts + positions * sizes.hidden_size
    return dense // (shards * stages) + experts // (expert_shards * stages)
