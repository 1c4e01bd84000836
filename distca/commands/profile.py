"""`distca profile`: measures this machine's attention kernel over a grid of lengths.

    distca profile --heads 8 --kv-heads 2 --head-dim 32 --output profile.json

Full rectangles and tasks that end on the diagonal are both measured; `--distca-profile` and
`distca plan --profile` then judge loads by these times.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
from pathlib import Path

import torch

from distca.attention.kernel_timing import (
    HELD_OUT,
    held_out_errors,
    profile_kernel,
    profiled_lengths,
)
from distca.commands import html_page
from distca.commands.command_line import Parser, check_outputs
from distca.commands.planned_heads import add_shape_flags, planned_model, shape_of
from distca.commands.profile_page import page_of
from distca.cost.model_sizes import ModelSize
from distca.cost.volume import AttentionShape
from distca.progress import progress

SMALL = ModelSize(1, 0, 8, 2, 32, 0)
"""Heads that are measured without --model; there are no other sizes."""
_DESCRIPTION = """\
Measures how long this machine's attention kernel takes for tasks of many lengths. Training
(--distca-profile) and `distca plan --profile` then balance these times. Otherwise they balance the
number of query-key pairs. Equal tasks share a call, as they do on an attention server. Forward
and backward passes are measured. Give your model, and how many GPUs divide its heads.
"""
_EXAMPLES = """\
examples:
  distca profile --model llama-8b --tensor-model-parallel-size 4 --max-length 131072 \\
      --output profile.json
  distca profile --heads 8 --kv-heads 2 --head-dim 128 --max-length 131072 --output profile.json
"""


def build_parser() -> Parser:
    """Makes the parser of the command's flags."""
    parser = Parser("profile", _DESCRIPTION, _EXAMPLES)
    model = parser.add_argument_group("model (a flag wins over the value of --model)")
    add_shape_flags(model, default=SMALL)
    parser.add_argument(
        "--dtype",
        choices=["fp32", "bf16"],
        help="Data type of queries, keys and values. Default: bf16 on GPUs, whose kernels have "
        "no fp32, and fp32 on CPUs.",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        default=4096,
        metavar="TOKENS",
        help="Length of the longest task that is measured, at least 64 tokens. Longer tasks "
        "are assumed to run at this task's rate.",
    )
    parser.add_argument(
        "--forward-only",
        action="store_true",
        help="Leave out backward passes. Inference does not need them; training does.",
    )
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="Number of CPU threads."
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="File for the times."
    )
    html_page.add_flag(parser)
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    args = build_parser().parse(argv)
    check_outputs(args, "--output", "--html")
    if args.threads < 1:
        raise ValueError(f"--threads {args.threads} must be at least 1")
    if args.threads > (os.cpu_count() or 1):
        raise ValueError(f"--threads {args.threads}: this machine has {os.cpu_count()} cores")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and args.dtype == "fp32":
        raise ValueError(
            "--dtype fp32: attention kernels of GPUs have 16 bits a number: leave the flag out, or "
            "set CUDA_VISIBLE_DEVICES= to measure CPUs"
        )
    torch.set_num_threads(args.threads)
    dtype = args.dtype or ("bf16" if device == "cuda" else "fp32")
    element_bytes = {"fp32": 4, "bf16": 2}[dtype]
    shape = shape_of(planned_model(args, default=SMALL), args, element_bytes)
    _check_memory(shape, args.max_length, device)
    points = len(profiled_lengths(args.max_length)) ** 2 + HELD_OUT
    with progress("distca profile", "points", points) as shown:
        profile = profile_kernel(
            shape, args.max_length, device, told=shown.update, backward=not args.forward_only
        )
        profile.save(args.output)
        errors = held_out_errors(profile, device, told=shown.update)
    sys.stdout.write(
        f"{args.output}: {profile.description}\n"
        f"held-out points: median error {statistics.median(errors):.1%}, "
        f"largest {max(errors):.1%} of {len(errors)}\n"
    )
    if args.html is not None:
        command, saved = f"distca profile {shlex.join(argv)}", json.loads(args.output.read_text())
        html_page.write_page(args.html, page_of(command, profile, errors, saved))
    return 0


def _check_memory(shape: AttentionShape, max_length: int, device: str) -> None:
    """Refuses tasks that the device's memory cannot hold.

    Raises:
        ValueError: queries, keys and values of the longest task alone are too large.
    """
    rows = shape.q_row_bytes + shape.kv_row_bytes
    if device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (needed := 2 * max_length * rows) > memory:
        raise ValueError(
            f"--max-length {max_length} needs {needed / 1e9:,.1f} GB for queries, keys and values "
            f"of these heads, and this {'GPU' if device == 'cuda' else 'machine'} has "
            f"{memory / 1e9:,.1f} GB: give less; longer tasks are assumed to run at its rate"
        )
