"""`distca tune overlap`: finds how many multiprocessors attention should leave to exchanges."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

import torch

from distca.attention.choice import choose
from distca.commands import html_page, tune_page
from distca.commands.command_line import Parser, check_output
from distca.commands.verify.ranks import verify_machine
from distca.commands.verify.stage import Line

_HEAD_DIM = 128
_EPILOG = """
example:
  distca tune overlap

FlashAttention 3 keeps all multiprocessors of a GPU busy until it ends, so an exchange that starts
later waits. `--distca-sm-margin` leaves some free. This command starts a rank on each GPU. It times
attention during an exchange with several margins, and prints the flag with the fastest one.

FlashAttention 2 and 4 have no such setting. Splits of the keys of decoded tokens (`num_splits`)
need no flag: FlashAttention 2 and 3 choose them for each call. FlashAttention 4 has none on Hopper,
and runs with one split on Blackwell.
"""


def build_parser() -> Parser:
    """Builds the parser of the command's flags."""
    parser = Parser("tune overlap", __doc__.splitlines()[0], _EPILOG)
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="Number of processes, each with a GPU. Default: one for each GPU.",
    )
    html_page.add_flag(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status: 1 if ranks failed.

    Raises:
        ValueError: there are not enough GPUs, or they have another kernel.
    """
    args = build_parser().parse(argv)
    check_output("--html", args.html)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = gpus if args.ranks is None else args.ranks
    if not 2 <= ranks <= gpus:
        raise ValueError(
            f"overlap needs at least two GPUs, one for each rank: there are {gpus}"
            + (f" for --ranks {ranks}" if args.ranks is not None else "")
        )
    chosen, _ = choose(torch.cuda.get_device_capability(), _HEAD_DIM)
    if chosen.generation != 3:
        raise ValueError(
            f"core attention's kernel is {chosen}, and only FlashAttention 3 can leave "
            "multiprocessors free: there is nothing to tune"
        )
    lines: list[Line] = []
    verify_machine(ranks, ["overlap"], None, lines.append)
    line = lines[-1]
    if line.state != "ok":
        sys.stderr.write(f"{line.text}\n{line.cure}\n")
        return 1
    flag = f"--distca-sm-margin {line.figures['sm_margin']:.0f}"
    sys.stdout.write(f"{line.text}\n{flag}\n")
    if args.html is not None:
        command, figures = f"distca tune overlap {shlex.join(argv)}".rstrip(), dict(line.figures)
        page = tune_page.figures("overlap", command, [flag, line.text], figures, figures)
        html_page.write_page(args.html, page)
    return 0
