"""`--dtype` of commands that run a model."""

from __future__ import annotations

import argparse

from distca.commands.command_line import Parser


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
