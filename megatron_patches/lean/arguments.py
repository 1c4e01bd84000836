"""Megatron-LM's flags, as far as the lean loop has them: names, meanings and defaults are its.

A flag that is accepted does what it says; any other is refused by name.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_patches.tokenizer import TOKENIZER_TYPES, build_tokenizer


def window_size(text: str) -> tuple[int, int]:
    """Megatron's `--window-size`: `L,R` or `(L,R)`."""
    try:
        left, right = (int(part) for part in text.strip("() ").split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give two numbers, such as 512,0") from error
    if left < -1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: the first number is how many earlier tokens a query sees, or -1 for all"
        )
    return left, right


# Group -> (flag, keywords of add_argument). Help is Megatron's meaning in a line.
_SWITCH = {"action": "store_true"}
_FLAGS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "network size": [
        ("--num-layers", {"type": int, "required": True, "help": "Transformer layers."}),
        ("--hidden-size", {"type": int, "required": True, "help": "Width of the model."}),
        ("--ffn-hidden-size", {"type": int, "help": "Width of the MLP. Default: 4 hidden sizes."}),
        ("--num-attention-heads", {"type": int, "required": True, "help": "Query heads."}),
        ("--kv-channels", {"type": int, "help": "Head size. Default: hidden size / heads."}),
        ("--group-query-attention", {**_SWITCH, "help": "Use grouped-query attention."}),
        ("--num-query-groups", {"type": int, "default": 1, "help": "Key-value heads."}),
        ("--max-position-embeddings", {"type": int, "help": "Longest --seq-length of the model."}),
        (
            "--position-embedding-type",
            {"choices": ["rope", "none"], "default": "rope", "help": "Kind of positions."},
        ),
        ("--rotary-base", {"type": int, "default": 10000, "help": "Base of the rotary angles."}),
        ("--rotary-percent", {"type": float, "default": 1.0, "help": "Share of a head rotated."}),
        (
            "--rotary-seq-len-interpolation-factor",
            {"type": int, "help": "Rotary positions are divided by it."},
        ),
        ("--use-rope-scaling", {**_SWITCH, "help": "Llama 3's scaling of the rotary angles."}),
        ("--rope-scaling-factor", {"type": float, "default": 8.0, "help": "Its factor."}),
        (
            "--normalization",
            {"choices": ["LayerNorm", "RMSNorm"], "default": "LayerNorm", "help": "Kind of norm."},
        ),
        ("--norm-epsilon", {"type": float, "default": 1e-5, "help": "Epsilon of the norms."}),
        ("--qk-layernorm", {**_SWITCH, "help": "Norm on queries and keys."}),
        ("--swiglu", {**_SWITCH, "help": "SwiGLU in the MLP."}),
        (
            "--untie-embeddings-and-output-weights",
            {**_SWITCH, "help": "An output layer of its own."},
        ),
        (
            "--make-vocab-size-divisible-by",
            {"type": int, "default": 128, "help": "The vocabulary is padded to a multiple."},
        ),
        (
            "--window-size",
            {"type": window_size, "help": "Sliding window: L,0 lets a query see L earlier tokens."},
        ),
        ("--multi-latent-attention", {**_SWITCH, "help": "Not supported; refused clearly."}),
    ],
    "regularization": [
        ("--attention-dropout", {"type": float, "default": 0.1, "help": "In core attention."}),
        ("--hidden-dropout", {"type": float, "default": 0.1, "help": "After attention and MLP."}),
        ("--weight-decay", {"type": float, "default": 0.01, "help": "Weight decay."}),
        ("--clip-grad", {"type": float, "default": 1.0, "help": "Largest global gradient norm."}),
        ("--adam-beta1", {"type": float, "default": 0.9, "help": "Adam's first beta."}),
        ("--adam-beta2", {"type": float, "default": 0.999, "help": "Adam's second beta."}),
        ("--adam-eps", {"type": float, "default": 1e-8, "help": "Adam's epsilon."}),
        ("--sgd-momentum", {"type": float, "default": 0.9, "help": "SGD's momentum."}),
    ],
    "training": [
        ("--micro-batch-size", {"type": int, "required": True, "help": "Samples a rank runs."}),
        ("--global-batch-size", {"type": int, "help": "Default: micro-batch size x DP."}),
        ("--train-iters", {"type": int, "required": True, "help": "Iterations of the run."}),
        ("--exit-interval", {"type": int, "help": "Exit after an iteration divisible by it."}),
        ("--exit-duration-in-mins", {"type": int, "help": "Exit after this many minutes."}),
        ("--exit-signal-handler", {**_SWITCH, "help": "On SIGTERM: save and exit."}),
        ("--optimizer", {"choices": ["adam", "sgd"], "default": "adam", "help": "Optimizer."}),
        (
            "--recompute-granularity",
            {"choices": ["full", "selective"], "help": "Recompute activations."},
        ),
        ("--recompute-activations", {**_SWITCH, "help": "Short for selective recomputation."}),
        (
            "--recompute-method",
            {"choices": ["uniform", "block"], "help": "Which layers to recompute in full."},
        ),
        ("--recompute-num-layers", {"type": int, "help": "How many at a time."}),
        ("--recompute-modules", {"nargs": "*", "type": str, "help": "Modules for selective."}),
        (
            "--no-check-for-nan-in-loss-and-grad",
            {
                "action": "store_false",
                "dest": "check_for_nan_in_loss_and_grad",
                "help": "Go on when the loss is not a number.",
            },
        ),
        (
            "--attention-backend",
            {
                "choices": ["auto", "flash", "unfused", "local"],
                "default": "auto",
                "help": "local, unfused: Megatron's own attention with a dense mask (no --distca).",
            },
        ),
        (
            "--transformer-impl",
            {
                "choices": ["local", "transformer_engine"],
                "help": "Layer spec. Default: transformer_engine on GPUs, else local.",
            },
        ),
    ],
    "biases and fusions": [
        (
            "--disable-bias-linear",
            {"action": "store_false", "dest": "add_bias_linear", "help": "No biases."},
        ),
        ("--add-qkv-bias", {**_SWITCH, "help": "A bias in the QKV projection all the same."}),
        (
            "--no-gradient-accumulation-fusion",
            {
                "action": "store_false",
                "dest": "gradient_accumulation_fusion",
                "help": "Do not add up weight gradients inside the GEMM (GPUs only).",
            },
        ),
        (
            "--no-bias-swiglu-fusion",
            {
                "action": "store_false",
                "dest": "bias_swiglu_fusion",
                "help": "Do not fuse bias and SwiGLU (GPUs only).",
            },
        ),
        (
            "--no-bias-dropout-fusion",
            {
                "action": "store_false",
                "dest": "bias_dropout_fusion",
                "help": "Do not fuse bias, dropout and residual (GPUs only).",
            },
        ),
        (
            "--no-rope-fusion",
            {
                "action": "store_false",
                "dest": "apply_rope_fusion",
                "help": "Do not fuse the rotary embedding (GPUs with Transformer Engine only).",
            },
        ),
    ],
    "initialization": [
        ("--seed", {"type": int, "default": 1234, "help": "Of weights, dropout and data."}),
        ("--init-method-std", {"type": float, "default": 0.02, "help": "Of the weights."}),
    ],
    "learning rate": [
        ("--lr", {"type": float, "required": True, "help": "Peak learning rate."}),
        ("--min-lr", {"type": float, "default": 0.0, "help": "Lowest learning rate."}),
        (
            "--lr-decay-style",
            {
                "choices": ["constant", "linear", "cosine", "inverse-square-root"],
                "default": "linear",
                "help": "How it decays.",
            },
        ),
        ("--lr-decay-iters", {"type": int, "help": "Over how many. Default: --train-iters."}),
        ("--lr-warmup-iters", {"type": int, "default": 0, "help": "Iterations of warm-up."}),
        ("--lr-warmup-fraction", {"type": float, "help": "Share of the decay to warm up in."}),
        ("--lr-warmup-init", {"type": float, "default": 0.0, "help": "Where the warm-up starts."}),
    ],
    "checkpointing": [
        ("--save", {"help": "Directory to save checkpoints to."}),
        ("--save-interval", {"type": int, "help": "Iterations between checkpoints."}),
        ("--load", {"help": "Directory to load the latest checkpoint from."}),
        ("--no-save-optim", {**_SWITCH, "help": "Do not save the optimizer."}),
        ("--no-load-optim", {**_SWITCH, "help": "Do not load the optimizer."}),
        ("--no-save-rng", {**_SWITCH, "help": "Do not save random states."}),
        ("--no-load-rng", {**_SWITCH, "help": "Do not load random states."}),
        ("--finetune", {**_SWITCH, "help": "Load the weights alone, start at iteration 0."}),
        (
            "--exit-on-missing-checkpoint",
            {**_SWITCH, "help": "An error if --load has no checkpoint, instead of a fresh start."},
        ),
    ],
    "mixed precision": [
        ("--bf16", {**_SWITCH, "help": "Run in bfloat16, with a float32 optimizer."}),
        (
            "--accumulate-allreduce-grads-in-fp32",
            {**_SWITCH, "help": "Gradients in float32. Always on with --bf16, as in Megatron-LM."},
        ),
    ],
    "distributed": [
        ("--tensor-model-parallel-size", {"type": int, "default": 1, "help": "TP."}),
        ("--pipeline-model-parallel-size", {"type": int, "default": 1, "help": "PP."}),
        (
            "--num-layers-per-virtual-pipeline-stage",
            {"type": int, "help": "Layers of each virtual stage, for interleaving."},
        ),
        ("--context-parallel-size", {"type": int, "default": 1, "help": "Must be 1 here."}),
        ("--sequence-parallel", {**_SWITCH, "help": "Sequence parallelism within TP."}),
        ("--use-distributed-optimizer", {**_SWITCH, "help": "Shard the optimizer over DP."}),
        ("--overlap-grad-reduce", {**_SWITCH, "help": "Reduce gradients during the backward."}),
        ("--overlap-param-gather", {**_SWITCH, "help": "Gather weights during the forward."}),
        (
            "--distributed-backend",
            {"choices": ["nccl", "gloo"], "help": "Default: nccl on GPUs, else gloo."},
        ),
        (
            "--distributed-timeout-minutes",
            {"type": int, "default": 10, "help": "After which a collective fails."},
        ),
    ],
    "validation": [
        ("--eval-iters", {"type": int, "default": 100, "help": "Iterations of an evaluation."}),
        ("--eval-interval", {"type": int, "default": 1000, "help": "Iterations between them."}),
    ],
    "data and tokenizer": [
        (
            "--data-path",
            {"nargs": "+", "required": True, "help": "Prefixes, or weights and prefixes."},
        ),
        ("--split", {"default": "969,30,1", "help": "Shares of train, validation and test."}),
        (
            "--seq-length",
            {"type": int, "required": True, "help": "Tokens a rank owns in a window."},
        ),
        (
            "--tokenizer-type",
            {"choices": TOKENIZER_TYPES, "required": True, "help": "Kind of tokenizer."},
        ),
        ("--tokenizer-model", {"help": "A tokenizer.json, or its folder."}),
        ("--vocab-size", {"type": int, "help": "Size of the vocabulary, for NullTokenizer."}),
    ],
    "logging": [
        ("--log-interval", {"type": int, "default": 100, "help": "Iterations between log lines."}),
        ("--tensorboard-dir", {"help": "Directory for TensorBoard."}),
        (
            "--tensorboard-log-interval",
            {"type": int, "default": 1, "help": "Iterations between its points."},
        ),
    ],
}


