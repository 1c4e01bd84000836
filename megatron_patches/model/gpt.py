"""The GPT model: Megatron's, with its core attention alone replaced."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from distca.attention import select_kernel_of_heads
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.distca import masks_from_args
from megatron_patches.flags.latent_attention import has_latents, head_sizes
from megatron_patches.flags.latent_rows import comm_shape
from megatron_patches.flags.parallel import ParallelSizes
from megatron_patches.model.core_attention import (
    DenseCoreAttention,
    DisaggregatedCoreAttention,
    PackedCoreAttention,
)
from megatron_patches.model.cuda_graphs import CudaGraphEngine, graph_layers
from megatron_patches.model.experts import share_auxiliary_losses
from megatron_patches.model.latent_attention import (
    average_gradients_of_query_norms,
    rotate_layers_by_position_ids,
)
from megatron_patches.model.norm import SequenceParallelNorm
from megatron_patches.model.ping_pong import run_layers_in_turn
from megatron_patches.model.rotary import rotate_by_position_ids
from megatron_patches.model.sent_latents import send_latents


def uses_dense_mask(config: DistcaConfig, args: Namespace) -> bool:
    """Returns whether a dense mask keeps documents apart in Megatron's own `DotProductAttention`.

    Plain Megatron's local attention (`--attention-backend local` or `unfused`) needs one. Its
    memory grows with the square of the tokens: the reference, for small runs.
    """
    backend = args.attention_backend.name
    return (
        not config.enabled and args.transformer_impl == "local" and backend in ("local", "unfused")
    )


def uses_own_attention(config: DistcaConfig, args: Namespace) -> bool:
    """Returns whether core attention is ours: with `--distca`, or packed on the local layer
    spec."""
    return config.enabled or (
        args.transformer_impl == "local" and not uses_dense_mask(config, args)
    )


def build_model(
    config: DistcaConfig,
    args: Namespace,
    transformer: TransformerConfig,
    vp_stage: int | None = None,
    **stage: Any,
) -> GPTModel:
    """Builds one pipeline stage (or virtual stage) of the GPT model that the arguments describe.

    Args:
        config: our flags.
        args: Megatron-LM's arguments.
        transformer: Megatron's configuration of the model.
        vp_stage: number of the virtual stage; None: there are none.
        stage: what `GPTModel` is told of the stage besides.
    """
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=_block_spec(config, args, transformer, vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        vp_stage=vp_stage,
        **stage,
    )
    return adapt_model(config, args, model)


def adapt_model(config: DistcaConfig, args: Namespace, model: GPTModel) -> GPTModel:
    """Makes a GPT model follow the token positions and nano-batches of our micro-batches."""
    if uses_own_attention(config, args) or uses_dense_mask(config, args):
        if has_latents(args):
            rotate_layers_by_position_ids(model)
            average_gradients_of_query_norms(model)
        elif args.position_embedding_type == "rope":
            rotate_by_position_ids(model)
    if config.enabled:
        for layer in model.decoder.layers:
            # Core attention keeps no more than inputs and outputs, so recomputing gains nothing.
            layer.self_attention.checkpoint_core_attention = False
        if args.num_experts:
            sizes = ParallelSizes.from_args(args)
            rows = args.seq_length * args.micro_batch_size // sizes.sequence_shards
            share_auxiliary_losses(model, rows, sizes.data)
        if comm_shape(config, args).kv_rank is not None:
            send_latents(model)
        if config.cuda_graphs:
            graph_layers(model, CudaGraphEngine())
        if config.ping_pong:
            run_layers_in_turn(model)
        if config.ping_pong or config.chain > 1:
            add_to_gradients_always(model)
    return model


def add_to_gradients_always(model: GPTModel) -> None:
    """Makes Transformer Engine's layers add to the weights' gradients in the first pass, too.

    In their first call they don't add fused weight gradients to `main_grad`, they replace it. Where
    that call's backward pass is not the first one, as ping's or that of a chain's first
    micro-batch, the others' would be lost. `main_grad` starts as zeros in any case.
    """
    for module in model.modules():
        if hasattr(module, "is_first_microbatch"):
            module.is_first_microbatch = False


def replace_core_attention(config: DistcaConfig, args: Namespace, layer_spec: ModuleSpec) -> None:
    """Puts the core attention that the arguments describe into a layer spec, and nothing else."""
    attention = layer_spec.submodules.self_attention.submodules
    if config.enabled:
        attention.core_attention = DisaggregatedCoreAttention
    elif uses_own_attention(config, args):
        # All layers share the kernel, which keeps the documents' starts on the GPU.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        kernel = select_kernel_of_heads(device, *head_sizes(args))
        attention.core_attention = ModuleSpec(
            PackedCoreAttention, params={"masks": masks_from_args(args), "kernel": kernel}
        )
    elif uses_dense_mask(config, args) and (
        has_latents(args) or len(masks_from_args(args).masks) > 1
    ):
        attention.core_attention = ModuleSpec(
            DenseCoreAttention, params={"masks": masks_from_args(args)}
        )


def _block_spec(
    config: DistcaConfig, args: Namespace, transformer: TransformerConfig, vp_stage: int | None
) -> Any:
    uses_te = args.transformer_impl == "transformer_engine"
    if args.num_experts:
        # Some layers may have experts, and others none.
        block = get_gpt_decoder_block_spec(
            transformer, uses_te, normalization=args.normalization, vp_stage=vp_stage
        )
        # Layers of a kind share their spec.
        for spec in {id(each): each for each in block.layer_specs}.values():
            _adapt_layer(config, args, spec)
        if not uses_te:
            block.layer_norm = SequenceParallelNorm
        return block
    if uses_te:
        spec = get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=args.qk_layernorm, multi_latent_attention=has_latents(args)
        )
        _adapt_layer(config, args, spec)
        return spec
    spec = get_gpt_layer_local_spec(
        qk_layernorm=args.qk_layernorm,
        multi_latent_attention=has_latents(args),
        normalization=args.normalization,
    )
    _adapt_layer(config, args, spec)
    layers = get_num_layers_to_build(transformer, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=SequenceParallelNorm)


def _adapt_layer(config: DistcaConfig, args: Namespace, spec: ModuleSpec) -> None:
    """Replaces core attention, and the local spec's norms.

    Those refuse sequence parallelism without apex.
    """
    replace_core_attention(config, args, spec)
    if args.transformer_impl == "transformer_engine":
        return
    spec.submodules.input_layernorm = SequenceParallelNorm
    spec.submodules.pre_mlp_layernorm = SequenceParallelNorm
    if args.qk_layernorm:
        attention = spec.submodules.self_attention.submodules
        attention.q_layernorm = SequenceParallelNorm
        of_keys = "kv_layernorm" if has_latents(args) else "k_layernorm"
        setattr(attention, of_keys, SequenceParallelNorm)
