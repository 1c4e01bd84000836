"""SP-TP and SP-NTP on ranks that split a model's weights: rows are shared between layers' blocks.

Hooks on the blocks of transformers' layers bring rows together and apart, as
`distca.schedule.serving.csps.layouts` describes it. Steps without a prefill, and those of fewer
tokens than ranks, run as with tensor parallelism alone; keys and values have the same places in
all.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from distca.inference.models import ServedModel
from distca.inference.runnable import LayerAttention
from distca.inference.tensor_parallel import TensorRanks
from distca.plan.span import Int64s
from distca.runtime.serving.sequence_exchange import SequenceExchange
from distca.schedule.serving.csps.layouts import (
    LayoutChoice,
    SharedRows,
    SplitLayer,
    SplitModel,
)
from distca.transport import CollectiveTransport, new_exchange_group

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_Args: TypeAlias = "tuple[torch.Tensor, ...]"
_Named: TypeAlias = "dict[str, torch.Tensor]"
_Kept: TypeAlias = "tuple[_Projection, torch.Tensor, torch.Tensor | None]"
"""A projection with its weight and bias."""


def split_model(model: ServedModel, choice: LayoutChoice, nodes: int = 1) -> SplitModel:
    """The layers of a model that ranks split.

    Args:
        model: the model; all its ranks share each layer.
        choice: layout of prefills, or how it is chosen.
        nodes: machines that the ranks are on, as many on each.
    """
    config, ranks = model.config, model.tensor_parallel_size
    layer = SplitLayer(
        int(config.hidden_size),
        int(config.num_attention_heads),
        int(config.num_key_value_heads),
        model.shape.head_dim,
        ranks,
        model.dtype.itemsize,
        ranks // nodes,
        _has_biases(config),
    )
    return SplitModel(layer, len(model.windows), choice)


def _has_biases(config: PreTrainedConfig) -> bool:
    """Whether projections to queries, keys and values have biases."""
    return config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False))


def share_rows(
    ranks: TensorRanks, split: SplitModel, device: torch.device, timeout: timedelta
) -> TensorRanks:
    """Lets all ranks share rows. Collective; to be called before the model is loaded.

    Args:
        ranks: ranks that share each layer: all that there are.
        split: the layers.
        device: device of the rows.
        timeout: time limit of an exchange.
    """
    assert ranks.size == dist.get_world_size(), "ranks that share no layers"
    group = new_exchange_group(list(range(ranks.size)), timeout)
    assert group is not None, "every rank is in the group"
    transport = CollectiveTransport(group, device, members_only=True)
    exchange = SequenceExchange(transport, split.layer.ranks_per_node)
    return replace(ranks, sharing=SequenceSharing(split.layer, exchange, ranks))


class SequenceSharing:
    """A rank's part of the rows that ranks share.

    Args:
        layer: layers of the model.
        exchange: exchange between the ranks.
        ranks: the ranks.
    """

    def __init__(self, layer: SplitLayer, exchange: SequenceExchange, ranks: TensorRanks) -> None:
        self._layer, self._exchange, self._ranks = layer, exchange, ranks
        self._shared: SharedRows | None = None
        self._own, self._kept = slice(0, 0), torch.zeros(0, dtype=torch.int64)
        # Dtype of the rows between blocks.
        self._dtype = torch.float32
        # Whether the attention block that runs has the whole weights.
        self._is_whole = False

    @property
    def bytes_sent(self) -> int:
        """See `RowSharing`."""
        return sum(self._exchange.transport.bytes_sent.values())

    @contextlib.contextmanager
    def share(self, shared: SharedRows, kept: torch.Tensor) -> Iterator[slice]:
        """Shares the rows of a batch while it runs; yields those of this rank.

        Args:
            shared: how rows are shared.
            kept: rows whose logits are needed, int64 `[kept]`.
        """
        self._shared, self._kept = shared, kept
        end = int(shared.rows[: self._ranks.rank + 1].sum())
        self._own = slice(end - int(shared.rows[self._ranks.rank]), end)
        try:
            yield self._own
        finally:
            self._shared = None

    def scattered(self, run: LayerAttention) -> ScatteredRun:
        """Makes a run that is given this rank's rows of all heads."""
        return ScatteredRun(run, self)

    @property
    def completes(self) -> bool:
        """See `RowSharing`."""
        return self._shared is not None

    def complete(self, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `RowSharing`."""
        return parts.to(dtype) if self._is_whole else parts

    def embedded(self, values: torch.Tensor) -> torch.Tensor:
        """See `RowSharing`."""
        return self._exchange.reduce_scatter(values[0], self._rows, "embeddings")[None]

    @property
    def _rows(self) -> Int64s:
        assert self._shared is not None, "no batch has begun"
        return self._shared.rows

    def attach(self, model: PreTrainedModel) -> None:
        """See `RowSharing`."""
        for name, module in model.named_modules():
            last = name.split(".")[-1]
            if last == "self_attn":
                weights = _AttentionWeights(module, self._layer, self._exchange, self._ranks)
                before = partial(self._before_attention, weights)
                module.register_forward_pre_hook(before, with_kwargs=True)
                module.register_forward_hook(partial(self._after_attention, weights))
            elif last == "mlp":
                module.register_forward_pre_hook(self._before_mlp, with_kwargs=True)
                module.register_forward_hook(self._after_mlp)
        model.get_output_embeddings().register_forward_pre_hook(self._before_logits)

    def _before_attention(
        self, weights: _AttentionWeights, module: torch.nn.Module, args: _Args, kwargs: _Named
    ) -> tuple[_Args, _Named] | None:
        if self._shared is None:
            return None
        if self._shared.layout == "sp-tp":
            return self._gathered(args, kwargs)
        weights.gather()
        self._is_whole = True
        return None

    def _after_attention(
        self, weights: _AttentionWeights, module: torch.nn.Module, args: _Args, out: _Args
    ) -> _Args | None:
        if self._shared is None:
            return None
        if self._shared.layout == "sp-tp":
            return (self._summed(out[0]), *out[1:])
        self._is_whole = False
        weights.restore()
        return None

    def _before_mlp(
        self, module: torch.nn.Module, args: _Args, kwargs: _Named
    ) -> tuple[_Args, _Named] | None:
        return None if self._shared is None else self._gathered(args, kwargs)

    def _after_mlp(
        self, module: torch.nn.Module, args: _Args, out: torch.Tensor
    ) -> torch.Tensor | None:
        return None if self._shared is None else self._summed(out)

    def _gathered(self, args: _Args, kwargs: _Named) -> tuple[_Args, _Named]:
        """Arguments of a block with all rows."""
        if args:
            return (self._all_rows(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self._all_rows(kwargs["hidden_states"])}

    def _all_rows(self, own: torch.Tensor) -> torch.Tensor:
        self._dtype = own.dtype
        return self._exchange.all_gather(own[0], self._rows, "all-gather")[None]

    def _summed(self, parts: torch.Tensor) -> torch.Tensor:
        sums = self._exchange.reduce_scatter(parts[0], self._rows, "reduce-scatter")
        return sums.to(self._dtype)[None]

    def _before_logits(self, module: torch.nn.Module, args: _Args) -> _Args | None:
        """Gives all ranks, each of which has a part of the vocabulary, the rows that are kept."""
        if self._shared is None:
            return None
        (own,) = args
        mine = (self._kept >= self._own.start) & (self._kept < self._own.stop)
        rows = own.new_zeros(1, len(self._kept), own.shape[-1])
        rows[0, mine] = own[0, self._kept[mine] - self._own.start]
        return (self._ranks.add_up(rows),)

    def heads_of_all_rows(self, *heads: torch.Tensor) -> list[torch.Tensor]:
        """Sends heads of this rank's rows to the ranks that have these heads, which return those of
        all rows.

        Args:
            heads: queries, keys and values, `[own rows, heads, head_dim]`.

        Returns:
            This rank's heads of all rows, likewise.
        """
        ranks = self._ranks.size
        parts = [self._parts(each) for each in heads]
        messages = [torch.cat([of[rank] for of in parts], 1) for rank in range(ranks)]
        rows = self._layer.scattered_rows(self._rows)
        received = self._exchange.exchange(messages, rows, "heads")
        received[self._ranks.rank] = messages[self._ranks.rank]
        dim = self._layer.head_dim
        widths = [of[0].shape[1] for of in parts]
        whole = torch.split(torch.cat(received), widths, 1)
        return [each.reshape(len(each), -1, dim) for each in whole]

    def _parts(self, heads: torch.Tensor) -> list[torch.Tensor]:
        """What each rank has of heads, `[rows, heads * head_dim]`: several may have the same."""
        ranks = self._ranks.size
        parts = min(ranks, heads.shape[1])
        each = heads.flatten(1).chunk(parts, 1)
        return [each[rank * parts // ranks] for rank in range(ranks)]

    def rows_of_all_heads(self, out: torch.Tensor) -> torch.Tensor:
        """Sends outputs of this rank's heads to the ranks of their rows, `[rows, heads, head_dim]`;
        returns the outputs of all heads of its own rows."""
        messages = list(torch.split(out.flatten(1), self._rows.tolist()))
        rows = self._layer.scattered_rows(self._rows).T
        received = self._exchange.exchange(messages, rows, "outputs")
        received[self._ranks.rank] = messages[self._ranks.rank]
        return torch.cat(received, 1).view(len(received[0]), -1, self._layer.head_dim)


class _Projection(Protocol):
    """Weight `[outputs, inputs]` and bias `[outputs]` of a linear layer."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class _Block(Protocol):
    """A block of attention; some have `qkv_proj` in place of the first three projections."""

    config: PreTrainedConfig
    q_proj: _Projection
    k_proj: _Projection
    v_proj: _Projection
    o_proj: _Projection


class _AttentionWeights:
    """The weights of an attention block: a rank's slice, or whole ones that all ranks gather.

    Args:
        block: attention of a layer.
        layer: layers of the model.
        exchange: exchange between the ranks.
        ranks: the ranks.
    """

    def __init__(
        self, block: _Block, layer: SplitLayer, exchange: SequenceExchange, ranks: TensorRanks
    ) -> None:
        self._block, self._layer, self._exchange, self._rank = block, layer, exchange, ranks.rank
        self._slice, self._whole = block.config, copy.copy(block.config)
        self._whole.num_attention_heads = layer.heads
        self._whole.num_key_value_heads = layer.kv_heads
        bias = block.o_proj.bias
        # One rank alone adds it to its part of the sums.
        self._bias = None if bias is None else ranks.add_up(bias.detach().clone())
        self._kept: list[_Kept] = []

    def gather(self) -> None:
        """Gathers the whole weights into the block. Collective."""
        layer, block = self._layer, self._block
        q, *kv = self._slices()
        own = torch.cat([q.flatten(), block.o_proj.weight.t().flatten()])[None]
        gathered = self._exchange.all_gather(own, np.ones(layer.ranks, dtype=np.int64), "weights")
        whole_q = gathered[:, : q.numel()].reshape(-1, q.shape[1])
        whole_o = gathered[:, q.numel() :].reshape(-1, layer.hidden_size).t()
        whole_k, whole_v = self._gather_keys(torch.stack(kv))
        if hasattr(block, "qkv_proj"):
            self._replace(block.qkv_proj, torch.cat([whole_q, whole_k, whole_v]))
        else:
            self._replace(block.q_proj, whole_q)
            self._replace(block.k_proj, whole_k)
            self._replace(block.v_proj, whole_v)
        self._set(block.o_proj, whole_o, self._bias)
        self._configure(self._whole)

    def restore(self) -> None:
        """Puts the slice back."""
        for projection, weight, bias in self._kept:
            projection.weight, projection.bias = weight, bias
        self._kept.clear()
        self._configure(self._slice)

    def _slices(self) -> list[torch.Tensor]:
        """This rank's outputs of the projections to queries, keys and values: `[outputs, inputs]`,
        with biases as one more input."""
        layer, block = self._layer, self._block
        if hasattr(block, "qkv_proj"):
            widths = [layer.query_width, layer.key_width, layer.key_width]
            return list(torch.split(block.qkv_proj.weight, widths))
        rows = []
        for each in (block.q_proj, block.k_proj, block.v_proj):
            biases = [] if each.bias is None else [each.bias[:, None]]
            rows.append(torch.cat([each.weight, *biases], 1))
        return rows

    def _gather_keys(self, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All outputs of the projections to keys and values; `own` is `[2, outputs, inputs]`."""
        layer = self._layer
        received = self._exchange.exchange(
            [own[None]] * layer.ranks, layer.key_senders, "key weights"
        )
        received[self._rank] = own[None]
        # Of ranks that have the same heads one has sent them.
        keys, values = torch.cat(received).transpose(0, 1).flatten(1, 2)
        return keys, values

    def _replace(self, projection: _Projection, whole: torch.Tensor) -> None:
        inputs = self._layer.hidden_size
        self._set(projection, whole[:, :inputs], whole[:, inputs] if self._layer.biases else None)

    def _set(
        self, projection: _Projection, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self._kept.append((projection, projection.weight, projection.bias))
        projection.weight = torch.nn.Parameter(weight, requires_grad=False)
        projection.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    def _configure(self, config: PreTrainedConfig) -> None:
        """Sets the numbers of heads by which a block takes projections of all three apart."""
        self._block.config = config
        if hasattr(self._block, "num_key_value_heads"):
            self._block.num_key_value_heads = config.num_key_value_heads


@dataclass
class ScatteredRun:
    """A `LayerAttention` where a rank has its rows, with queries and keys of all heads.

    Attributes:
        run: run of the batch, over all rows and this rank's heads.
        sharing: sharing of the rows.
    """

    run: LayerAttention
    sharing: SequenceSharing

    @property
    def windows(self) -> Sequence[int | None]:
        """See `LayerAttention`."""
        return self.run.windows

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `LayerAttention.attend`."""
        q, k, v = self.sharing.heads_of_all_rows(q, k, v)
        return self.sharing.rows_of_all_heads(self.run.attend(layer, q, k, v, scale, sink))