def build_parser(add_arguments: Callable[[ArgumentParser], ArgumentParser]) -> ArgumentParser:
    """The parser of the lean loop, with the job's own flags."""
    parser = ArgumentParser(description="Pretrain a GPT on documents.", allow_abbrev=False)
    for title, flags in _FLAGS.items():
        group = parser.add_argument_group(title)
        for flag, keywords in flags:
            group.add_argument(flag, **keywords)
    return add_arguments(parser)


def parse_args(
    add_arguments: Callable[[ArgumentParser], ArgumentParser],
    argv: Sequence[str] | None,
    world_size: int,
) -> Namespace:
    """Parses, derives what Megatron-LM derives, and checks.

    Args:
        add_arguments: adds the job's own flags.
        argv: the command line; None: this process's.
        world_size: number of processes.

    Raises:
        ValueError: what does not go together, and what to do about it.
    """
    args = build_parser(add_arguments).parse_args(argv)
    # As in Megatron-LM, of the processes that hold a model.
    args.world_size = world_size - dedicated_processes(args)
    _derive(args)
    _check(args)
    return args


def dedicated_processes(args: Namespace) -> int:
    """How many processes hold no model."""
    return int(args.distca_servers) if getattr(args, "distca", False) else 0


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise ValueError(message)


def _derive(args: Namespace) -> None:
    """Sets what follows from other values, as Megatron-LM's `validate_args` does."""
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
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * args.data_parallel_size
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
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    # Alone it would only cost communication.
    args.sequence_parallel = args.sequence_parallel and args.tensor_model_parallel_size > 1
    if args.lr_decay_iters is None:
        args.lr_decay_iters = max(args.train_iters, 1)
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
    tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    args.vocab_size = tokenizer.vocab_size
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


