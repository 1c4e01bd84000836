"""The GPT model: Megatron's, with its core attention alone replaced."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from distca.attention import select_kernel_of_heads
from distca.plan import LayerMasks
from distca.runtime import AttentionTimes, TimedKernel
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.distca import masks_from_args
from megatron_patches.flags.latent_rows import comm_shape
from megatron_patches.flags.parallel import ParallelSizes
from megatron_patches.flags.sizes import ModelSizes
from megatron_patches.model.core_attention import (
    DenseCoreAttention,
    DisaggregatedCoreAttention,
    PackedCoreAttention,
)
from megatron_patches.model.cuda_graphs import CudaGraphEngine, graph_layers
from megatron_patches.model.experts import let_experts_add_biases, share_auxiliary_losses
from megatron_patches.model.features import Features, add_features, features_of
from megatron_patches.model.given_layers import block_of, given_spec, replace_core_attention
from megatron_patches.model.latent_attention import (
    UnnormedQueries,
    average_gradients_of_query_norms,
    rotate_layers_by_position_ids,
)
from megatron_patches.model.layers import transformer_layers
from megatron_patches.model.mla_latents import send_latents
from megatron_patches.model.norms import SequenceParallelNorm
from megatron_patches.model.ping_pong import run_layers_in_turn
from megatron_patches.model.rotary import rotate_by_position_ids
from megatron_patches.model.token_prediction import predict_over_ranks

CoreAttentionKind = Literal["disaggregated", "packed", "dense mask", "megatron"]


def core_attention_kind(
    enabled: bool, transformer_impl: str, attention_backend: str
) -> CoreAttentionKind:
    """Returns which core attention the layers have.

    Args:
        enabled: whether core attention is disaggregated (`--distca`).
        transformer_impl: value of `--transformer-impl`.
        attention_backend: value of `--attention-backend`.

    Returns:
        disaggregated: ours, on attention servers (`--distca`); packed: ours, on the rank itself,
        for the local layer spec; dense mask: Megatron's own `DotProductAttention`, in which a dense
        mask keeps documents apart (`--attention-backend local` or `unfused` on that spec), whose
        memory grows with the square of the tokens: the reference, for small runs; megatron: that of
        Transformer Engine's layers.
    """
    if enabled:
        return "disaggregated"
    if transformer_impl != "local":
        return "megatron"
    return "dense mask" if attention_backend in ("local", "unfused") else "packed"


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
        vp_stage: number of the virtual stage, or None.
        stage: further arguments of `GPTModel` about the stage.
    """
    sizes = ModelSizes.from_args(args)
    kind = core_attention_kind(config.enabled, args.transformer_impl, args.attention_backend.name)
    layers = _block_spec(
        transformer,
        args.transformer_impl,
        vp_stage,
        _core_attention(
            kind,
            masks_from_args(args),
            (sizes.head_dim, sizes.v_head_dim),
            transformer.multi_latent_attention,
            features_of(args),
        ),
        args.spec,
    )
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=layers,
        mtp_block_spec=_prediction_spec(transformer, args.transformer_impl, vp_stage, layers),
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
    backend, features = args.attention_backend.name, features_of(args)
    if core_attention_kind(config.enabled, args.transformer_impl, backend) != "megatron":
        if model.config.multi_latent_attention:
            rotate_layers_by_position_ids(model)
            average_gradients_of_query_norms(model)
        elif args.position_embedding_type in ("rope", "yarn"):
            local = None if features is None else features.local_rotary_base
            rotate_by_position_ids(model, local)
    if features is not None:
        add_features(model, features, masks_from_args(args))
    if args.transformer_impl == "local":
        let_experts_add_biases(model)
    if config.enabled:
        for layer in transformer_layers(model):
            # Core attention keeps no more than inputs and outputs, so recomputing gains nothing.
            layer.self_attention.checkpoint_core_attention = False
        if args.num_experts:
            ranks = ParallelSizes.from_args(args)
            rows = args.seq_length * args.micro_batch_size // ranks.sequence_shards
            share_auxiliary_losses(model, rows, ranks.data)
        if comm_shape(config, args).kv_rank is not None:
            send_latents(model)
        if config.cuda_graphs:
            graph_layers(model, CudaGraphEngine())
        predict_over_ranks(model)
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


