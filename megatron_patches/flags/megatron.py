"""Parser of Megatron-LM's flags for the lean loop: what follows from them, and what is refused.

An accepted flag does what Megatron-LM's does; any other is refused by name, with what to give
instead (`unknown`).
"""

from __future__ import annotations

import importlib.util
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from distca.documents.tokenizer import build_tokenizer
from megatron_patches.flags.batch_sizes import check_growth, number_of_iterations
from megatron_patches.flags.loop import add_loop_argument
from megatron_patches.flags.megatron_table import FLAGS, SFT_TOKENIZER
from megatron_patches.flags.unknown import message_for


class _Parser(ArgumentParser):
    """A parser whose errors are a line, without the usage of all flags."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def build_parser(add_arguments: Callable[[ArgumentParser], ArgumentParser]) -> ArgumentParser:
    """Makes the parser of the lean loop, with the job's own flags."""
    parser = _Parser(description="Pretrain a GPT on documents.", allow_abbrev=False)
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for flag, keywords in flags:
            group.add_argument(flag, **keywords)
    add_loop_argument(parser)
    return add_arguments(parser)


def parse_args(
    add_arguments: Callable[[ArgumentParser], ArgumentParser],
    argv: Sequence[str] | None,
    world_size: int,
) -> Namespace:
    """Parses the command line, derives what Megatron-LM derives, and checks the result.

    Args:
        add_arguments: function that adds the job's own flags.
        argv: command line; None: this process's.
        world_size: number of processes.

    Raises:
        ValueError: a flag is unknown, lacks a value or has a wrong one, or some do not go together;
            the message says what to do.
    """
    parser = build_parser(add_arguments)
    args, unknown = parser.parse_known_args(argv)
    _refuse(bool(unknown), message_for(unknown, list(parser._option_string_actions)))
    # The number of processes that hold a model, as in Megatron-LM.
    args.world_size = world_size - dedicated_processes(args)
    _derive(args)
    _check(args)
    _derive_schedule(args)
    return args


def dedicated_processes(args: Namespace) -> int:
    """Returns the number of processes that hold no model."""
    return int(args.distca_servers) if getattr(args, "distca", False) else 0


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise ValueError(message)


def _derive(args: Namespace) -> None:
    """Sets arguments that follow from others, as Megatron-LM's `validate_args` does."""
    model_parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    _refuse(
        min(args.tensor_model_parallel_size, args.pipeline_model_parallel_size) < 1
        or args.world_size < 1
        or args.world_size % model_parallel != 0,
        f"{args.world_size} processes with a model cannot be divided into groups of TP x PP = "
        f"{args.tensor_model_parallel_size} x {args.pipeline_model_parallel_size}: start a "
        "multiple of that",
    )
    args.data_parallel_size = args.world_size // model_parallel
    _refuse(
        args.step_batch_size_schedule is not None and args.global_batch_size is not None,
        "give --step-batch-size-schedule or --global-batch-size, not both",
    )
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * args.data_parallel_size
    if args.eval_global_batch_size is None:
        args.eval_global_batch_size = args.global_batch_size
    if args.kv_channels is None:
        _refuse(
            args.hidden_size % args.num_attention_heads != 0,
            f"--hidden-size {args.hidden_size} is no multiple of --num-attention-heads "
            f"{args.num_attention_heads}: change one, or give --kv-channels",
        )
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.ffn_hidden_size is None:
        # SwiGLU has three matrices instead of two: 2/3 of the width keeps the parameters.
        args.ffn_hidden_size = (
            int(4 * args.hidden_size * 2 / 3 / 64) * 64 if args.swiglu else 4 * args.hidden_size
        )
    if not args.group_query_attention:
        args.num_query_groups = args.num_attention_heads
    _derive_experts(args)
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    # Alone it would only cost communication.
    args.sequence_parallel = args.sequence_parallel and args.tensor_model_parallel_size > 1
    cuda = torch.cuda.is_available()
    if args.distributed_backend is None:
        args.distributed_backend = "nccl" if cuda else "gloo"
    has_te = importlib.util.find_spec("transformer_engine") is not None
    if args.transformer_impl is None:
        args.transformer_impl = "transformer_engine" if cuda and has_te else "local"
    _refuse(
        args.transformer_impl == "transformer_engine" and not (cuda and has_te),
        "--transformer-impl transformer_engine needs a GPU and `pip install "
        "transformer-engine[pytorch]`: use --transformer-impl local",
    )
    # The fused kernels exist on GPUs alone, and this one is a part of NVIDIA's apex.
    has_wgrad = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    args.gradient_accumulation_fusion &= cuda and has_wgrad
    args.apply_rope_fusion &= cuda and has_te
    args.bias_swiglu_fusion &= cuda
    args.bias_dropout_fusion &= cuda
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    args.accumulate_allreduce_grads_in_fp32 |= args.bf16
    args.vocab_size = _vocab_size(args)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = math.ceil(args.vocab_size / multiple) * multiple
    args.consumed_train_samples = 0
    args.consumed_valid_samples = 0
    args.iteration = 0
    stage_layers = args.num_layers // args.pipeline_model_parallel_size
    per_virtual = args.num_layers_per_virtual_pipeline_stage
    args.virtual_pipeline_model_parallel_size = (
        None if per_virtual is None or per_virtual < 1 else stage_layers // per_virtual
    )


