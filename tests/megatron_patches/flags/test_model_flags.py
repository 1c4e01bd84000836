"""Every flag of a model is known: `--from-hf` holds it fast, or it leaves the model's function."""

from __future__ import annotations

from dataclasses import fields
from fnmatch import fnmatchcase

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_patches.flags.followed import PASSED_ON, what_becomes_of
from megatron_patches.loop.saved_arguments import FUNCTION_FLAGS, MODEL_FLAGS
from megatron_patches.parts import build_parser

HARMLESS = {
    "How GPUs compute and store the same": """
        apply_rope_fusion apply_query_key_layer_scaling attention_backend attention_softmax_in_fp32
        batch_invariant_mode bias_dropout_fusion clone_scatter_output_in_embedding
        cross_entropy_fusion_impl cross_entropy_loss_fusion cuda_graph_* deterministic_mode
        enable_cuda_graph external_cuda_graph flash_attention_version fused_residual_rmsnorm
        gradient_accumulation_fusion init_model_with_meta_device masked_softmax_fusion
        mlp_chunks_for_* persist_layer_norm recompute_* distribute_saved_activations
        use_cpu_initialization use_fused_weighted_squared_relu use_grouped_gemm_for_shared_expert
        use_transformer_engine_op_fuser moe_grouped_gemm moe_layer_recompute moe_permute_fusion*
        moe_router_fusion moe_single_grouped_* moe_paged_stash* *offload*
    """,
    "Precision": """
        bf16 fp16 fp8* fp4* first_last_layers_bf16 num_layers_at_*_in_bf16 fp32_residual_connection
        disable_bf16_reduced_precision_matmul moe_router_dtype moe_router_padding_for_*
    """,
    "Where it is computed, and what is sent": """
        account_for_*_in_pipeline_split *_parallel_size *_parallel_sizes cp_comm_type tp_comm_*
        *_num_weight_shards sequence_parallel pipeline_model_parallel_* hybrid_context_parallel
        max_seqlen_per_dp_cp_rank microbatch_group_size_per_vp_stage defer_embedding_wgrad_compute
        wgrad_deferral_limit delay_wgrad_compute ep_overlap_* overlap_* use_ring_exchange_p2p
        high_priority_a2a_comm_stream moe_token_dispatcher_type moe_shared_expert_overlap
        moe_enable_deepep moe_deepep_* moe_flex_dispatcher_* moe_hybridep_* moe_ncclep_*
    """,
    "Training: first weights, noise, losses beside the first, capacity, biases and clipping": """
        *init_method_std perform_initialization hidden_dropout attention_dropout
        calculate_per_token_loss mtp_loss_scaling_factor mtp_detach_heads moe_aux_loss_coeff
        moe_z_loss_coeff moe_router_load_balancing_type moe_router_bias_update_rate
        moe_router_quantile_balancing_ema moe_input_jitter_eps moe_expert_*capacity_factor
        moe_pad_expert_input_to_capacity moe_token_drop_policy moe_enable_routing_replay qk_clip*
    """,
    "Generation": """
        flash_decode inference_* moe_pad_experts_for_cuda_graph_inference symmetric_ar_type
        nccl_all_reduce_for_prefill
    """,
    "Messages": "barrier_with_L1_time config_logger_dir log_* moe_per_layer_logging test_mode",
    "Refines kinds of attention and layers that are refused": """
        dsa_* linear_* mamba_* kitchen_attention_backend is_hybrid_model mtp_hybrid_override_pattern
        mtp_standalone use_mamba_mem_eff_path
    """,
    "Others say it": """
        encoder_num_layers group_query_attention use_rotary_position_embeddings
        max_position_embeddings make_vocab_size_divisible_by
    """,
}


def flags_of_the_model() -> dict[str, str]:
    """The flags that reach Megatron's model, by attribute."""
    found = {name.name for name in fields(MLATransformerConfig)}
    sizes = {f"--{name}" for name in PASSED_ON[next(iter(PASSED_ON))].split()}
    return {
        action.dest: action.option_strings[0]
        for action in build_parser()._actions
        if action.option_strings and (action.dest in found or {*action.option_strings} & sizes)
    }


def test_a_flag_of_the_model_is_held_fast_refused_or_harmless() -> None:
    patterns = [each for names in HARMLESS.values() for each in names.split()]
    unknown = []
    for name, option in flags_of_the_model().items():
        fixed = name in MODEL_FLAGS or name in FUNCTION_FLAGS
        harmless = any(fnmatchcase(name, each) for each in patterns)
        refused = (what_becomes_of(option) or ("",))[0] == "refused"
        if not (fixed or harmless or refused):
            unknown.append(option)
        assert not (fixed and harmless), option
    assert not unknown


@pytest.mark.parametrize("name", ["use_mup", "num_layers", "add_position_embedding", "spec"])
def test_flags_of_the_model_are_found(name: str) -> None:
    assert name in flags_of_the_model()
