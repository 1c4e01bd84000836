"""The `--distca` flags, and what they go together with."""

from __future__ import annotations

import importlib.util
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from pathlib import Path

import torch

from distca.cost.volume import AttentionShape
from distca.plan import BLOCK, Mask
from distca.schedule import BALANCING, SCHEDULERS
from distca.transport.channels import MAX_HEAD_GROUPS

BACKWARDS = ("resend", "keep")
ABLATIONS = ("none", "single-stream", "signal")
PLACEMENTS = ("free", "sequential")
TRANSPORTS = ("auto", "collective", "shm", "nvshmem")
NVSHMEM_MODES = ("kernel", "copy-engine")


def add_distca_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds the group of `--distca` flags to a parser with Megatron-LM's flags."""
    group = parser.add_argument_group("distca", "core attention disaggregation")
    group.add_argument(
        "--distca",
        action="store_true",
        help="Compute core attention on attention servers: every rank of the same tensor-parallel "
        "index serves the documents of all. Off: plain Megatron on the same data.",
    )
    group.add_argument(
        "--distca-scheduler",
        choices=list(SCHEDULERS),
        default="tiles",
        help="Who owns which tokens and who computes which task. tiles: placement and tiles of "
        "queries and keys, with the fewest bytes on the busiest rank; greedy: the paper's; the "
        "others are baselines in which no query moves.",
    )
    group.add_argument(
        "--distca-placement",
        choices=PLACEMENTS,
        default="free",
        help="free: documents lie on the ranks, and in the micro-batches of a global batch, as the "
        "scheduler likes best; sequential: one after the other, as in the paper. The loss is the "
        "same.",
    )
    group.add_argument(
        "--distca-tolerance",
        type=float,
        default=0.1,
        help="How far a server's load may be above the mean, as a fraction of it.",
    )
    group.add_argument(
        "--distca-max-buffer-bytes",
        type=int,
        default=None,
        metavar="BYTES",
        help="A server never receives more queries, keys and values to compute a layer (tiles "
        "only). Default: no bound.",
    )
    group.add_argument(
        "--distca-gpus-per-node",
        type=int,
        default=1,
        metavar="N",
        help="GPUs that share a node: bytes between them are cheaper (tiles only). Default: all "
        "ranks are equally far apart.",
    )
    group.add_argument(
        "--distca-node-gb-per-s",
        type=float,
        default=450.0,
        help="Speed of the links inside a node, a GPU and direction.",
    )
    group.add_argument(
        "--distca-network-gb-per-s",
        type=float,
        default=50.0,
        help="Speed of the network between nodes, a GPU and direction.",
    )
    group.add_argument(
        "--distca-server-speeds",
        type=float,
        nargs="+",
        default=None,
        metavar="SPEED",
        help="Relative speeds of the attention servers where GPUs are unequal: the data-parallel "
        "ranks of the first stage, of the second, ..., dedicated servers (tiles only).",
    )
    group.add_argument(
        "--distca-servers",
        type=_dedicated_processes,
        default=0,
        metavar="inplace|dedicated:N",
        help="inplace: every rank is an attention server, and there are no others. dedicated:N: so "
        "are the last N processes of the job, which hold no model; the processes before them are "
        "those that Megatron's sizes are about. They count as one server for each tensor-parallel "
        "group. Default: inplace.",
    )
    group.add_argument(
        "--distca-context-parallel-size",
        type=int,
        default=None,
        metavar="N",
        help="Ranks that share documents under per-document-cp, ring-zigzag and wlb-llm. Default: "
        "as few as the longest document needs.",
    )
    group.add_argument(
        "--distca-backward",
        choices=BACKWARDS,
        default="resend",
        help="resend: the backward pass sends the kernels' inputs again and servers keep nothing; "
        "keep: servers keep them, for fewer bytes and more memory.",
    )
    group.add_argument(
        "--distca-ping-pong",
        action=BooleanOptionalAction,
        default=True,
        help="Run each micro-batch as two nano-batches: one computes while the other communicates.",
    )
    group.add_argument(
        "--distca-head-groups",
        type=int,
        default=1,
        metavar="N",
        help="Exchange and compute the heads in N groups, one after the other: kernels start when "
        "the first group is there. For links so slow that a nano-batch's exchange takes longer "
        "than the other's linear layers.",
    )
    group.add_argument(
        "--distca-cuda-graphs",
        action="store_true",
        help="Replay CUDA graphs of what surrounds core attention in each layer: fewer launches, "
        "more memory. Not run on any GPU yet.",
    )
    group.add_argument(
        "--distca-transport",
        choices=TRANSPORTS,
        # Not auto: on GPUs that would be a transport that no GPU has run yet.
        default="collective",
        help="What moves rows. collective: NCCL on GPUs, gloo on CPUs; shm: memory that processes "
        "of one machine share (CPUs); nvshmem: one-sided puts (GPUs); auto: nvshmem on GPUs where "
        "it starts, else collective.",
    )
    group.add_argument(
        "--distca-nvshmem-mode",
        choices=NVSHMEM_MODES,
        default="kernel",
        help="nvshmem copies by a kernel on few SMs, or by copy engines, which leave all SMs to "
        "compute.",
    )
    group.add_argument(
        "--distca-ablation",
        choices=ABLATIONS,
        default="none",
        help="To measure: single-stream waits for every exchange where it starts; signal moves one "
        "byte for each message, so losses mean nothing.",
    )
    group.add_argument(
        "--distca-pool-stages",
        action=BooleanOptionalAction,
        default=True,
        help="The attention servers of all pipeline stages share the tasks of a tick. Without it "
        "each stage's keep their own.",
    )
    group.add_argument(
        "--distca-max-in-flight",
        type=int,
        default=None,
        metavar="N",
        help="A pipeline stage keeps the activations of at most N micro-batches, for more ticks. "
        "Default: no bound.",
    )
    group.add_argument(
        "--distca-trace",
        type=Path,
        default=None,
        metavar="FILE",
        help="Write a timeline of all ranks' ticks, exchanges and kernels, to be opened at "
        "ui.perfetto.dev.",
    )
    group.add_argument(
        "--distca-trace-iterations",
        type=int,
        nargs=2,
        default=(2, 3),
        metavar=("FIRST", "LAST"),
        help="Iterations on the timeline, counted from 1 where the process starts. Default: 2 3.",
    )
    group.add_argument(
        "--distca-profile",
        type=Path,
        default=None,
        metavar="FILE",
        help="Kernel times measured by `distca profile`, to judge loads by. Without it an analytic "
        "model by pair counts serves.",
    )
    group.add_argument(
        "--distca-max-document-length",
        type=int,
        default=None,
        metavar="TOKENS",
        help="Documents are cut into pieces of at most this many tokens, which are shuffled. "
        "Default: the window, data-parallel size times --seq-length; give it to keep the order "
        "of the data at another number of ranks. Also applies without --distca.",
    )
    return parser


