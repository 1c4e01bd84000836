"""Configuration objects of megatron-core, made of the flags."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_patches.flags.batch_sizes import samples_of_splits
from megatron_patches.flags.latent_attention import has_latents


def _fields_from(args: Namespace, kind: type) -> dict[str, Any]:
    """Returns the fields of a configuration class that flags of the same name set."""
    return {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(kind)
        if getattr(args, field.name, None) is not None
    }


def transformer_config(args: Namespace) -> TransformerConfig:
    """Makes the model's configuration."""
    kind = MLATransformerConfig if has_latents(args) else TransformerConfig
    values = _fields_from(args, kind)
    if has_latents(args):
        # Without a latent of queries, which is the class's default.
        values["q_lora_rank"] = args.q_lora_rank
    # Kept out: attention backends are Transformer Engine's, and Megatron's local softmax would drop
    # the document mask if it knew of a window; ours is in the mask or the kernel.
    values.pop("attention_backend", None)
    if args.transformer_impl == "local":
        values.pop("window_size", None)
    interleaved = args.virtual_pipeline_model_parallel_size is not None
    values |= {
        "layernorm_epsilon": args.norm_epsilon,
        "pipeline_dtype": args.params_dtype,
        "bias_activation_fusion": args.bias_swiglu_fusion and args.swiglu,
        "masked_softmax_fusion": False,
        "attention_softmax_in_fp32": True,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "calculate_per_token_loss": True,
        # An output's memory is freed once its send is issued. A GPU's stream still orders the two;
        # gloo may read it later, and interleaved stages would then train on something else.
        "deallocate_pipeline_outputs": torch.cuda.is_available(),
        # With batched messages the interleaved schedule trains silently wrong over gloo.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # It waits for the whole device after each message, for a fault that torch has mended.
        "batch_p2p_sync": False,
    }
    if args.num_experts:
        values["num_moe_experts"] = args.num_experts
    if args.swiglu:
        values |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    return kind(**values)


def ddp_config(args: Namespace) -> DistributedDataParallelConfig:
    """Makes data parallelism's configuration."""
    return DistributedDataParallelConfig(
        **_fields_from(args, DistributedDataParallelConfig)
        | {
            "grad_reduce_in_fp32": args.accumulate_allreduce_grads_in_fp32,
            "check_for_nan_in_grad": args.check_for_nan_in_loss_and_grad,
        }
    )


def optimizer_config(args: Namespace) -> OptimizerConfig:
    """Makes the optimizer's configuration."""
    return OptimizerConfig(**_fields_from(args, OptimizerConfig))


def parameter_scheduler(args: Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Makes the schedule of learning rate and weight decay, in samples as in Megatron-LM."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_samples,
        lr_decay_steps=args.lr_decay_samples,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=samples_of_splits(args)[0],
        wd_incr_style="constant",
    )
