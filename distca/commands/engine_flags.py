"""Flags of an engine that several commands have, with one meaning."""

from __future__ import annotations

import argparse
from pathlib import Path

from distca.commands.command_line import Parser
from distca.commands.described import Group, flag_of
from distca.commands.served_sparsity import CSPS
from distca.inference.transports import TRANSPORTS, check_transport

ALL_GATHER = "all-gather"
"""Strategy of prefills by which all keys go to all ranks, a baseline."""


def add_dtype_flag(group: argparse._ArgumentGroup | Parser) -> None:
    """Adds `--dtype`, which `served_dtype` reads."""
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="Data type of weights and activations. Default: bfloat16 on GPUs, float32 on CPUs.",
    )


def served_dtype(given: str | None) -> str:
    """Returns the name of the data type of weights and rows.

    Args:
        given: value of `--dtype`; None: what the machine's kernels are made for.

    Raises:
        ValueError: it is float32, and there are GPUs. FlashAttention has no kernels of float32, and
            attention without it would hold all scores of a prompt at once.
    """
    import torch

    on_gpus = torch.cuda.is_available()
    if on_gpus and given == "float32":
        raise ValueError(
            "--dtype float32: attention kernels of GPUs have 16 bits a number: leave the flag out, "
            "or set CUDA_VISIBLE_DEVICES= to run on CPUs"
        )
    return given or ("bfloat16" if on_gpus else "float32")


def add_machine_flags(group: Group) -> None:
    """Adds the flags of what `--prefill-strategy auto` knows of this machine."""
    group.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="Kernel times from `distca profile`, with which auto chooses. Default: the speeds "
        "of an H100, or of one core on CPUs.",
    )
    group.add_argument(
        "--node-gb-per-s",
        type=float,
        metavar="X",
        help="Speed of the link between two ranks in GB/s, with which auto chooses. Default: "
        "NVLink's speed, or that between CPU processes.",
    )


def check_machine_flags(args: argparse.Namespace) -> None:
    """Checks the flags of `add_machine_flags`.

    Raises:
        ValueError: the speed is none.
    """
    if args.node_gb_per_s is not None and not 0 < args.node_gb_per_s < float("inf"):
        raise ValueError(f"--node-gb-per-s {args.node_gb_per_s}: give a speed above 0")


def check_counts(args: argparse.Namespace, *names: str, least: int = 1) -> None:
    """Checks flags that are whole numbers, unless they are not given or have words as values.

    Args:
        args: flags.
        names: their names among these.
        least: least value.

    Raises:
        ValueError: one is lower.
    """
    for name in names:
        value = getattr(args, name)
        if isinstance(value, int) and value < least:
            raise ValueError(f"{flag_of(name)} {value}: give at least {least}")


def add_block_size_flag(group: Group) -> None:
    """Adds the flag of a block's size."""
    group.add_argument(
        "--block-size",
        type=int,
        metavar="N",
        help="Number of tokens per block of the KV cache. Default: 16 on CPUs, and 256 on "
        "GPUs, because FlashAttention 2 reads only multiples of 256.",
    )


def add_pool_flags(group: Group) -> None:
    """Adds the flags of the memory for keys and values, and of what stays in it."""
    add_block_size_flag(group)
    group.add_argument(
        "--kv-cache-memory-bytes",
        type=int,
        metavar="N",
        help="Size of each rank's KV cache in bytes. Default: what the weights leave of "
        "--gpu-memory-utilization, or 1 GiB on CPUs.",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="PART",
        help="Share of a GPU's memory that weights and KV cache may take.",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Keep the blocks of finished prompts for prompts with the same prefix. Default: on.",
    )


def add_exchange_flags(group: Group) -> None:
    """Adds the flags of ranks without weights, and of what moves rows; see `check_exchange`."""
    group.add_argument(
        "--attention-servers",
        type=int,
        default=0,
        metavar="K",
        help="Number of additional ranks without weights. They hold keys and values and "
        "compute attention. Default: 0.",
    )
    group.add_argument(
        "--transport",
        choices=TRANSPORTS,
        help="What moves queries, keys, values and outputs between ranks: gloo or shm (shared "
        "memory of one machine) on CPUs, nccl or nvshmem on GPUs. Default: gloo on CPUs, nccl "
        "on GPUs.",
    )


def add_timeout_flag(group: Group, default: float, then: str) -> None:
    """Adds the flag of how long an exchange may take; see `check_timeout`.

    Args:
        group: group of flags.
        default: seconds.
        then: what happens after that.
    """
    group.add_argument(
        "--step-timeout",
        type=float,
        default=default,
        metavar="SECONDS",
        help=f"Maximum time of an exchange between ranks, {then}. Default: {default:g}.",
    )


def check_timeout(args: argparse.Namespace) -> None:
    """Checks the flag of `add_timeout_flag`.

    Raises:
        ValueError: it is no time.
    """
    if not 0 < args.step_timeout < float("inf"):
        raise ValueError(f"--step-timeout {args.step_timeout}: give seconds above 0, not infinity")


def check_exchange(args: argparse.Namespace) -> None:
    """Checks the flags of `add_exchange_flags`.

    Raises:
        ValueError: they contradict each other, the strategy or this machine.
    """
    import torch

    check_counts(args, "attention_servers", least=0)
    servers = args.attention_servers
    if servers and args.prefill_strategy in (CSPS, ALL_GATHER):
        raise ValueError(
            f"--prefill-strategy {args.prefill_strategy} does not work with --attention-servers "
            f"{servers}: leave one out"
        )
    if servers and args.transport in ("shm", "nvshmem"):
        raise ValueError(
            f"--attention-servers need messages between two ranks, which --transport "
            f"{args.transport} does not have: leave one out"
        )
    check_transport(args.transport, torch.cuda.is_available())