def _dedicated_processes(value: str) -> int:
    """How many processes only serve, from `--distca-servers`."""
    kind, _, number = value.partition(":")
    if kind == "inplace" and not number:
        return 0
    if kind == "dedicated" and number.isdecimal() and int(number) > 0:
        return int(number)
    raise ArgumentTypeError(f"{value!r} is neither inplace nor dedicated:N with N at least 1")


def mask_from_args(args: Namespace) -> Mask:
    """The mask that `--window-size` asks for.

    Raises:
        ValueError: a window that looks ahead, or a negative one.
    """
    window = getattr(args, "window_size", None)
    if window is None:
        return Mask()
    left, right = window
    if right != 0:
        raise ValueError(
            f"--window-size {left},{right}: documents are attended causally, so the second number "
            "must be 0"
        )
    return Mask() if left == -1 else Mask(left)


def validate_distca_arguments(args: Namespace) -> None:
    """Checks what can be checked before any work, alike on every rank.

    Args:
        args: Megatron-LM's arguments with its derived values (`data_parallel_size`, ...).

    Raises:
        ValueError: what does not go together, and what to do about it.
    """
    mask_from_args(args)
    if args.seq_length % BLOCK:
        raise ValueError(
            f"--seq-length {args.seq_length} is not a multiple of the attention block of {BLOCK}: "
            f"use {max(args.seq_length // BLOCK, 1) * BLOCK}"
        )
    longest = args.distca_max_document_length
    if longest is not None and longest < 1:
        raise ValueError(f"--distca-max-document-length {longest} must be at least 1")
    if not 0 <= args.distca_tolerance < 1:
        raise ValueError(
            f"--distca-tolerance {args.distca_tolerance} is out of range: give a fraction of the "
            "mean load from 0 to below 1, such as 0.1"
        )
    if not args.distca:
        return
    _validate_scheduling(args)
    if args.context_parallel_size > 1:
        raise ValueError(
            f"--distca replaces context parallelism: remove --context-parallel-size "
            f"{args.context_parallel_size} (long documents span the data-parallel ranks)"
        )
    _validate_pipeline(args)
    _validate_ping_pong(args)
    _validate_servers(args)
    _validate_transport(args)
    _validate_cuda_graphs(args)
    if args.attention_dropout:
        raise ValueError(
            f"--distca cannot apply attention dropout: set --attention-dropout 0 "
            f"(it is {args.attention_dropout})"
        )
    for flag, unsupported in (
        ("multi_latent_attention", "multi-latent attention"),
        ("experimental_attention_variant", "experimental attention variants"),
        ("apply_query_key_layer_scaling", "query-key layer scaling"),
        ("hybrid_context_parallel", "hybrid context parallelism"),
        ("num_experts", "mixture-of-experts models"),
        ("window_attn_skip_freq", "windows on some layers only"),
        ("enable_cuda_graph", "CUDA graphs"),
        ("external_cuda_graph", "CUDA graphs"),
        ("fine_grained_activation_offloading", "offloading of activations"),
    ):
        if getattr(args, flag, None):
            raise ValueError(
                f"--distca does not cover {unsupported}: remove --{flag.replace('_', '-')}"
            )
    if getattr(args, "cuda_graph_impl", None) not in (None, "none"):
        raise ValueError(
            "--distca does not cover CUDA graphs of core attention: remove --cuda-graph-impl "
            f"{args.cuda_graph_impl}; --distca-cuda-graphs is for what surrounds it"
        )
    if getattr(args, "softmax_type", "vanilla") != "vanilla":
        raise ValueError(
            f"--distca covers the plain softmax only: remove --softmax-type {args.softmax_type}"
        )
    if args.position_embedding_type not in ("rope", "none"):
        raise ValueError(
            f"--distca needs --position-embedding-type rope (or none), not "
            f"{args.position_embedding_type}: documents are longer than --seq-length"
        )
    if torch.cuda.is_available() and args.params_dtype == torch.float32:
        raise ValueError("--distca on GPUs needs --bf16: FlashAttention has no float32")
    if args.distca_profile is not None and not args.distca_profile.is_file():
        raise ValueError(
            f"--distca-profile {args.distca_profile} does not exist: make one with `distca profile "
            f"--output {args.distca_profile}`"
        )


