"""`distca tune partitions`: searches how a chain of ranks shares prompts, and saves a table."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from distca.commands import html_page, tune_groups, tune_overlap, tune_page, tune_sparsity
from distca.commands.command_line import Parser, check_outputs
from distca.commands.engine_flags import (
    add_dtype_flag,
    check_counts,
    check_machine_flags,
    served_dtype,
)
from distca.commands.tune_page import FoundPartition
from distca.plan.span import Floats, Int64s
from distca.progress import Progress, progress, track
from distca.schedule.serving.partitions import (
    Chain,
    PartitionTable,
    Parts,
    SearchedBy,
    Shares,
    cut_prompt,
    even_shares,
    load_partitions,
    search_partition,
)

if TYPE_CHECKING:
    from distca.inference.models import ServedModel
    from distca.inference.rank_processes import RankProcesses


FORMS = {
    "overlap": "multiprocessors that attention leaves to exchanges: prints a flag of training",
    "partitions": "shares of a prompt on each rank of a chain, for --partition",
    "groups": "seconds of prefills on 1, 2, 4, ... ranks, for --prefill-times",
    "sparsity": "what dropping far keys does to answers, for --calibration",
}
"""What the command finds, by the word that follows it."""

_DESCRIPTION = (
    "Searches the partition of a prompt that runahead computes fastest, and saves a table."
)
_EPILOG = """
example:
  distca tune partitions MODEL --context-parallel-size 4 --lengths 8192 16384 --output chain.json
  distca generate MODEL --context-parallel-size 4 --prefill-strategy runahead \\
      --partition chain.json --prompt "The sky is"

