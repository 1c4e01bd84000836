"""Core-attention modules for Megatron's layer specs.

megatron-core hands `PackedSeqParams` unchanged to the module at
`spec.submodules.self_attention.submodules.core_attention`. All but `DenseCoreAttention` read the
documents from that object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.dot_product_attention import DotProductAttention

from distca.attention.packed import packed_attention
from distca.plan import LayerMasks
from distca.runtime import CoreAttention, EventCursor, SentLatents, TimedKernel
from distca.runtime.shared_heads import SharedHeads
from megatron_patches.model.chained_keys import ChainPart, KeyRows
from megatron_patches.model.latent_attention import sum_shared_gradient
from megatron_patches.model.mla_latents import LatentSource
from megatron_patches.model.next_tokens import NextTokens
from megatron_patches.model.unknown_arguments import refuse_uncomputed


@dataclass(frozen=True)
class NanoBatch:
    """One of the two nano-batches of a micro-batch.

    Attributes:
        number: 0 for ping, 1 for pong.
        name: name in the timeline.
        lends_keys: whether this is ping and a document of pong begins in it, so that pong needs
            ping's keys and values.
        borrowed_rows: rows of ping with the keys of that document, int64, if this is pong; None:
            there is no such document.
    """

    number: int
    name: str
    lends_keys: bool = False
    borrowed_rows: torch.Tensor | None = None


@dataclass
class CoreAttentionRun:
    """The state of a micro-batch's core attention while it runs, shared by both nano-batches.

    Attributes:
        core_attention: runtime of the plans.
        cursor: this rank's part of the plans, and the next event.
        heads: ranks that share heads with this one, or None.
        lent_keys: keys and values of ping in the current layer, and what travels for them, for
            pong.
    """

    core_attention: CoreAttention
    cursor: EventCursor
    heads: SharedHeads | None = None
    lent_keys: KeyRows | None = None


@dataclass
class DocumentParams(PackedSeqParams):
    """`PackedSeqParams` with what core attention of the micro-batch needs.

    Attributes:
        documents_cu_seqlens: start of each document in this rank's tokens, int32
            `[documents + 1]` on the CPU; for attention on the rank itself.
        nano_batches: ping and pong, where the micro-batch runs as two nano-batches.
        nano_batch: nano-batch that this describes; None: a whole micro-batch.
        chain_part: what it borrows and lends in a chain of micro-batches; None: nothing.
        run: state of disaggregated core attention; None: attention on the rank itself.
        token_positions: position of each token in its document, int64 `[tokens]`, for layers that
            rotate keys themselves; None: they don't.
        next_tokens: columns for layers of multi-token prediction, or None.
    """

    documents_cu_seqlens: torch.Tensor | None = None
    nano_batches: tuple[DocumentParams, DocumentParams] | None = None
    nano_batch: NanoBatch | None = None
    chain_part: ChainPart | None = None
    run: CoreAttentionRun | None = None
    token_positions: torch.Tensor | None = None
    next_tokens: NextTokens | None = None

    @property
    def rows(self) -> int:
        """Number of this rank's tokens, which are one sequence to rotary embedding."""
        assert self.cu_seqlens_q_padded is not None, "each document is a sequence of its own"
        return int(self.max_seqlen_q)


