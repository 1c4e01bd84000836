"""Core-attention modules for Megatron's layer specs.

Both get their documents through `PackedSeqParams`: megatron-core hands that object unchanged to
the module at `spec.submodules.self_attention.submodules.core_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from distca.attention import Kernel
from distca.attention.packed import packed_attention
from distca.runtime import CoreAttention, ExchangeSlot


@dataclass
class DocumentParams(PackedSeqParams):
    """`PackedSeqParams` that say how this micro-batch's core attention is computed.

    Attributes:
        documents_cu_seqlens: int32 `[documents + 1]` on the CPU, where each document starts in
            this rank's tokens; for attention on the rank itself.
        slot: this rank's part of the plan; for disaggregated attention.
        core_attention: what runs it.
        halves: ping and pong, with a slot each, where the micro-batch is run as two nano-batches.
        nano_batch: its name, where it is one of two.
        pause: called where the other half can go on.
        before: of pong, if a document of it begins in ping: ping.
        earlier_rows: the rows of ping with the keys of that document, int64.
        lends_keys: whether this is ping and pong needs its keys.
        keys: of ping, its keys and values in the layer that runs, for pong.
    """

    documents_cu_seqlens: torch.Tensor | None = None
    slot: ExchangeSlot | None = None
    core_attention: CoreAttention | None = None
    halves: tuple[DocumentParams, DocumentParams] | None = None
    nano_batch: str | None = None
    pause: Callable[[], None] | None = None
    before: DocumentParams | None = None
    earlier_rows: torch.Tensor | None = None
    lends_keys: bool = False
    keys: tuple[torch.Tensor, torch.Tensor] | None = None


class _CoreAttentionModule(MegatronModule):
    """What megatron-core's `SelfAttention` expects of its core attention.

    Raises:
        ValueError: attention dropout or another attention type than causal self-attention.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(
                f"attention dropout {dropout} is not supported here: set --attention-dropout 0"
            )
        if attention_type != "self":
            raise ValueError(f"{attention_type}-attention is not supported: only self-attention")
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)


class DisaggregatedCoreAttention(_CoreAttentionModule):
    """Core attention computed by the attention servers of the micro-batch's plan."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: DocumentParams | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`query` `[tokens, heads, head_dim]`, `key`, `value` `[tokens, kv_heads, head_dim]`.

        Returns `[tokens, heads * head_dim]`.
        """
        params = packed_seq_params
        slot: ExchangeSlot | None = getattr(params, "slot", None)
        if params is None or slot is None:
            raise ValueError(
                "disaggregated core attention was called without a plan: run the model by "
                "megatron_patches.pipeline"
            )
        assert params.core_attention is not None
        own_keys = (key, value)
        if params.before is not None:
            # Ping is always ahead of pong.
            assert params.before.keys is not None
            assert params.earlier_rows is not None
            key, value = (
                torch.cat([own, earlier.index_select(0, params.earlier_rows)])
                for own, earlier in zip(own_keys, params.before.keys, strict=True)
            )
            params.before.keys = None
        params.keys = own_keys if params.lends_keys else None
        labels = {"layer": self.layer_number, "nano_batch": params.nano_batch}
        out_THD = params.core_attention(
            query, key, value, slot, self.softmax_scale, labels, params.pause
        )
        return out_THD.reshape(query.shape[0], -1)


class PackedCoreAttention(_CoreAttentionModule):
    """Plain core attention over packed documents, for Megatron's local layer spec.

    It is what Transformer Engine does with `PackedSeqParams`, on any device that has a kernel.
    """

    def __init__(
        self, config: Any, *args: Any, window_left: int | None, kernel: Kernel, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.window_left = window_left
        self._kernel = kernel

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: DocumentParams | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Shapes as in `DisaggregatedCoreAttention.forward`."""
        if packed_seq_params is None or packed_seq_params.documents_cu_seqlens is None:
            raise ValueError("packed core attention was called without documents")
        out_THD = packed_attention(
            query,
            key,
            value,
            packed_seq_params.documents_cu_seqlens,
            self._kernel,
            window_left=self.window_left,
            softmax_scale=self.softmax_scale,
        )
        return out_THD.reshape(query.shape[0], -1)