def _core_attention(
    kind: CoreAttentionKind,
    masks: LayerMasks,
    heads: tuple[int, int],
    latents: bool,
    features: Features | None,
) -> Any | None:
    """Returns the core attention that replaces a layer spec's own; None: that stays.

    Args:
        kind: core attention of the layers.
        masks: masks of the layers.
        heads: elements of a key's head, and of a value's.
        latents: whether attention is multi-latent.
        features: what the layers' spec asks for, or None.
    """
    cap = None if features is None else features.score_cap
    if kind == "disaggregated":
        return DisaggregatedCoreAttention
    if kind == "packed":
        # All layers share the kernel, which keeps the documents' starts on the GPU.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        times = AttentionTimes(torch.device(device))
        kernel = TimedKernel(select_kernel_of_heads(device, *heads, softcap=cap), times)
        return ModuleSpec(PackedCoreAttention, params={"masks": masks, "kernel": kernel})
    if kind == "dense mask" and (latents or len(masks.masks) > 1 or features is not None):
        return ModuleSpec(DenseCoreAttention, params={"masks": masks, "softcap": cap})
    return None


def _block_spec(
    transformer: TransformerConfig,
    layers: str,
    vp_stage: int | None,
    core_attention: Any | None,
    given: Sequence[str] | None,
) -> Any:
    """Returns the spec of a stage's layers.

    Args:
        transformer: Megatron's configuration of the model.
        layers: local or transformer_engine.
        vp_stage: number of the virtual stage, or None.
        core_attention: core attention of the layers; None: the spec's own.
        given: value of `--spec`; None: the layers are Megatron's.
    """
    uses_te, latents = layers == "transformer_engine", transformer.multi_latent_attention
    if given is not None:
        found = given_spec(given)
        if core_attention is not None:
            replace_core_attention(found, core_attention)
        norm = LayerNormImpl if uses_te else SequenceParallelNorm
        return block_of(found, get_num_layers_to_build(transformer, vp_stage), norm)
    if transformer.num_moe_experts:
        # Some layers may have experts, and others none.
        block = get_gpt_decoder_block_spec(
            transformer, uses_te, normalization=transformer.normalization, vp_stage=vp_stage
        )
        # Layers of a kind share their spec.
        for spec in {id(each): each for each in block.layer_specs}.values():
            _adapt_layer(spec, transformer, uses_te, core_attention)
        if not uses_te:
            block.layer_norm = SequenceParallelNorm
        return block
    if uses_te:
        spec = get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=transformer.qk_layernorm, multi_latent_attention=latents
        )
        _adapt_layer(spec, transformer, uses_te, core_attention)
        return spec
    spec = get_gpt_layer_local_spec(
        qk_layernorm=transformer.qk_layernorm,
        multi_latent_attention=latents,
        normalization=transformer.normalization,
    )
    _adapt_layer(spec, transformer, uses_te, core_attention)
    number = get_num_layers_to_build(transformer, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * number, layer_norm=SequenceParallelNorm)


def _prediction_spec(
    transformer: TransformerConfig, layers: str, vp_stage: int | None, block: Any
) -> Any | None:
    """Returns the spec of a stage's layers of multi-token prediction; None: it has none.

    Args:
        transformer: Megatron's configuration of the model.
        layers: local or transformer_engine.
        vp_stage: number of the virtual stage, or None.
        block: spec of the stage's other layers; these are like the last of them.
    """
    if not transformer.mtp_num_layers:
        return None
    uses_te = layers == "transformer_engine"
    found = get_gpt_mtp_block_spec(transformer, block, uses_te, vp_stage)
    for spec in () if found is None or uses_te else found.layer_specs:
        for name in ("enorm", "hnorm", "layer_norm"):
            setattr(spec.submodules, name, SequenceParallelNorm)
    return found


def _adapt_layer(
    spec: ModuleSpec, transformer: TransformerConfig, uses_te: bool, core_attention: Any | None
) -> None:
    """Replaces core attention, and the local spec's norms.

    Those refuse sequence parallelism without apex.
    """
    attention = spec.submodules.self_attention.submodules
    has_latents = transformer.multi_latent_attention
    queries_have = has_latents and transformer.q_lora_rank is not None
    if has_latents and not queries_have and transformer.qk_layernorm:
        spec.submodules.self_attention.module = UnnormedQueries
    if core_attention is not None:
        attention.core_attention = core_attention
    if uses_te:
        return
    spec.submodules.input_layernorm = SequenceParallelNorm
    spec.submodules.pre_mlp_layernorm = SequenceParallelNorm
    if transformer.qk_layernorm:
        normed = queries_have or not has_latents
        attention.q_layernorm = SequenceParallelNorm if normed else IdentityOp
        setattr(attention, "kv_layernorm" if has_latents else "k_layernorm", SequenceParallelNorm)