class _AnyHeads(DotProductAttention):
    """megatron-core's core attention, also for the unlike heads of multi-latent attention."""

    takes_any_heads = True

    def __init__(
        self,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self._own_key_size = None
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels
            if config.transformer_impl == "local":
                self._own_key_size = config.qk_head_dim

    def _of_all_heads(self, key: torch.Tensor) -> torch.Tensor:
        """Returns the keys; ranks may share a part of them."""
        if self._own_key_size is None:
            return key
        return sum_shared_gradient(key, self._own_key_size, self.tp_group)


class _CoreAttentionModule(_AnyHeads):
    """A core-attention module as megatron-core's `SelfAttention` expects it.

    Its softmax may have a sink, which is megatron-core's own parameter.

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
        **kwargs: Any,
    ) -> None:
        super().__init__(
            config, layer_number, attn_mask_type, attention_type, attention_dropout, **kwargs
        )
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(
                f"attention dropout {dropout} is not supported here: set --attention-dropout 0"
            )
        if attention_type != "self":
            raise ValueError(f"{attention_type}-attention is not supported: only self-attention")
        if config.apply_query_key_layer_scaling:
            # It divides scores by the layer's number, and multiplies them by it again in float32,
            # so that they fit fp16. Kernels' scores are float32 from the first.
            self.softmax_scale *= self.layer_number
        if isinstance(self.softmax_offset, torch.nn.Parameter):
            # Megatron's norm of gradients takes a rank's sinks for copies of the first rank's.
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)


class DisaggregatedCoreAttention(_CoreAttentionModule):
    """Core attention computed by the attention servers of the micro-batch's plan.

    Attributes:
        latent_source: latents that travel instead of keys and values, or None.
    """

    latent_source: LatentSource | None = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: DocumentParams | None = None,
        attn_mask_type: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        """Computes core attention by the plan.

        Args:
            query: queries `[tokens, heads, head_dim]`.
            key: keys `[tokens, kv_heads, head_dim]`.
            value: values `[tokens, kv_heads, v_head_dim]`.
            attention_mask: ignored, since the plan has the mask.
            packed_seq_params: description of the micro-batch.
            attn_mask_type: ignored, likewise.
            **others: further arguments of megatron-core's core attention; all None.

        Returns:
            `[tokens, heads * v_head_dim]`.

        Raises:
            ValueError: another argument is given, or there is no plan.
        """
        refuse_uncomputed(others)
        run: CoreAttentionRun | None = getattr(packed_seq_params, "run", None)
        if packed_seq_params is None or run is None:
            raise ValueError(
                "disaggregated core attention was called without a plan: run the model by "
                "megatron_patches.pipeline"
            )
        source, nano_batch = self.latent_source, packed_seq_params.nano_batch
        tokens, heads, sink = query.shape[0], run.heads, self.softmax_offset
        key = self._of_all_heads(key)
        if heads is not None:
            query, key, value = heads.gather_rows(query, key, value)
            sink = None if sink is None else heads.of_rank(sink)
        rows: KeyRows = (key, value)
        if source is not None:
            rows = (*rows, source.take())
        rows = _lend_and_borrow(rows, packed_seq_params, run, self.layer_number)
        number, name = (0, None) if nano_batch is None else (nano_batch.number, nano_batch.name)
        labels = {"layer": self.layer_number, "nano_batch": name}
        key, value = rows[:2]
        latents = None
        if source is not None:
            latents = SentLatents(rows[2], source.rotated_dim, source.weight)
        out_THD = run.core_attention(
            query,
            key,
            value,
            run.cursor,
            self.softmax_scale,
            labels,
            number,
            sink,
            latents,
        )
        if heads is not None:
            out_THD = heads.gather_heads(out_THD)
        return out_THD.reshape(tokens, -1)


def _lend_and_borrow(
    rows: KeyRows, params: DocumentParams, run: CoreAttentionRun, layer: int
) -> KeyRows:
    """Lends a nano-batch's keys where later ones need them, and returns them with borrowed ones.

    Pong borrows ping's within autograd's graph. Micro-batches of a chain have a graph each, so
    `ChainPart` hands gradients over.

    Args:
        rows: own keys, values and, where these travel, their latents.
        params: description of the nano-batch, or of a whole micro-batch.
        run: state of the micro-batch.
        layer: number of the layer.
    """
    chain_part, nano_batch, own = params.chain_part, params.nano_batch, rows
    if chain_part is not None:
        own = chain_part.lend(layer, rows)
        rows = chain_part.extend(layer, own)
    if nano_batch is not None and nano_batch.borrowed_rows is not None:
        # Ping always runs a layer before pong.
        assert run.lent_keys is not None
        rows = tuple(
            torch.cat([before, lent.index_select(0, nano_batch.borrowed_rows)])
            for before, lent in zip(rows, run.lent_keys, strict=True)
        )
        run.lent_keys = None
    if nano_batch is not None and nano_batch.lends_keys:
        assert run.lent_keys is None
        run.lent_keys = own
    return rows


class PackedCoreAttention(_CoreAttentionModule):
    """Plain core attention over packed documents, for Megatron's local layer spec.

    Does what Transformer Engine does with `PackedSeqParams`, on any device that has a kernel.

    Attributes:
        times: times of its kernel.
    """

    def __init__(
        self, config: Any, *args: Any, masks: LayerMasks, kernel: TimedKernel, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.window_left = masks.of_layer(self.layer_number - 1).window_left
        self._kernel, self.times = kernel, kernel.times

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: DocumentParams | None = None,
        attn_mask_type: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        """Computes core attention; arguments are those of `DisaggregatedCoreAttention.forward`."""
        refuse_uncomputed(others)
        if packed_seq_params is None or packed_seq_params.documents_cu_seqlens is None:
            raise ValueError("packed core attention was called without documents")
        out_THD = packed_attention(
            query,
            self._of_all_heads(key),
            value,
            packed_seq_params.documents_cu_seqlens,
            self._kernel,
            window_left=self.window_left,
            softmax_scale=self.softmax_scale,
            sink_H=self.softmax_offset,
        )
        return out_THD.reshape(query.shape[0], -1)


class DenseCoreAttention(_AnyHeads):
    """Megatron's own core attention with a dense mask; layers may have different masks.

    Scores may have a soft cap.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *args: Any,
        masks: LayerMasks,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        self._masks, self._layer = masks, layer_number - 1
        if softcap is not None:
            softmax = self.scale_mask_softmax  # type: ignore[has-type]
            self.scale_mask_softmax = _CappedSoftmax(softmax, softcap)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Computes core attention with the mask of this layer, one of `[1, masks, ...]`."""
        (number,) = self._masks.select(range(len(self._masks.masks)), self._layer)
        own = attention_mask[:, number : number + 1]
        return super().forward(query, self._of_all_heads(key), value, own, *args, **kwargs)


class _CappedSoftmax(torch.nn.Module):
    """Megatron's masked softmax of scores that are bounded first."""

    def __init__(self, softmax: Any, softcap: float) -> None:
        super().__init__()
        self._softmax, self._softcap = softmax, softcap

    def forward(self, scores: torch.Tensor, *args: Any) -> Any:
        """Returns the weights; arguments are those of Megatron's softmax."""
        return self._softmax(torch.tanh(scores / self._softcap) * self._softcap, *args)
