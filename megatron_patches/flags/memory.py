"""Least memory that a run needs on a rank, held against what the machine has.

It is a lower bound, so that nothing that would run is refused: sizes that are beyond all memory end
a run before anything is allocated, and not by the kernel's killing it.
"""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from megatron_patches.flags.sizes import (
    expert_parameters,
    layer_parameters,
    optimizer_bytes,
    share_with_experts,
)

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
        args: Megatron-LM's arguments with its derived values. Before the tokenizer is built the
            vocabulary may be unknown; its padding is not.
    """
    parameters = _parameters(args)
    replicas = args.data_parallel_size
    shared = replicas if _is_sharded(args) else 1
    weight = 1 if args.fp8 else args.params_dtype.itemsize
    gradients = optimizer = 0
    if not args.skip_train:
        gradients = parameters * weight // shared
        over = replicas if args.use_distributed_optimizer else shared
        if not args.optimizer_cpu_offload:
            optimizer = parameters * optimizer_bytes(args) // over
    return LeastMemory(parameters * weight // shared, gradients, optimizer, _activation_bytes(args))


def _parameters(args: Namespace) -> int:
    """Counts the parameters of a rank, the mean of the stages."""
    shards, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    of_layers = args.num_layers * layer_parameters(args, active=False)
    experts = 0
    if args.num_experts:
        share = share_with_experts(args.moe_layer_freq, args.num_layers)
        experts = round(args.num_layers * share * expert_parameters(args))
    embeddings = 2 if args.untie_embeddings_and_output_weights else 1
    rows = embeddings * _vocabulary(args)
    if args.position_embedding_type == "learned_absolute":
        rows += args.max_position_embeddings
    dense = of_layers - experts + rows * args.hidden_size
    expert_shards = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    return dense // (shards * stages) + experts // (expert_shards * stages)


def _vocabulary(args: Namespace) -> int:
    """Returns the rows of the vocabulary, padded; a tokenizer that is not built yet has one."""
    if args.padded_vocab_size:
        return int(args.padded_vocab_size)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return math.ceil((args.vocab_size or 1) / multiple) * multiple


def _activation_bytes(args: Namespace) -> int:
    shards = args.tensor_model_parallel_size
    tokens = args.seq_length * args.micro_batch_size // args.context_parallel_size
    layers = args.num_layers // args.pipeline_model_parallel_size
    if args.skip_train or args.recompute_granularity == "full":
        layers = min(layers, 1)
    elements = layers * args.hidden_size // (shards if args.sequence_parallel else 1)
    if args.pipeline_model_parallel_size == 1:
        elements += _vocabulary(args) // shards
    return int(tokens * (_TOKEN_BYTES + elements * args.params_dtype.itemsize))


def _is_sharded(args: Namespace) -> bool:
    """Returns whether data-parallel ranks share the weights."""
    return bool(args.use_megatron_fsdp or args.use_torch_fsdp2)
