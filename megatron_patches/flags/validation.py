"""Checks of the `--distca` flags, against each other and against Megatron's."""

from __future__ import annotations

import importlib.util
from argparse import Namespace

import torch

from distca.attention.choice import check_head_dim
from distca.plan import BLOCK
from megatron_patches.flags.batch_sizes import BatchSizes
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.data_checks import validate_data
from megatron_patches.flags.distca import masks_from_args, masks_of_a_chunk
from megatron_patches.flags.latent_rows import comm_shape
from megatron_patches.flags.parallel import ParallelSizes
from megatron_patches.flags.prediction import validate_prediction
from megatron_patches.flags.refused import (
    REFUSED,
    REFUSED_BY_OUR_ATTENTION,
    REFUSED_WITH_DISTCA,
    refuse,
)
from megatron_patches.flags.server_checks import validate_servers
from megatron_patches.flags.sizes import ModelSizes

FP8_RECIPES = ("tensorwise", "blockwise", "mxfp8")
"""Values of `--fp8-recipe` whose scales are of a tensor alone, so that nano-batches share none."""
FP8_ROWS = 32
"""Rows that fp8 layers take a multiple of: 16, and 32 with mxfp8."""

BALANCED_BY_PASS = ("global_aux_loss", "quantile_balancing")
"""Values of `--moe-router-load-balancing-type` by which a router adds up over its passes."""


def validate(config: DistcaConfig, args: Namespace) -> None:
    """Checks the arguments before any work starts, with the same result on every rank.

    Args:
        config: our flags.
        args: Megatron-LM's arguments with its derived values (`data_parallel_size`, ...).

    Raises:
        ValueError: some flags do not go together; the message says what to do.
    """
    if args.dataloader_type == "single":
        # It asks for what our iterators do, which Megatron-LM's loop calls external.
        args.dataloader_type = "external"
    refuse(REFUSED, args)
    if config.enabled or args.transformer_impl == "local":
        refuse(REFUSED_BY_OUR_ATTENTION, args)
    if config.enabled:
        refuse(REFUSED_WITH_DISTCA, args)
    _validate_latent_attention(args)
    if args.multi_latent_attention and (config.enabled or args.transformer_impl == "local"):
        # The fused kernel numbers tokens by itself.
        args.apply_rope_fusion = False
    _validate_rotation(args)
    BatchSizes.from_args(args).check_growth(args.train_samples)
    _validate_optimizer(args)
    validate_prediction(config, args)
    validate_data(config, args)
    masks_from_args(args)
    if (config.enabled or args.transformer_impl == "local") and args.seq_length % BLOCK:
        raise ValueError(
            f"--seq-length {args.seq_length} is not a multiple of the attention block of {BLOCK}: "
            f"use {max(args.seq_length // BLOCK, 1) * BLOCK}"
        )
    if not config.enabled:
        return
    validate_servers(config, args)
    _validate_scheduling(config, args)
    _validate_pipeline(config, args)
    _validate_chain(config, args)
    _validate_ping_pong(config, args)
    _validate_gradient_fusion(config, args)
    _validate_transport(config)
    _validate_cuda_graphs(config, args)
    _validate_sm_margin(config)
    _validate_experts(config, args)
    comm_shape(config, args)
    if args.attention_dropout:
        raise ValueError(
            f"--distca cannot apply attention dropout: set --attention-dropout 0 "
            f"(it is {args.attention_dropout})"
        )
    if args.position_embedding_type not in ("rope", "yarn", "none"):
        raise ValueError(
            f"--distca needs --position-embedding-type rope (or yarn, or none), not "
            f"{args.position_embedding_type}: documents are longer than --seq-length"
        )
    if torch.cuda.is_available():
        if args.params_dtype == torch.float32:
            raise ValueError("--distca on GPUs needs --bf16: FlashAttention has no float32")
        sizes = ModelSizes.from_args(args)
        check_head_dim(max(sizes.head_dim, sizes.v_head_dim))


