"""`distca profile`: measures this machine's attention kernel over a grid of lengths.

    distca profile --heads 8 --kv-heads 2 --head-dim 32 --output profile.json

Full rectangles and tasks that end on the diagonal are both measured; `--distca-profile` and
`distca plan --profile` then judge loads by these times.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import torch

from distca.commands.command_line import Parser, check_output
from distca.cost.volume import AttentionShape
from distca.runtime.kernel_timing import held_out_errors, profile_kernel

_DESCRIPTION = """\
Measures how long this machine's attention kernel takes for tasks of many lengths. Training
(--distca-profile) and `distca plan --profile` then judge loads by these times, where otherwise they
count pairs of query and key. Equal tasks share a call, as they do on an attention server. Give the
heads of one tensor-parallel rank of your model.
"""
_EXAMPLES = """\
example:
  distca profile --heads 8 --kv-heads 2 --head-dim 128 --max-length 131072 --output profile.json
"""


def build_parser() -> Parser:
    """Makes the parser of the command's flags."""
    parser = Parser("profile", _DESCRIPTION, _EXAMPLES)
    parser.add_argument(
        "--heads", type=int, default=8, metavar="N", help="Query heads of a tensor-parallel rank."
    )
    parser.add_argument(
        "--kv-heads", type=int, default=2, metavar="N", help="Key-value heads of such a rank."
    )
    parser.add_argument("--head-dim", type=int, default=32, metavar="N", help="Elements of a head.")
    parser.add_argument(
        "--v-head-dim", type=int, metavar="N", help="Those of a value's head. Default: as many."
    )
    parser.add_argument(
        "--dtype",
        choices=["fp32", "bf16"],
        help="Kind of numbers. Default: bf16 on a GPU, fp32 on a CPU.",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        default=4096,
        metavar="TOKENS",
        help="Longest task that is measured, at least 64; longer ones are judged by its rate.",
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads.")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="Where to write the times."
    )
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    args = build_parser().parse(argv)
    check_output("--output", args.output)
    if args.threads < 1:
        raise ValueError(f"--threads {args.threads} must be at least 1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(args.threads)
    dtype = args.dtype or ("bf16" if device == "cuda" else "fp32")
    element_bytes = {"fp32": 4, "bf16": 2}[dtype]
    shape = AttentionShape(args.heads, args.kv_heads, args.head_dim, element_bytes, args.v_head_dim)
    profile = profile_kernel(shape, args.max_length, device)
    profile.save(args.output)
    errors = held_out_errors(profile, device)
    sys.stdout.write(
        f"{args.output}: {profile.description}\n"
        f"held-out points: median error {statistics.median(errors):.1%}, "
        f"largest {max(errors):.1%} of {len(errors)}\n"
    )
    return 0
