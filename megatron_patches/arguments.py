"""The `--distca` flags, and what they go together with."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch

from distca.plan import BLOCK, Mask
from distca.schedule import SCHEDULERS

BACKWARDS = ("resend", "keep")


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
        choices=sorted(SCHEDULERS),
        default="greedy",
        help="Who computes which task. greedy: the paper's communication-aware scheduler; null: "
        "every rank computes its own queries.",
    )
    group.add_argument(
        "--distca-tolerance",
        type=float,
        default=0.1,
        help="How far a server's load may be from the mean, as a fraction of it.",
    )
    group.add_argument(
        "--distca-backward",
        choices=BACKWARDS,
        default="resend",
        help="resend: the backward pass sends the kernels' inputs again and servers keep nothing; "
        "keep: servers keep them, for fewer bytes and more memory.",
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
    if args.context_parallel_size > 1:
        raise ValueError(
            f"--distca replaces context parallelism: remove --context-parallel-size "
            f"{args.context_parallel_size} (long documents span the data-parallel ranks)"
        )
    if args.pipeline_model_parallel_size > 1:
        raise ValueError(
            "--distca does not work with pipeline parallelism yet: set "
            "--pipeline-model-parallel-size 1, or train without --distca"
        )
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
    ):
        if getattr(args, flag, None):
            raise ValueError(
                f"--distca does not cover {unsupported}: remove --{flag.replace('_', '-')}"
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