By default the search simulates this machine. With `--measure` it starts the ranks and times real
prefills. It keeps what the file already has, so you can interrupt it and go on. Prompts of other
lengths use values in between. Where no chain is faster, one rank computes all tokens.
"""
_WIDTH = 48
_FINEST = 64
"""Part of a prompt that is the last stride of a search on ranks."""


def build_parser() -> Parser:
    """Builds the parser of the command's flags."""
    parser = Parser("tune partitions", _DESCRIPTION, _EPILOG)
    parser.add_argument("model", metavar="MODEL", help="Folder of a Hugging Face model.")
    parser.add_argument(
        "--context-parallel-size",
        type=int,
        required=True,
        metavar="N",
        help="Number of ranks in the chain.",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="T",
        help="Number of processes per rank. They split each layer.",
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[4096, 8192, 16384, 32768, 65536, 131072],
        metavar="TOKENS",
        help="Prompt lengths in tokens. Default: 4,096, 8,192, ..., 131,072.",
    )
    add_dtype_flag(parser)
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="Kernel times from `distca profile`. Default: the speeds of an H100, or of one "
        "core on CPUs.",
    )
    parser.add_argument(
        "--node-gb-per-s",
        type=float,
        metavar="X",
        help="Speed of the link between two ranks in GB/s. Default: NVLink's speed, or that "
        "between CPU processes.",
    )
    parser.add_argument(
        "--measure",
        choices=("cpu", "wall"),
        help="Measure real ranks on this machine. cpu: CPU seconds of the busiest process; "
        "wall: seconds to the first token. Default: simulate instead of measuring.",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="With --measure: number of prefills of each partition. The median counts.",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="File for the table, as JSON."
    )
    html_page.add_flag(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status: 2 if ranks failed.

    Raises:
        ValueError: the flags, the model or the file cannot be used.
        ImportError: a package is missing.
    """
    wanted = f"say what to tune: {', '.join(FORMS)}; distca tune --help explains them"
    if not argv:
        raise ValueError(wanted)
    if argv[0] in ("-h", "--help"):
        sys.stdout.write(_overview())
        return 0
    if argv[0] == "sparsity":
        return tune_sparsity.main(argv[1:])
    if argv[0] == "groups":
        return tune_groups.main(argv[1:])
    if argv[0] == "overlap":
        return tune_overlap.main(argv[1:])
    if argv[0] != "partitions":
        Parser("tune", "", "", tuple(sorted(FORMS))).parse(argv)
        raise ValueError(f"{argv[0]}: {wanted}")
    args = build_parser().parse(argv[1:])
    _check_flags(args)
    args.dtype = served_dtype(args.dtype)
    with progress("distca tune partitions", doing="loads libraries and the model"):
        from distca.inference.machine import hardware
        from distca.inference.models import DTYPES, read_model
        from distca.inference.rank_processes import RankError

        model = read_model(args.model, DTYPES[args.dtype], args.tensor_parallel_size)
    made_for = model.description, hardware(), args.context_parallel_size
    by: SearchedBy = args.measure or "simulated"
    found: dict[int, Shares] = {}
    trials: dict[int, dict[Parts, float]] = {}
    if args.output.exists():
        table = load_partitions(args.output)
        table.check(*made_for)
        if table.by != by:
            raise ValueError(
                f"--output {args.output} has partitions by {table.by} seconds, not {by}: give "
                "another file, or the flags that made it"
            )
        found |= table.shares
        trials |= {tokens: dict(tried) for tokens, tried in table.trials.items()}

    def save() -> None:
        PartitionTable(*made_for, found, by, trials).save(args.output)

    missing = [length for length in sorted({*args.lengths}) if length not in found]
    try:
        if args.measure is None:
            described = _search_simulated(args, model, missing, found, save)
        else:
            described = _search_measured(args, model, missing, found, trials, save)
    except RankError as error:
        sys.stderr.write(f"distca tune: {error}\n")
        return 2
    each = [FoundPartition(tokens, found[tokens], *described(tokens)) for tokens in sorted(found)]
    sys.stdout.write("\n".join(map(_described, each)) + f"\nwritten to {args.output}\n")
    if args.html is not None:
        command, saved = f"distca tune {shlex.join(argv)}", json.loads(args.output.read_text())
        html_page.write_page(args.html, tune_page.partitions(command, each, saved))
    return 0


Described = Callable[[int], tuple[float, float, str]]
"""Tells seconds of a length's found partition and of the even one, and what kind they are."""


def _search_simulated(
    args: argparse.Namespace,
    model: ServedModel,
    lengths: Sequence[int],
    found: dict[int, Shares],
    save: Callable[[], None],
) -> Described:
    """Searches lengths by simulated seconds, and saves after each."""
    from distca.inference.machine import machine_of
    from distca.plan import Mask
    from distca.schedule.serving import nobody_holds, step_plan
    from distca.simulate.serving import searched_shares, simulate_step

    ranks = args.context_parallel_size
    costs, cost_model = machine_of(args.profile, args.node_gb_per_s).costs(model, ranks)
    for length in track(lengths, "distca tune partitions", "lengths"):
        found[length] = searched_shares(length, costs, cost_model, ranks)
        save()

    def seconds(tokens: int, shares: Shares) -> float:
        new = Chain(ranks, shares)(np.zeros(1, dtype=np.int64), np.array([tokens]))
        plan = step_plan(nobody_holds(ranks), new, "pass-kv", Mask(), in_steps=True)
        return simulate_step([plan] * costs.model.layers, costs, cost_model).seconds

    def described(tokens: int) -> tuple[float, float, str]:
        searched, even = (seconds(tokens, each) for each in (found[tokens], even_shares(ranks)))
        return searched, even, "to the first token, simulated"

    return described


def _search_measured(
    args: argparse.Namespace,
    model: ServedModel,
    lengths: Sequence[int],
    found: dict[int, Shares],
    trials: dict[int, dict[Parts, float]],
    save: Callable[[], None],
) -> Described:
    """Searches lengths on ranks, and saves after each partition that they have run."""
    from distca.attention.choice import default_block_size
    from distca.inference.defaults import configure
    from distca.inference.pool_size import bytes_needed
    from distca.inference.rank_processes import RankProcesses

    ranks = args.context_parallel_size
    kind = {"cpu": "of CPU on the busiest process", "wall": "to the first token"}[args.measure]

    def described(tokens: int) -> tuple[float, float, str]:
        tried = trials[tokens]
        even = tuple(cut_prompt(tokens, even_shares(ranks)).tolist())
        return min(tried.values()), tried[even], f"{kind}, measured"

    if not lengths:
        return described
    if max(lengths) > model.positions:
        raise ValueError(
            f"--lengths {max(lengths)}: the model has {model.positions:,} positions: give less"
        )
    size, longest = default_block_size(), max(lengths)
    config = configure(
        model,
        ranks,
        block_size=size,
        # Each rank may have all tokens.
        cache_bytes=bytes_needed(model, [longest], 1, 1, size),
        max_num_batched_tokens=max(longest, 2048),
    )
    with RankProcesses(config) as processes:
        # The first one warms up.
        processes.time_prefill(tuple(cut_prompt(min(lengths), even_shares(ranks)).tolist()))
        for length in lengths:
            tried = trials.setdefault(length, {})
            with progress(
                "distca tune partitions",
                "partitions",
                done=len(tried),
                doing=f"{length:,} tokens",
            ) as shown:

                def noted(shown: Progress = shown) -> None:
                    shown.update()
                    save()

                how = processes, args.measure, args.rounds, tried, noted
                seconds = partial(_measured_seconds, *how)
                finest = max(length // _FINEST, 1)
                parts = search_partition(length, ranks, seconds, finest, few=True)
            found[length] = tuple(float(part) / length for part in parts)
            save()
    return described


def _measured_seconds(
    ranks: RankProcesses,
    by: Literal["cpu", "wall"],
    rounds: int,
    tried: dict[Parts, float],
    noted: Callable[[], None],
    partitions: Int64s,
) -> Floats:
    """Runs each partition that was not tried; returns the seconds of all, float64 `[partitions]`.

    Args:
        ranks: ranks that run.
        by: "cpu" for the most CPU seconds of a process, "wall" for those to the first token.
        rounds: prefills of a partition, whose median counts.
        tried: seconds of the partitions that were run, which grow.
        noted: function that is called after each partition.
        partitions: tokens of each rank's part, int64 `[partitions, ranks]`.
    """
    which = ("cpu", "wall").index(by)
    every: list[Parts] = [tuple(map(int, parts)) for parts in partitions]
    for parts in every:
        if parts not in tried:
            times = [ranks.time_prefill(parts)[which] for _ in range(rounds)]
            tried[parts] = statistics.median(times)
            noted()
    return np.array([tried[parts] for parts in every])


def _described(found: FoundPartition) -> str:
    """Returns a partition beside the even one, as a line of figures and a bar of each."""
    parts = " ".join(f"{share:.3f}" for share in found.shares)
    alone = "; one rank is as fast as a chain" if found.shares[0] == 1 else ""
    return (
        f"{found.tokens:,} tokens: {found.seconds:.4g} s {found.kind}, {found.even:.4g} s with "
        f"even parts{alone}\n"
        f"  searched {_bar(found.shares)} {parts}\n"
        f"  even     {_bar(even_shares(len(found.shares)))}"
    )


def _bar(shares: Sequence[float]) -> str:
    """Returns a bar of the parts, each with its rank's number in the chain."""
    cuts = np.round(np.cumsum([0.0, *shares]) * _WIDTH).astype(int)
    parts = [
        str(number).ljust(end - begin, "-")[: end - begin]
        for number, (begin, end) in enumerate(pairwise(cuts))
    ]
    return f"|{'|'.join(parts)}|"


def _overview() -> str:
    """Returns the help of all forms together."""
    width = max(map(len, FORMS))
    return "\n".join(
        (
            "usage: distca tune FORM ...",
            "",
            "Measures settings on this machine. Forms:",
            "",
            *(f"  {name:{width}}  {what}" for name, what in FORMS.items()),
            "",
            "`distca tune FORM --help` explains each.",
            "",
        )
    )


def _check_flags(args: argparse.Namespace) -> None:
    ranks = args.context_parallel_size
    if ranks < 2:
        raise ValueError(f"--context-parallel-size {ranks}: a chain has at least 2 ranks")
    if min(args.lengths) < ranks:
        raise ValueError(f"--lengths {min(args.lengths)}: give at least a token for each rank")
    check_machine_flags(args)
    check_counts(args, "rounds")
    if args.measure and (args.profile is not None or args.node_gb_per_s is not None):
        raise ValueError("--profile and --node-gb-per-s are for simulated seconds, not --measure")
    check_outputs(args, "--output", "--html")