def _validate_latent_attention(args: Namespace) -> None:
    """Checks the flags of multi-latent attention against each other."""
    if not args.multi_latent_attention:
        if args.rope_type == "yarn":
            raise ValueError("--rope-type yarn needs --multi-latent-attention")
        return
    if args.group_query_attention:
        raise ValueError(
            "--multi-latent-attention has keys and values for each head: remove "
            "--group-query-attention"
        )
    if args.qk_pos_emb_head_dim % 2:
        raise ValueError(
            f"--qk-pos-emb-head-dim {args.qk_pos_emb_head_dim}: rotary embedding turns pairs, so "
            "give an even number"
        )
    parallel = args.tensor_model_parallel_size
    latents = {"kv": args.kv_lora_rank + args.qk_pos_emb_head_dim, "q": args.q_lora_rank or 0}
    for kind, size in latents.items():
        if args.transformer_impl == "local" and size % parallel:
            raise ValueError(
                f"--tensor-model-parallel-size {parallel} does not divide the latent of "
                f"--{kind}-lora-rank ({size} in all): use a size that does"
            )
    if args.transformer_impl != "local" and parallel > 1 and not args.sequence_parallel:
        raise ValueError(
            "--multi-latent-attention with --tensor-model-parallel-size needs --sequence-parallel: "
            "without it Transformer Engine's layers do not sum gradients of the keys' shared part"
        )


def _validate_rotation(args: Namespace) -> None:
    """Checks that a rotary embedding has whole pairs of elements to turn."""
    if args.position_embedding_type not in ("rope", "yarn") or args.multi_latent_attention:
        return
    turned = int(args.kv_channels * args.rotary_percent)
    if turned % 2 or not turned:
        raise ValueError(
            f"--kv-channels {args.kv_channels} with --rotary-percent {args.rotary_percent} turns "
            f"{turned} elements of a head by their position, in pairs: give an even number above 0"
        )


def _validate_optimizer(args: Namespace) -> None:
    """Checks that Megatron's distributed optimizer knows the optimizer's state."""
    sharded = args.use_distributed_optimizer and not args.optimizer_cpu_offload
    if args.optimizer == "sgd" and sharded:
        raise ValueError(
            "--optimizer sgd has a state that Megatron-LM's distributed optimizer does not know: "
            "remove --use-distributed-optimizer"
        )


def _validate_transport(config: DistcaConfig) -> None:
    """Checks the transport against the devices; missing packages show when it is made."""
    transport, on_gpus = config.transport.kind, torch.cuda.is_available()
    if transport == "shm" and on_gpus:
        raise ValueError(
            "--distca-transport shm moves rows between CPUs, but this run is on GPUs: give auto, "
            "nvshmem or collective"
        )
    if transport == "nvshmem" and not on_gpus:
        raise ValueError(
            "--distca-transport nvshmem needs GPUs, but torch sees none: give auto, shm or "
            "collective"
        )


def _validate_pipeline(config: DistcaConfig, args: Namespace) -> None:
    """Checks that the pipeline can run in ticks."""
    stages = args.pipeline_model_parallel_size
    chunks = stages * (args.virtual_pipeline_model_parallel_size or 1)
    if args.num_layers % chunks:
        raise ValueError(
            f"--distca needs equally many layers on all {chunks} pipeline stages (virtual ones "
            f"included), so that they call core attention together: --num-layers is "
            f"{args.num_layers}; use a multiple of {chunks}"
        )
    masks_of_a_chunk(args)
    if stages > 1 and config.backward == "keep":
        raise ValueError(
            "--distca-backward keep needs --pipeline-model-parallel-size 1: on the way back "
            "micro-batches meet others than on the way out, so their inputs are sent again"
        )
    in_flight = config.scheduling.max_in_flight
    if stages == 1 and in_flight is not None:
        raise ValueError("--distca-max-in-flight bounds a pipeline's stages, but there is only one")
    iterations = args.train_iters or BatchSizes.from_args(args).iterations(args.train_samples)
    trace = config.trace
    if trace is not None and not 1 <= trace.first <= trace.last <= iterations:
        raise ValueError(
            f"--distca-trace-iterations {trace.first} {trace.last} must lie in 1 .. {iterations}, "
            "the iterations of the run"
        )


def _validate_chain(config: DistcaConfig, args: Namespace) -> None:
    """Checks that micro-batches can share documents, and go back in the opposite order."""
    chain = config.chain
    if chain == 1:
        return
    flag, bound = f"--distca-chain {chain}", config.scheduling.max_in_flight
    if bound is not None and bound < chain:
        raise ValueError(
            f"{flag} keeps the activations of {chain} micro-batches: raise --distca-max-in-flight "
            f"{bound} to at least that"
        )
    if config.backward == "keep":
        raise ValueError(
            f"{flag} needs --distca-backward resend: servers' memory has room for the inputs of "
            "one micro-batch"
        )
    if config.cuda_graphs:
        raise ValueError(f"{flag} is not covered by --distca-cuda-graphs: remove one of the two")
    for name in ("fp8", "fp4"):
        if vars(args)[name]:
            raise ValueError(
                f"{flag} is not covered by --{name}, whose first micro-batch must go back first: "
                "remove one of the two"
            )


