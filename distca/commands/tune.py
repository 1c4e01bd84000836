"""`distca tune partitions`: searches how a chain of ranks shares prompts, and saves a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from distca.commands.command_line import Parser, check_output
from distca.cost.profile import Profile

_EPILOG = """
example:
  distca tune partitions MODEL --context-parallel-size 4 --lengths 8192 16384 --output chain.json
  distca generate MODEL --context-parallel-size 4 --prefill-strategy runahead \\
      --partition chain.json --prompt "The sky is"

The search simulates this machine, by `--profile` where it is given. Lengths that the file has
already are kept, so an interrupted search goes on. Prompts of other lengths take what lies between.
"""
_WIDTH = 48


def build_parser() -> Parser:
    """Builds the parser of the command's flags."""
    parser = Parser("tune", __doc__.splitlines()[0], _EPILOG)
    parser.add_argument("what", choices=("partitions",), help="What is searched.")
    parser.add_argument("model", metavar="MODEL", help="Folder of a model of transformers.")
    parser.add_argument(
        "--context-parallel-size", type=int, required=True, metavar="N", help="Ranks of the chain."
    )
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="T", help="Processes of a rank."
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[4096, 8192, 16384, 32768, 65536, 131072],
        metavar="TOKENS",
        help="Lengths of prompts. Default: 4,096 to 131,072, each twice the one before.",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="Of weights and rows."
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="Kernel times that `distca profile` measured. Default: rates of an H100, or of a core "
        "on CPUs.",
    )
    parser.add_argument(
        "--node-gb-per-s",
        type=float,
        metavar="X",
        help="Speed of a rank's link to another. Default: NVLink's, or what processes reach.",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="The table, as JSON."
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status.

    Raises:
        ValueError: the flags, the model or the file cannot be used.
        ImportError: a package is missing.
    """
    args = build_parser().parse(argv)
    _check_flags(args)
    import torch

    from distca.schedule.serving.partitions import PartitionTable, Shares, load_partitions
    from distca.serve.models import DTYPES, model_size, read_model
    from distca.serve.selection import Machine, hardware
    from distca.simulate.serving import InferenceCosts, searched_shares

    model = read_model(args.model, DTYPES[args.dtype], args.tensor_parallel_size)
    profile = None if args.profile is None else Profile.load(args.profile)
    machine = Machine.described(torch.cuda.is_available(), args.node_gb_per_s, profile)
    costs = InferenceCosts(
        model_size(model),
        machine.of_ranks(args.context_parallel_size * args.tensor_parallel_size),
        args.tensor_parallel_size,
        model.dtype.itemsize,
    )
    if profile is not None and profile.shape != costs.shape:
        raise ValueError(
            f"--profile {args.profile} was measured for {profile.shape}, but a rank has "
            f"{costs.shape}: run `distca profile` with these heads"
        )
    cost_model = profile or costs.cluster.inference_cost(costs.shape)
    ranks, found = args.context_parallel_size, dict[int, Shares]()
    if args.output.exists():
        table = load_partitions(args.output)
        table.check(model.description, hardware(), ranks)
        found = dict(table.shares)
    missing = [length for length in sorted(set(args.lengths)) if length not in found]
    for length in tqdm(missing, unit="length", disable=not sys.stderr.isatty()):
        found[length] = searched_shares(length, costs, cost_model, ranks)
        PartitionTable(model.description, hardware(), ranks, found).save(args.output)
    lines = [_described(length, found[length], costs, cost_model) for length in sorted(found)]
    sys.stdout.write("\n".join(lines) + f"\nwritten to {args.output}\n")
    return 0


def _described(tokens: int, shares: tuple[float, ...], costs: Any, cost_model: Any) -> str:
    """A partition beside the even one, as a line of figures and a bar of each."""
    from distca.plan import Mask
    from distca.schedule.serving import nobody_holds, step_plan
    from distca.schedule.serving.partitions import Chain, even_shares
    from distca.simulate.serving import simulate_step

    ranks, seconds = len(shares), []
    start, end = np.zeros(1, dtype=np.int64), np.array([tokens], dtype=np.int64)
    for partition in (shares, even_shares(ranks)):
        new = Chain(ranks, partition)(start, end)
        plan = step_plan(nobody_holds(ranks), new, "pass-kv", Mask(), in_steps=True)
        step = simulate_step([plan] * costs.model.layers, costs, cost_model)
        seconds.append(step.seconds)
    parts = " ".join(f"{share:.3f}" for share in shares)
    return (
        f"{tokens:,} tokens: first one after {seconds[0]:.4g} s, {seconds[1]:.4g} s with even "
        f"parts (simulated)\n  searched {_bar(shares)} {parts}\n  even     "
        f"{_bar(even_shares(ranks))}"
    )


def _bar(shares: Sequence[float]) -> str:
    """A bar of the parts, each with its rank's number in the chain."""
    cuts = np.round(np.cumsum([0.0, *shares]) * _WIDTH).astype(int)
    parts = [
        str(number).ljust(end - begin, "-")[: end - begin]
        for number, (begin, end) in enumerate(pairwise(cuts))
    ]
    return f"|{'|'.join(parts)}|"


def _check_flags(args: argparse.Namespace) -> None:
    ranks = args.context_parallel_size
    if ranks < 2:
        raise ValueError(f"--context-parallel-size {ranks}: a chain has at least 2 ranks")
    if min(args.lengths) < ranks:
        raise ValueError(f"--lengths {min(args.lengths)}: give at least a token for each rank")
    if args.node_gb_per_s is not None and not 0 < args.node_gb_per_s < float("inf"):
        raise ValueError(f"--node-gb-per-s {args.node_gb_per_s}: give a speed above 0")
    check_output("--output", args.output)
