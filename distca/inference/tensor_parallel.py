"""Tensor parallelism: each of several ranks has a slice of every layer, and they add up outputs.

A slice is a model of the same family with fewer heads, a narrower feed-forward layer and a part of
the vocabulary, so that its code is transformers' own. Hooks add up what the last projection of a
block gives, as the family's `base_model_tp_plan` says; embeddings are added up, too, and logits put
beside each other. A rank reads the rows and columns of its slice from the file, and no others.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from distca.checkpoints.stored_weights import StoredTensor
from distca.checkpoints.weights import Checkpoint
from distca.schedule.serving.csps.layouts import SharedRows
from distca.transport import new_exchange_group

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from distca.inference.runnable import LayerAttention

SPLIT_OUTPUTS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
"""Projections with some outputs on each rank."""

SPLIT_INPUTS = ("o_proj", "down_proj")
"""Projections with some inputs on each rank, so that outputs are added up."""

_VOCABULARY = ("embed_tokens", "lm_head")


class RowSharing(Protocol):
    """Ranks that share rows between the blocks of layers, which blocks bring together."""

    @property
    def completes(self) -> bool:
        """Whether they do in the batch that runs."""
        ...

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to others."""
        ...

    def complete(self, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns what leaves a block's last projection, which gives float32 parts."""
        ...

    def embedded(self, values: torch.Tensor) -> torch.Tensor:
        """Adds up parts of all rows' embeddings; returns those of this rank's rows."""
        ...

    def attach(self, model: PreTrainedModel) -> None:
        """Lets the blocks of a slice share rows."""
        ...

    def share(self, shared: SharedRows, kept: torch.Tensor) -> AbstractContextManager[slice]:
        """Shares the rows of a batch while it runs; gives those of this rank.

        Args:
            shared: how rows are shared.
            kept: rows whose logits are needed, int64 `[kept]`.
        """
        ...

    def scattered(self, run: LayerAttention) -> LayerAttention:
        """Makes a run of a batch that is given this rank's rows of all heads."""
        ...


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that share each layer, seen from one of them.

    Attributes:
        rank: this rank among them.
        size: how many there are.
        group: their process group; None where one has all.
        sharing: sharing of rows between the blocks of layers; None: each rank has all rows.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    sharing: RowSharing | None = None

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' values."""
        values = values.contiguous()
        dist.all_reduce(values, group=self.group)
        return values

    def complete(self, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns a block's outputs from each rank's part, in float32."""
        if self.sharing is not None and self.sharing.completes:
            return self.sharing.complete(parts, dtype)
        return self.add_up(parts).to(dtype)

    def embedded(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of the rows that this rank has between blocks."""
        if self.sharing is not None and self.sharing.completes:
            return self.sharing.embedded(values)
        return self.add_up(values)

    def beside(self, values: torch.Tensor) -> torch.Tensor:
        """Returns all ranks' values one after the other in the last dimension."""
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.cat(parts, -1)


ALONE = TensorRanks()
"""A rank that has all of every layer."""


def join_ranks(
    tensor_parallel_size: int, timeout: timedelta
) -> tuple[dist.ProcessGroup, TensorRanks]:
    """Makes the process groups of a rank; neighbouring ranks share layers. Collective.

    Args:
        tensor_parallel_size: ranks that share each layer; it divides all ranks.
        timeout: time limit of an operation.

    Returns:
        The group of the ranks that have the same slice, for core attention, and the ranks that
        have the other slices of the same tokens.
    """
    rank, world_size, size = dist.get_rank(), dist.get_world_size(), tensor_parallel_size
    if world_size == 1:
        # Nothing travels. A group of its own would have a thread that polls all the same.
        assert dist.group.WORLD is not None
        return dist.group.WORLD, ALONE
    context = [
        new_exchange_group(list(range(first, world_size, size)), timeout) for first in range(size)
    ]
    group = context[rank % size]
    assert group is not None, "a rank is in its own group"
    if size == 1:
        return group, ALONE
    tensor = [
        dist.new_group(list(range(first, first + size)), timeout=timeout)
        for first in range(0, world_size, size)
    ]
    return group, TensorRanks(rank % size, size, tensor[rank // size])


def check_divides(config: PreTrainedConfig, size: int) -> None:
    """Refuses sizes that ranks cannot share evenly.

    Args:
        config: configuration of transformers.
        size: ranks that share each layer.

    Raises:
        ValueError: the size does not divide heads or the width of feed-forward layers, or the
            family has weights of another layout.
    """
    flag = "--tensor-parallel-size"
    if size < 1:
        raise ValueError(f"{flag} {size}: give at least 1")
    if size > 1 and config.model_type in _WHOLE:
        raise ValueError(f"{flag} {size}: a {config.model_type} is not cut into slices; give 1")
    kv_heads = int(config.num_key_value_heads)
    if kv_heads % size and size % kv_heads:
        raise ValueError(
            f"{flag} {size} neither divides the model's {kv_heads} key-value heads "
            "nor is a multiple of them: give one that does"
        )
    for name in ("num_attention_heads", *_WIDTHS):
        if (getattr(config, name, None) or 0) % size:
            raise ValueError(
                f"{flag} {size} does not divide the model's {name} "
                f"{getattr(config, name)}: give one that does"
            )


_WHOLE = ("gpt_oss",)
"""Families whose weights are not sliced: experts' weights lie in another order."""

_WIDTHS = ("intermediate_size", "moe_intermediate_size")


def slice_config(config: PreTrainedConfig, size: int) -> PreTrainedConfig:
    """Returns the configuration of a slice."""
    config = copy.deepcopy(config)
    heads = config.num_attention_heads
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    config.num_attention_heads = heads // size
    # Where there are more ranks than heads of keys, some have the same one.
    config.num_key_value_heads = max(config.num_key_value_heads // size, 1)
    for name in _WIDTHS:
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name) // size)
    config.vocab_size = -(-config.vocab_size // size)
    # Of training alone, and it may lie outside the slice.
    config.pad_token_id = None
    return config


def load_slice(
    checkpoint: Checkpoint,
    ranks: TensorRanks,
    dtype: torch.dtype,
    attention: str,
    device: torch.device,
) -> PreTrainedModel:
    """Reads a rank's slice of a model, which gives the whole model's logits. Collective.

    Args:
        checkpoint: the whole model.
        ranks: ranks that have slices.
        dtype: dtype of the weights.
        attention: implementation of attention.
        device: device of the weights.

    Raises:
        ValueError: the checkpoint does not have exactly the weights of the model.
    """
    config = checkpoint.config
    of_rank = slice_config(config, ranks.size)
    model = checkpoint.load(dtype, attention, of_rank, _Cut(config, ranks), device)
    _add_hooks(model, config.vocab_size, ranks)
    return model


class _Cut:
    """The rows and columns that a rank keeps of each weight.

    Args:
        config: configuration of the whole model.
        ranks: ranks that have slices.
    """

    def __init__(self, config: PreTrainedConfig, ranks: TensorRanks) -> None:
        self._config, self._ranks = config, ranks

    def __call__(self, name: str, weight: StoredTensor) -> torch.Tensor:
        """Returns the rank's part of a weight of a checkpoint, by its name."""
        words = name.split(".")
        is_bias = words[-1] == "bias"
        layer = words[-2] if words[-1] in ("weight", "bias") else words[-1]
        shape = weight.shape
        outputs = max(len(shape) - 2, 0)
        rank, size = self._ranks.rank, self._ranks.size
        if layer in SPLIT_OUTPUTS:
            return _read(weight, outputs, self._outputs(layer, shape[outputs]))
        if layer in SPLIT_INPUTS and is_bias:
            # It is added once.
            whole = _read(weight, 0, [(0, shape[0])])
            return whole if rank == 0 else torch.zeros_like(whole)
        if layer in SPLIT_INPUTS:
            width = shape[-1] // size
            return _read(weight, len(shape) - 1, [(rank * width, (rank + 1) * width)])
        if layer in _VOCABULARY:
            rows = -(-shape[0] // size)
            first, end = (min(each * rows, shape[0]) for each in (rank, rank + 1))
            stored = _read(weight, 0, [(first, end)])
            return torch.nn.functional.pad(stored, (0, 0, 0, rows - len(stored)))
        return _read(weight, 0, [(0, shape[0])])

    def _outputs(self, layer: str, count: int) -> list[tuple[int, int]]:
        """Ranges of a projection's outputs."""
        rank, size = self._ranks.rank, self._ranks.size
        heads, kv_heads = self._config.num_attention_heads, self._config.num_key_value_heads
        # Parts that lie one after the other: how long each is, and into how many it is cut.
        kv = min(kv_heads, size)
        if layer == "qkv_proj":
            of_head = count // (heads + 2 * kv_heads)
            parts = [(heads * of_head, size), (kv_heads * of_head, kv), (kv_heads * of_head, kv)]
        elif layer == "gate_up_proj":
            parts = [(count // 2, size)] * 2
        else:
            parts = [(count, kv if layer in ("k_proj", "v_proj") else size)]
        ranges, begin = [], 0
        for length, cuts in parts:
            part = length // cuts
            first = begin + rank * cuts // size * part
            ranges.append((first, first + part))
            begin += length
        return ranges


def _read(weight: StoredTensor, dim: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Copies ranges of a dimension of a stored weight, so that the file's pages can be freed."""
    slices = [weight[(slice(None),) * dim + (slice(*each),)] for each in ranges]
    return torch.cat(slices, dim) if len(slices) > 1 else slices[0].clone()


def _add_hooks(model: PreTrainedModel, vocabulary: int, ranks: TensorRanks) -> None:
    """Makes the layers of a slice give what those of the whole model do.

    Args:
        model: slice of a model.
        vocabulary: tokens of the whole model.
        ranks: ranks that have slices.
    """
    embedding = model.get_input_embeddings()
    rows, of_slice = embedding.num_embeddings, embedding.forward

    def embed(ids: torch.Tensor) -> torch.Tensor:
        ids = ids - ranks.rank * rows
        mine = (ids >= 0) & (ids < rows)
        return ranks.embedded(of_slice(ids * mine) * mine[..., None])

    embedding.forward = embed
    for name, module in model.named_modules():
        last = name.split(".")[-1]
        if last in SPLIT_INPUTS:
            module.forward = functools.partial(_project, module, ranks)
        elif last == "experts":
            # All experts of a layer.
            module.register_forward_hook(
                lambda _, given, out: ranks.complete(out.float(), out.dtype)
            )
    model.get_output_embeddings().register_forward_hook(
        lambda _, given, out: ranks.beside(out)[..., :vocabulary]
    )
    if ranks.sharing is not None:
        ranks.sharing.attach(model)


def _project(layer: torch.nn.Linear, ranks: TensorRanks, values: torch.Tensor) -> torch.Tensor:
    """Outputs of a projection with some inputs on each rank.

    The ranks' sums are in float32 until all are added up, so that a rank's part is not rounded:
    else bfloat16 logits of small models were 3% further from float32's than one process's on two
    ranks, and 8% on four.
    """
    rows, weight = values.flatten(0, -2), layer.weight.t()
    if values.is_cuda and values.dtype != torch.float32:
        out = torch.mm(rows, weight, out_dtype=torch.float32)
    else:
        out = rows.float() @ weight.float()
    if layer.bias is not None:
        out += layer.bias
    return ranks.complete(out, values.dtype).view(*values.shape[:-1], -1)