def _validate_transport(args: Namespace) -> None:
    """Checks the transport against the devices; what is installed shows when it is made."""
    transport, on_gpus = args.distca_transport, torch.cuda.is_available()
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
    if args.distca_nvshmem_mode != "kernel" and transport in ("collective", "shm"):
        raise ValueError(
            f"--distca-nvshmem-mode {args.distca_nvshmem_mode} says how nvshmem copies, but "
            f"--distca-transport is {transport}: remove one of the two"
        )


def _validate_pipeline(args: Namespace) -> None:
    """Checks what ticks need."""
    stages = args.pipeline_model_parallel_size
    chunks = stages * (args.virtual_pipeline_model_parallel_size or 1)
    uneven = [
        name
        for name in (
            "pipeline_model_parallel_layout",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        )
        if getattr(args, name, None)
    ]
    if args.num_layers % chunks or uneven:
        what = f" remove --{uneven[0].replace('_', '-')}" if uneven else ""
        raise ValueError(
            f"--distca needs equally many layers on all {chunks} pipeline stages (virtual ones "
            f"included), so that they call core attention together: --num-layers is "
            f"{args.num_layers};{what or f' use a multiple of {chunks}'}"
        )
    if stages > 1 and args.distca_backward == "keep":
        raise ValueError(
            "--distca-backward keep needs --pipeline-model-parallel-size 1: on the way back "
            "micro-batches meet others than on the way out, so their inputs are sent again"
        )
    if stages == 1 and args.distca_max_in_flight is not None:
        raise ValueError("--distca-max-in-flight bounds a pipeline's stages, but there is only one")
    if args.distca_max_in_flight is not None and args.distca_max_in_flight < 1:
        raise ValueError(f"--distca-max-in-flight {args.distca_max_in_flight} must be at least 1")
    if getattr(args, "num_microbatches_with_partial_activation_checkpoints", None) is not None:
        raise ValueError(
            "--distca recomputes alike for all micro-batches: remove "
            "--num-microbatches-with-partial-activation-checkpoints"
        )
    first, last = args.distca_trace_iterations
    if args.distca_trace is not None and not 1 <= first <= last <= args.train_iters:
        raise ValueError(
            f"--distca-trace-iterations {first} {last} must lie in 1 .. --train-iters "
            f"{args.train_iters}"
        )