def _validate_ping_pong(config: DistcaConfig, args: Namespace) -> None:
    """Checks that micro-batches can run as two nano-batches."""
    if not config.ping_pong:
        return
    if importlib.util.find_spec("greenlet") is None:
        raise ValueError(
            "--distca-ping-pong needs the package greenlet: pip install greenlet, or give "
            "--no-distca-ping-pong"
        )
    shards = args.tensor_model_parallel_size if args.sequence_parallel else 1
    tokens = args.seq_length * args.micro_batch_size
    if tokens % (2 * shards):
        raise ValueError(
            f"--distca-ping-pong needs --seq-length {args.seq_length} to be a multiple of twice "
            f"--tensor-model-parallel-size {shards}"
        )
    for kind in _balanced_by(args):
        if kind in BALANCED_BY_PASS:
            raise ValueError(
                f"--distca-ping-pong does not cover --moe-router-load-balancing-type {kind}: it "
                "counts passes of a router, and nano-batches make two passes of one. Give "
                "--no-distca-ping-pong"
            )
    _validate_fp8(config, args, tokens // (2 * shards))
    for flag in ("fp4", "tp_comm_overlap"):
        if vars(args)[flag]:
            raise ValueError(
                f"--distca-ping-pong does not cover --{flag.replace('_', '-')}: give "
                "--no-distca-ping-pong"
            )
    recomputed = args.recompute_modules or ()
    modules = ["mla_up_proj"] if args.multi_latent_attention else []
    if args.transformer_impl == "local":
        modules.append("layernorm")
    for module in modules:
        if args.recompute_granularity == "selective" and module in recomputed:
            raise ValueError(
                f"--distca-ping-pong does not cover --recompute-modules {module} with "
                f"--transformer-impl {args.transformer_impl}, whose layers remember one "
                f"recomputation each: leave {module} out, or give --no-distca-ping-pong"
            )


def _validate_fp8(config: DistcaConfig, args: Namespace, rows: int) -> None:
    """Checks that two nano-batches can be in fp8 layers at once.

    Args:
        config: our flags.
        args: Megatron-LM's arguments.
        rows: rows of a nano-batch on a rank.
    """
    if not args.fp8:
        return
    if args.fp8_recipe not in FP8_RECIPES:
        raise ValueError(
            f"--distca-ping-pong does not cover --fp8-recipe {args.fp8_recipe}, whose scales "
            f"follow the values of earlier passes: choose one of {', '.join(FP8_RECIPES)}, or "
            "give --no-distca-ping-pong"
        )
    if rows % FP8_ROWS:
        raise ValueError(
            f"--distca-ping-pong with --fp8-format needs a multiple of {FP8_ROWS} rows in a rank's "
            f"half of a micro-batch, not {rows}: raise --seq-length or --micro-batch-size"
        )
    if (uneven := config.shares_tokens_unevenly) is not None:
        flag, remedy = uneven
        raise ValueError(
            f"{flag} gives ranks different numbers of tokens, which fp8 layers may not take: "
            f"{remedy}"
        )


def _validate_gradient_fusion(config: DistcaConfig, args: Namespace) -> None:
    """Checks that layers with weights in fp8 add to their gradients in every pass.

    Those that Megatron tells which micro-batch is the first replace gradients in its backward pass,
    which here is not the first one.
    """
    if not (args.gradient_accumulation_fusion and (config.ping_pong or config.chain > 1)):
        return
    for name in ("fp8", "te_precision_config_file"):
        if vars(args)[name]:
            raise ValueError(
                f"--{name.replace('_', '-')}: with --distca-ping-pong or --distca-chain the first "
                "forward pass is not the first to go back, so that layers would lose gradients: "
                "add --no-gradient-accumulation-fusion"
            )


def _validate_sm_margin(config: DistcaConfig) -> None:
    """Checks that there are multiprocessors to leave free, and some more."""
    if not config.sm_margin:
        return
    if not torch.cuda.is_available():
        raise ValueError("--distca-sm-margin needs GPUs, but torch sees none: remove it")
    there = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    if config.sm_margin >= there:
        raise ValueError(
            f"--distca-sm-margin {config.sm_margin} leaves no multiprocessor of {there} to "
            "attention: give less"
        )


def _validate_cuda_graphs(config: DistcaConfig, args: Namespace) -> None:
    """Checks that what surrounds core attention can be captured: see `model/cuda_graphs.py`."""
    if not config.cuda_graphs:
        return
    if not torch.cuda.is_available():
        raise ValueError("--distca-cuda-graphs needs GPUs, but torch sees none: remove it")
    if (uneven := config.shares_tokens_unevenly) is not None:
        flag, remedy = uneven
        raise ValueError(
            "--distca-cuda-graphs needs equally many tokens in all micro-batches, since graphs "
            f"keep the memory of each number of tokens, and {flag} gives any number: {remedy}"
        )
    for flag, value, why in (
        ("tensor_model_parallel_size", 1, "the pieces hold no collectives"),
        ("hidden_dropout", 0, "a replay draws no random numbers"),
        ("recompute_granularity", None, "graphs keep the memory that recomputing is to save"),
        ("gradient_accumulation_fusion", False, "gradients must go through Megatron's hooks"),
        ("delay_wgrad_compute", False, "a piece's gradients come together"),
        ("fp8", None, "scales change from step to step"),
        ("fp4", None, "scales change from step to step"),
        ("use_megatron_fsdp", False, "a graph's weights stay where they are"),
        ("use_torch_fsdp2", False, "a graph's weights stay where they are"),
        ("attention_output_gate", False, "the layer has another form"),
        ("multi_latent_attention", False, "the layer has another form"),
        ("spec", None, "layers of --spec may have another form"),
    ):
        found = vars(args)[flag]
        if found and found != value:
            name = flag.replace("_", "-")
            remedy = {
                "hidden_dropout": "set --hidden-dropout 0",
                "gradient_accumulation_fusion": "add --no-gradient-accumulation-fusion",
                "spec": "remove one of the two",
            }.get(flag, f"remove --{name}" if found is True else f"remove --{name} {found}")
            raise ValueError(f"--distca-cuda-graphs: {why}, so {remedy}")


def _balanced_by(args: Namespace) -> list[str]:
    """Returns the ways in which experts are balanced; none without experts."""
    if not args.num_experts:
        return []
    kinds = args.moe_router_load_balancing_type
    return list(kinds) if isinstance(kinds, list) else [kinds]


def _validate_experts(config: DistcaConfig, args: Namespace) -> None:
    """Checks that the auxiliary losses of experts can be averaged over all ranks."""
    if not args.num_experts:
        return
    if "sinkhorn" in _balanced_by(args):
        raise ValueError(
            "--distca does not cover --moe-router-load-balancing-type sinkhorn, which balances the "
            "tokens that happen to be on a rank: choose aux_loss"
        )
    # The ranks of one pool have equally many tokens of a micro-batch, whatever its size.
    one_pool = config.pool_size == args.data_parallel_size
    if (uneven := config.shares_tokens_unevenly) is not None and not one_pool:
        flag, remedy = uneven
        if config.pool_size is not None:
            remedy = f"{remedy}, or give all {args.data_parallel_size} ranks one pool"
        raise ValueError(
            f"{flag} gives ranks different numbers of tokens, which experts don't take: {remedy}"
        )
    if config.cuda_graphs:
        raise ValueError(
            "--distca-cuda-graphs captures only dense layers: remove it, or --num-experts"
        )


def _validate_scheduling(config: DistcaConfig, args: Namespace) -> None:
    """Checks the flags of the schedulers against each other."""
    scheduling = config.scheduling
    speeds = scheduling.server_speeds
    if speeds is not None:
        sizes = ParallelSizes.from_args(args, config.head_parallel)
        servers = sizes.servers(config.dedicated)
        if len(speeds) != servers or not all(0 < s < float("inf") for s in speeds):
            raise ValueError(
                f"--distca-server-speeds needs one positive speed for each of the {servers} "
                f"data-parallel ranks of all stages and dedicated servers, not {list(speeds)}"
            )
    size = scheduling.context_parallel_size
    servers = args.data_parallel_size // config.head_parallel
    if size is not None and (size < 1 or servers % size):
        raise ValueError(
            f"--distca-context-parallel-size {size} must divide the {servers} data-parallel ranks"
            + ("' servers" if config.head_parallel > 1 else "")
        )
    # Pools pad their tokens to a multiple of the parts.
    pooled = config.pool_size is not None
    if not pooled and config.shares_tokens_unevenly and args.sequence_parallel:
        raise ValueError(
            "--distca-scheduler wlb-llm gives ranks different numbers of tokens, which "
            "--sequence-parallel cannot divide: remove one of the two"
        )