def _check(args: Namespace) -> None:
    """Refuses what cannot work, before any process group exists."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    for name in (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "seq_length",
        "micro_batch_size",
        "global_batch_size",
        "log_interval",
        "eval_interval",
    ):
        flag = "--" + name.replace("_", "-")
        _refuse(getattr(args, name) < 1, f"{flag} {getattr(args, name)} must be at least 1")
    _refuse(args.train_iters < 0, f"--train-iters {args.train_iters} must not be negative")
    _refuse(
        args.num_attention_heads % args.num_query_groups != 0,
        f"--num-query-groups {args.num_query_groups} does not divide --num-attention-heads "
        f"{args.num_attention_heads}",
    )
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        flag = "--" + name.replace("_", "-")
        _refuse(
            getattr(args, name) % tp != 0,
            f"--tensor-model-parallel-size {tp} does not divide {flag} {getattr(args, name)}",
        )
    _refuse(
        args.sequence_parallel and args.seq_length * args.micro_batch_size % tp != 0,
        f"--sequence-parallel needs --seq-length {args.seq_length} to be a multiple of "
        f"--tensor-model-parallel-size {tp}",
    )
    samples = args.micro_batch_size * args.data_parallel_size
    _refuse(
        args.global_batch_size % samples != 0,
        f"--global-batch-size {args.global_batch_size} is no multiple of --micro-batch-size "
        f"{args.micro_batch_size} times the data-parallel size {args.data_parallel_size}: use "
        f"{max(args.global_batch_size // samples, 1) * samples}",
    )
    _refuse(
        args.max_position_embeddings < args.seq_length,
        f"--max-position-embeddings {args.max_position_embeddings} is less than --seq-length "
        f"{args.seq_length}",
    )
    _refuse(
        args.num_layers % pp != 0,
        f"--pipeline-model-parallel-size {pp} does not divide --num-layers {args.num_layers}",
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
    _refuse(args.multi_latent_attention, "--multi-latent-attention is not supported")
    _refuse(args.lr <= 0, f"--lr {args.lr} must be positive")
    _refuse(
        not 0 <= args.min_lr <= args.lr, f"--min-lr {args.min_lr} must lie in 0 .. --lr {args.lr}"
    )
    _refuse(
        args.lr_warmup_fraction is not None and args.lr_warmup_iters > 0,
        "give --lr-warmup-fraction or --lr-warmup-iters, not both",
    )
    _refuse(
        args.lr_warmup_iters < 0 or args.lr_warmup_iters >= args.lr_decay_iters,
        f"--lr-warmup-iters {args.lr_warmup_iters} must be less than the {args.lr_decay_iters} "
        "iterations of the decay (--lr-decay-iters, or --train-iters)",
    )
    _refuse(
        args.lr_warmup_fraction is not None and not 0 <= args.lr_warmup_fraction < 1,
        f"--lr-warmup-fraction {args.lr_warmup_fraction} must lie in 0 .. 1",
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
        args.distributed_backend == "nccl" and not torch.cuda.is_available(),
        "--distributed-backend nccl needs GPUs: use gloo",
    )
    dense = args.attention_backend in ("unfused", "local")
    _refuse(
        dense and getattr(args, "distca", False),
        f"--attention-backend {args.attention_backend} is Megatron's own attention: --distca "
        "replaces it",
    )
    _refuse(
        not dense and args.transformer_impl == "local" and args.attention_dropout > 0,
        f"--attention-dropout {args.attention_dropout} is only supported with "
        "--attention-backend unfused: set it to 0",
    )