def attention_shape(args: Namespace) -> AttentionShape:
    """The attention heads of one tensor-parallel rank."""
    parallel = args.tensor_model_parallel_size
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return AttentionShape(
        heads=args.num_attention_heads // parallel,
        kv_heads=groups // parallel,
        head_dim=args.kv_channels,
        dtype_bytes=args.params_dtype.itemsize,
    )


def _validate_ping_pong(args: Namespace) -> None:
    """Checks what two nano-batches, and exchanges in several parts, need."""
    count = args.distca_head_groups
    kv_heads = attention_shape(args).kv_heads
    if not 1 <= count <= MAX_HEAD_GROUPS or kv_heads % count:
        raise ValueError(
            f"--distca-head-groups {count} must divide the {kv_heads} key-value heads of a "
            f"tensor-parallel rank, and be at most {MAX_HEAD_GROUPS}"
        )
    if not args.distca_ping_pong:
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
    for flag in ("fp8", "fp4"):
        if getattr(args, flag, None):
            raise ValueError(
                f"--distca-ping-pong does not cover --{flag}: give --no-distca-ping-pong"
            )


def _validate_cuda_graphs(args: Namespace) -> None:
    """Checks what graphs of the pieces around core attention need: see `cuda_graphs.py`."""
    if not args.distca_cuda_graphs:
        return
    if not torch.cuda.is_available():
        raise ValueError("--distca-cuda-graphs needs GPUs, but torch sees none: remove it")
    if args.distca_scheduler == "wlb-llm" and args.distca_placement == "free":
        raise ValueError(
            "--distca-cuda-graphs needs equally many tokens in all micro-batches, which "
            "--distca-scheduler wlb-llm does not give: add --distca-placement sequential"
        )
    for flag, value, why in (
        ("tensor_model_parallel_size", 1, "the pieces hold no collectives"),
        ("hidden_dropout", 0, "a replay draws no random numbers"),
        ("recompute_granularity", None, "graphs keep the memory that recomputing is to save"),
        ("gradient_accumulation_fusion", False, "gradients must go through Megatron's hooks"),
        ("delay_wgrad_compute", False, "a piece's gradients come together"),
        ("fp8", None, "scales change from step to step"),
        ("fp4", None, "scales change from step to step"),
        ("cpu_offloading", False, "a graph's memory stays where it is"),
        ("use_megatron_fsdp", False, "a graph's weights stay where they are"),
        ("use_torch_fsdp2", False, "a graph's weights stay where they are"),
        ("attention_output_gate", False, "the layer has another form"),
    ):
        found = getattr(args, flag, value)
        if found and found != value:
            name = flag.replace("_", "-")
            remedy = {
                "hidden_dropout": "set --hidden-dropout 0",
                "gradient_accumulation_fusion": "add --no-gradient-accumulation-fusion",
            }.get(flag, f"remove --{name}" if found is True else f"remove --{name} {found}")
            raise ValueError(f"--distca-cuda-graphs: {why}, so {remedy}")