def _vocab_size(args: Namespace) -> int:
    """Returns the number of tokens that the tokenizer of the flags has."""
    if args.tokenizer_type != SFT_TOKENIZER:
        made = build_tokenizer(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
        return made.vocab_size
    # Its library takes seconds to import.
    from megatron_patches.batches.opening import chat_tokenizer

    _refuse(args.tokenizer_model is None, f"{SFT_TOKENIZER} needs --tokenizer-model, a folder")
    return chat_tokenizer(args.tokenizer_model, args.sft_tokenizer_prompt_format).vocab_size


def _derive_experts(args: Namespace) -> None:
    args.num_experts = args.num_experts or None
    if args.num_experts and args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        # As Megatron-LM: a list is for several.
        if len(getattr(args, name)) == 1:
            setattr(args, name, getattr(args, name)[0])


def _check_experts(args: Namespace) -> None:
    """Refuses flags of experts that cannot work."""
    experts, sharing = args.num_experts, args.expert_model_parallel_size
    flag = f"--expert-model-parallel-size {sharing}"
    if experts is None:
        _refuse(sharing != 1, f"{flag} needs --num-experts")
        return
    processes = args.world_size // args.pipeline_model_parallel_size
    of_an_expert = args.expert_tensor_parallel_size
    _refuse(
        sharing < 1 or of_an_expert < 1 or processes % (sharing * of_an_expert) != 0,
        f"{flag} times --expert-tensor-parallel-size {of_an_expert} must divide the {processes} "
        "processes of a pipeline stage",
    )
    _refuse(
        experts < 1 or experts % max(sharing, 1) != 0,
        f"{flag} does not divide --num-experts {experts}: use a size that does",
    )
    _refuse(
        not 1 <= args.moe_router_topk <= experts,
        f"--moe-router-topk {args.moe_router_topk} must lie in 1 .. --num-experts {experts}",
    )
    pattern = args.moe_layer_freq
    _refuse(
        isinstance(pattern, list) and len(pattern) != args.num_layers,
        f"--moe-layer-freq {pattern} must have an entry for each of --num-layers {args.num_layers}",
    )
    _refuse(
        args.tensor_model_parallel_size > 1 and not args.sequence_parallel,
        "--num-experts with --tensor-model-parallel-size needs --sequence-parallel",
    )
    kinds, factors = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    _refuse(
        isinstance(kinds, list) != isinstance(factors, list)
        or (isinstance(kinds, list) and len(kinds) != len(factors)),
        "--moe-router-load-balancing-type and --moe-aux-loss-coeff need equally many values",
    )
    for name in ("moe_grouped_gemm", "moe_permute_fusion"):
        _refuse(
            getattr(args, name) and args.transformer_impl != "transformer_engine",
            f"--{name.replace('_', '-')} needs GPUs and Transformer Engine: remove it",
        )


def _check(args: Namespace) -> None:
    """Refuses arguments that cannot work, before any process group exists."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    for name in (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "seq_length",
        "micro_batch_size",
        "global_batch_size",
        "eval_global_batch_size",
        "log_interval",
        "eval_interval",
    ):
        flag = "--" + name.replace("_", "-")
        _refuse(getattr(args, name) < 1, f"{flag} {getattr(args, name)} must be at least 1")
    _refuse(
        args.num_attention_heads % args.num_query_groups != 0,
        f"--num-query-groups {args.num_query_groups} does not divide --num-attention-heads "
        f"{args.num_attention_heads}: use a number that does",
    )
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        flag = "--" + name.replace("_", "-")
        _refuse(
            getattr(args, name) % tp != 0,
            f"--tensor-model-parallel-size {tp} does not divide {flag} {getattr(args, name)}: use "
            "a size that does",
        )
    _refuse(
        args.sequence_parallel and args.seq_length * args.micro_batch_size % tp != 0,
        f"--sequence-parallel needs --seq-length {args.seq_length} to be a multiple of "
        f"--tensor-model-parallel-size {tp}",
    )
    samples = args.micro_batch_size * args.data_parallel_size
    for name in ("global_batch_size", "eval_global_batch_size"):
        size, flag = getattr(args, name), "--" + name.replace("_", "-")
        _refuse(
            size % samples != 0,
            f"{flag} {size} is no multiple of --micro-batch-size {args.micro_batch_size} times the "
            f"data-parallel size {args.data_parallel_size}: use "
            f"{max(size // samples, 1) * samples}",
        )
    _refuse(
        args.max_position_embeddings < args.seq_length,
        f"--max-position-embeddings {args.max_position_embeddings} is less than --seq-length "
        f"{args.seq_length}: raise it, or leave it out",
    )
    _refuse(
        args.num_layers % pp != 0,
        f"--pipeline-model-parallel-size {pp} does not divide --num-layers {args.num_layers}: use "
        f"a multiple of {pp}",
    )
    per_virtual = args.num_layers_per_virtual_pipeline_stage
    if per_virtual is not None:
        _refuse(
            pp < 2 or per_virtual < 1 or args.num_layers // pp % per_virtual != 0,
            f"--num-layers-per-virtual-pipeline-stage {per_virtual} must divide the "
            f"{args.num_layers // pp} layers of a pipeline stage, and needs more than one stage",
        )
    _refuse(
        args.context_parallel_size != 1,
        f"--context-parallel-size {args.context_parallel_size} is not supported by the lean loop: "
        "--distca spreads long documents over the data-parallel ranks instead",
    )
    _check_experts(args)
    _refuse(args.lr <= 0, f"--lr {args.lr} must be positive")
    _refuse(
        not 0 <= args.min_lr <= args.lr, f"--min-lr {args.min_lr} must lie in 0 .. --lr {args.lr}"
    )
    _refuse(
        args.recompute_granularity == "full"
        and (args.recompute_method is None or args.recompute_num_layers is None),
        "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
    )
    layers = args.num_layers // (pp * (args.virtual_pipeline_model_parallel_size or 1))
    _refuse(
        args.recompute_method == "uniform" and layers % max(args.recompute_num_layers or 1, 1) != 0,
        f"--recompute-num-layers {args.recompute_num_layers} must divide the {layers} layers of a "
        "pipeline stage",
    )
    _refuse(
        args.recompute_num_layers is not None and args.recompute_num_layers < 1,
        f"--recompute-num-layers {args.recompute_num_layers} must be at least 1",
    )
    _refuse(
        args.overlap_param_gather
        and not (args.use_distributed_optimizer and args.overlap_grad_reduce),
        "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce",
    )
    _refuse(
        args.save_interval is not None and (args.save is None or args.save_interval < 1),
        "--save-interval needs --save, and must be at least 1",
    )
    _refuse(
        args.ckpt_step is not None and args.load is None,
        f"--ckpt-step {args.ckpt_step} needs --load",
    )
    _refuse(
        bool(args.wandb_project) and importlib.util.find_spec("wandb") is None,
        f"--wandb-project {args.wandb_project} needs the package wandb: pip install wandb",
    )
    _refuse(
        args.distributed_backend == "nccl" and not torch.cuda.is_available(),
        "--distributed-backend nccl needs GPUs: use gloo",
    )
    dense = args.attention_backend in ("unfused", "local")
    _refuse(
        not dense and args.transformer_impl == "local" and args.attention_dropout > 0,
        f"--attention-dropout {args.attention_dropout} is only supported with "
        "--attention-backend unfused: set it to 0",
    )


def _derive_schedule(args: Namespace) -> None:
    """Sets the run's iterations, and its learning rate's decay and warm-up in samples.

    Megatron-LM's scheduler counts in samples, also where flags are in iterations, which are then of
    `--global-batch-size`.
    """
    in_samples = args.train_samples is not None
    _refuse(
        in_samples == (args.train_iters is not None),
        "give --train-iters or --train-samples" + (", not both" if in_samples else ""),
    )
    check_growth(args)
    unit, other = ("samples", "iters") if in_samples else ("iters", "samples")
    for name in ("decay", "warmup"):
        _refuse(
            bool(getattr(args, f"lr_{name}_{other}")),
            f"--lr-{name}-{other} needs --train-{other}: with --train-{unit} give "
            f"--lr-{name}-{unit}",
        )
    length = getattr(args, f"train_{unit}")
    _refuse(length < 0, f"--train-{unit} {length} must not be negative")
    decay, warmup = getattr(args, f"lr_decay_{unit}"), getattr(args, f"lr_warmup_{unit}")
    if decay is None:
        decay = max(length, 1)
    fraction = args.lr_warmup_fraction
    _refuse(
        fraction is not None and warmup > 0,
        f"give --lr-warmup-fraction or --lr-warmup-{unit}, not both",
    )
    _refuse(
        warmup < 0 or warmup >= decay,
        f"--lr-warmup-{unit} {warmup} must be less than the {decay} {unit} of the decay "
        f"(--lr-decay-{unit}, or --train-{unit})",
    )
    _refuse(
        fraction is not None and not 0 <= fraction < 1,
        f"--lr-warmup-fraction {fraction} must lie in 0 .. 1",
    )
    samples = 1 if in_samples else args.global_batch_size
    args.lr_decay_samples = decay * samples
    args.lr_warmup_samples = (
        warmup * samples if fraction is None else fraction * args.lr_decay_samples
    )
    if in_samples:
        args.train_iters = number_of_iterations(args)
