"""Sizes of the model, as the flags say them, and what follows from them."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass

import torch

from distca.cost.model_sizes import Latents
from distca.cost.volume import AttentionShape
from megatron_patches.versions import newer_flag


@dataclass(frozen=True)
class ExpertSizes:
    """Experts of the layers that have some.

    Attributes:
        number: routed experts of a layer.
        chosen: routed experts that a token uses.
        width: size of what routed experts take: that of the model, or of a latent.
        ffn_hidden_size: width of a routed expert.
        shared_ffn_hidden_size: width of the expert that all tokens use; 0: there is none.
        latent_size: size of the latent; 0: there is none.
        share: part of the layers that have experts.
    """

    number: int
    chosen: int
    width: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int
    latent_size: int
    share: float


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the model.

    Parameters are those of matrices, which are nearly all that a model has.

    Attributes:
        layers: transformer layers.
        hidden_size: width of the residual stream.
        heads: query heads.
        kv_heads: key-value heads.
        head_dim: elements of a key's head.
        v_head_dim: elements of a value's head.
        latents: latents of multi-latent attention; None: attention has none.
        ffn_hidden_size: width of a dense layer's MLP.
        mlp_matrices: matrices of an MLP.
        experts: experts; None: all layers are dense.
        vocabulary: rows of the vocabulary, padded.
        embeddings: matrices of the vocabulary: 2 where the output layer has its own.
        dtype_bytes: bytes of a weight.
    """

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    latents: Latents | None
    ffn_hidden_size: int
    mlp_matrices: int
    experts: ExpertSizes | None
    vocabulary: int
    embeddings: int
    dtype_bytes: int

    @classmethod
    def from_args(cls, args: Namespace) -> ModelSizes:
        """Makes the value of Megatron-LM's checked arguments.

        Before the tokenizer is built the vocabulary may be unknown; its padding is not.
        """
        head_dim = v_head_dim = args.kv_channels
        latents = experts = None
        if args.multi_latent_attention:
            head_dim, v_head_dim = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
            latents = Latents(
                args.kv_lora_rank, args.qk_pos_emb_head_dim, v_head_dim, args.q_lora_rank
            )
        if args.num_experts:
            latent_size = newer_flag(args, "moe_latent_size") or 0
            experts = ExpertSizes(
                args.num_experts,
                args.moe_router_topk,
                latent_size or args.hidden_size,
                args.moe_ffn_hidden_size,
                args.moe_shared_expert_intermediate_size or 0,
                latent_size,
                share_with_experts(args.moe_layer_freq, args.num_layers),
            )
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        padded = math.ceil((args.vocab_size or 1) / multiple) * multiple
        heads = args.num_attention_heads
        return cls(
            layers=args.num_layers,
            hidden_size=args.hidden_size,
            heads=heads,
            kv_heads=args.num_query_groups if args.group_query_attention else heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            latents=latents,
            ffn_hidden_size=args.ffn_hidden_size,
            mlp_matrices=3 if args.swiglu else 2,
            experts=experts,
            vocabulary=args.padded_vocab_size or padded,
            embeddings=2 if args.untie_embeddings_and_output_weights else 1,
            dtype_bytes=args.params_dtype.itemsize,
        )

    def attention_shape(self, ranks: int) -> AttentionShape:
        """Returns the attention heads of one rank, if `ranks` share them evenly."""
        return AttentionShape(
            heads=self.heads // ranks,
            kv_heads=self.kv_heads // ranks,
            head_dim=self.head_dim,
            dtype_bytes=self.dtype_bytes,
            v_head_dim=self.v_head_dim,
        )

    @property
    def attention_parameters(self) -> int:
        """Parameters of a layer's projections around core attention."""
        hidden, of_queries = self.hidden_size, self.heads * self.head_dim
        of_outputs = hidden * self.heads * self.v_head_dim
        if self.latents is None:
            return hidden * (of_queries + 2 * self.kv_heads * self.head_dim) + of_outputs
        latents, rotated = self.latents, self.latents.rotated_dim
        queries = hidden * of_queries
        if latents.q_rank is not None:
            queries = latents.q_rank * (hidden + of_queries)
        expanded = self.heads * (self.head_dim - rotated + self.v_head_dim)
        keys = hidden * (latents.kv_rank + rotated) + latents.kv_rank * expanded
        return queries + keys + of_outputs

    @property
    def expert_parameters(self) -> int:
        """Parameters of the routed experts of a layer that has some."""
        if self.experts is None:
            return 0
        experts = self.experts
        return experts.number * experts.width * self.mlp_matrices * experts.ffn_hidden_size

    def layer_parameters(self, active: bool = True) -> int:
        """Counts the parameters of the mean layer.

        Args:
            active: count those alone that a token uses, not all experts.
        """
        mlp: float = self.hidden_size * self.mlp_matrices * self.ffn_hidden_size
        if self.experts is not None:
            experts, routed = self.experts, self.expert_parameters
            if active:
                routed = routed // experts.number * experts.chosen
            of_all = self.mlp_matrices * experts.shared_ffn_hidden_size + 2 * experts.latent_size
            with_experts = routed + self.hidden_size * of_all
            mlp = experts.share * with_experts + (1 - experts.share) * mlp
        return round(self.attention_parameters + mlp)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        vocabulary = self.embeddings * self.vocabulary * self.hidden_size
        return self.layers * self.layer_parameters(active=False) + vocabulary


def share_with_experts(pattern: int | list[int], layers: int) -> float:
    """Returns the part of the layers that have experts.

    Args:
        pattern: `--moe-layer-freq`: the period of layers with experts, or a 1 for each such layer.
        layers: number of layers.
    """
    if isinstance(pattern, int):
        return len(range(0, layers, pattern)) / layers
    return sum(pattern) / len(pattern)


def checkpoint_bytes(args: Namespace) -> int:
    """Counts the bytes that a checkpoint of the run needs at least.

    Those of the weights and, unless `--no-save-optim`, of what the optimizer keeps for each.
    """
    sizes = ModelSizes.from_args(args)
    state = 0 if args.no_save_optim else optimizer_bytes(args)
    return sizes.parameters * (sizes.dtype_bytes + state)


def optimizer_bytes(args: Namespace) -> int:
    """Returns the least bytes that the optimizer keeps for each parameter.

    Those of Adam's two moments, and of the weight itself where it has 16 bits or the optimizer is
    distributed.
    """
    state = 0
    if args.optimizer == "adam":
        state = _itemsize(args.exp_avg_dtype) + _itemsize(args.exp_avg_sq_dtype)
    if args.params_dtype.itemsize < 4 or args.use_distributed_optimizer:
        state += _itemsize(args.main_params_dtype)
    return state


def _itemsize(dtype: torch.dtype | str) -> int:
    """Returns the bytes of a value of the optimizer's state; types of other names are of fp8."""
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 1