def _validate_servers(args: Namespace) -> None:
    """Checks what dedicated servers need."""
    number = args.distca_servers
    if not number:
        return
    flag = f"--distca-servers dedicated:{number}"
    if number % args.tensor_model_parallel_size:
        raise ValueError(
            f"{flag}: a server is a process for each of the {args.tensor_model_parallel_size} "
            "tensor-parallel parts of the heads: use a multiple of that"
        )
    if args.distca_scheduler not in BALANCING:
        raise ValueError(
            f"{flag} needs a --distca-scheduler that shares tasks out over all servers "
            f"({', '.join(BALANCING)}), not {args.distca_scheduler}"
        )
    if args.distca_backward != "resend":
        raise ValueError(f"{flag} needs --distca-backward resend: those servers keep nothing")
    if not args.distca_pool_stages:
        raise ValueError(f"{flag} shares the tasks of all stages: remove --no-distca-pool-stages")


def _validate_scheduling(args: Namespace) -> None:
    """Checks the flags of the schedulers against each other."""
    scheduler = args.distca_scheduler
    if args.distca_gpus_per_node < 1:
        raise ValueError(f"--distca-gpus-per-node {args.distca_gpus_per_node} must be at least 1")
    for flag, value in (
        ("node", args.distca_node_gb_per_s),
        ("network", args.distca_network_gb_per_s),
    ):
        if not 0 < value < float("inf"):
            raise ValueError(f"--distca-{flag}-gb-per-s {value} must be positive")
    for name in ("max_buffer_bytes", "server_speeds"):
        if getattr(args, f"distca_{name}") is not None and scheduler != "tiles":
            raise ValueError(
                f"--distca-{name.replace('_', '-')} binds the scheduler tiles alone, not "
                f"{scheduler}: remove one of the two"
            )
    speeds = args.distca_server_speeds
    if speeds is not None:
        servers = args.data_parallel_size * args.pipeline_model_parallel_size
        servers += args.distca_servers // args.tensor_model_parallel_size
        if len(speeds) != servers or not all(0 < s < float("inf") for s in speeds):
            raise ValueError(
                f"--distca-server-speeds needs one positive speed for each of the {servers} "
                f"data-parallel ranks of all stages and dedicated servers, not {speeds}"
            )
        args.distca_server_speeds = tuple(speeds)
    bound = args.distca_max_buffer_bytes
    if bound is not None and bound < 0:
        raise ValueError(f"--distca-max-buffer-bytes {bound} must not be negative")
    size = args.distca_context_parallel_size
    if size is not None and (size < 1 or args.data_parallel_size % size):
        raise ValueError(
            f"--distca-context-parallel-size {size} must divide the {args.data_parallel_size} "
            "data-parallel ranks"
        )
    if scheduler == "wlb-llm" and args.distca_placement == "free" and args.sequence_parallel:
        raise ValueError(
            "--distca-scheduler wlb-llm gives ranks different numbers of tokens, which "
            "--sequence-parallel cannot divide: remove one of the two"
        )
