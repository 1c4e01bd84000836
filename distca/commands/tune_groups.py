"""`distca tune groups`: measures prefills on groups of ranks, and saves their times."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from distca.commands import html_page, tune_page
from distca.commands.command_line import Parser, check_outputs
from distca.commands.engine_flags import add_dtype_flag, check_counts, served_dtype
from distca.progress import progress, track
from distca.schedule.serving.cdsp import Prefill, PrefillModel, Search, published_model
from distca.schedule.serving.cdsp.growing import GrowingGroups
from distca.wording import counted

_EPILOG = """
example:
  distca tune groups MODEL --context-parallel-size 4 --output times.json
  distca prefill MODEL --context-parallel-size 4 --rank-groups cdsp --prefill-times times.json

Prompts of several lengths run alone on 1, 2, 4, ... ranks of this machine. Their seconds are fitted
to Eq. 1 of Tetris.
"""

_STRIDE = 64
"""Stride of lengths in the search for the shortest prompt that is worth sharing out."""


def build_parser() -> Parser:
    """Builds the parser of the command's flags."""
    parser = Parser("tune groups", __doc__.splitlines()[0], _EPILOG)
    parser.add_argument("model", metavar="MODEL", help="Folder of a Hugging Face model.")
    parser.add_argument(
        "--context-parallel-size",
        type=int,
        required=True,
        metavar="N",
        help="Number of ranks, each a process on this machine. Groups of 1, 2, 4, ... ranks "
        "are measured.",
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        metavar="TOKENS",
        help="Prompt lengths in tokens, at least three. Default: 1/8, 1/4, 1/2 and all of the "
        "model's positions, or of 131,072 if the model has more.",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="Number of prefills of each length on each group size. The median counts. Default: 3.",
    )
    add_dtype_flag(parser)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="File for the times, as JSON."
    )
    html_page.add_flag(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status: 2 if ranks failed.

    Raises:
        ValueError: the flags or the model cannot be used.
        ImportError: a package is missing.
    """
    args = build_parser().parse(argv)
    _check_flags(args)
    args.dtype = served_dtype(args.dtype)
    with progress("distca tune groups", doing="loads libraries and the model"):
        from distca.attention.choice import default_block_size
        from distca.inference.defaults import configure
        from distca.inference.machine import hardware
        from distca.inference.models import DTYPES, read_model
        from distca.inference.pool_size import bytes_needed
        from distca.inference.rank_processes import RankError, RankProcesses

        model = read_model(args.model, DTYPES[args.dtype])
    lengths = sorted({*(args.lengths or _lengths(model.positions))})
    if lengths[-1] > model.positions:
        raise ValueError(
            f"--lengths {lengths[-1]}: the model has {model.positions:,} positions: give less"
        )
    ranks, size = args.context_parallel_size, default_block_size()
    config = configure(
        model,
        ranks,
        # Groups are given, whatever these times say.
        growing=GrowingGroups(Search(published_model())),
        block_size=size,
        # The smallest group has all tokens on one rank.
        cache_bytes=bytes_needed(model, [lengths[-1]], 1, 1, size),
        max_num_batched_tokens=max(lengths[-1], 2048),
    )
    degrees = [1 << n for n in range(ranks.bit_length()) if 1 << n <= ranks]
    prefills = [(degree, tokens) for degree in degrees for tokens in lengths]
    measured = []
    try:
        with ExitStack() as held:
            with progress("distca tune groups", doing=f"starts {counted(ranks, 'rank')}"):
                processes = held.enter_context(RankProcesses(config))
            for degree, tokens in track(prefills, "distca tune groups", "prefills"):
                if tokens == lengths[0]:
                    # The first prompt of a group warms up.
                    processes.time_group(degree, tokens)
                seconds = [processes.time_group(degree, tokens) for _ in range(args.rounds)]
                measured.append(Prefill(degree, tokens, statistics.median(seconds)))
    except RankError as error:
        sys.stderr.write(f"distca tune: {error}\n")
        return 2
    times = PrefillModel.fit(measured, hardware(), model.description)
    times.save(args.output)
    fitted = [times.seconds(each.degree, 0, each.tokens) for each in measured]
    for each, fit in zip(measured, fitted, strict=True):
        sys.stdout.write(
            f"{each.tokens:,} tokens on {each.degree} rank{'s' * (each.degree > 1)}: "
            f"{each.seconds:.4g} s, fitted {fit:.4g} s\n"
        )
    advice = _advice(times, lengths[-1])
    if doubt := unlike(measured, fitted):
        advice = f"{doubt}\n{advice}"
    sys.stdout.write(f"written to {args.output}\n{advice}\n")
    if args.html is not None:
        command = f"distca tune groups {shlex.join(argv)}"
        saved = json.loads(args.output.read_text())
        page = tune_page.groups(command, measured, fitted, advice, saved)
        html_page.write_page(args.html, page)
    return 0


_FAR_OFF = 0.25
"""Relative error of the fit from which it is noticed."""


def unlike(measured: Sequence[Prefill], fitted: Sequence[float]) -> str | None:
    """Says that the fit is far from what was measured; None: it is not."""
    errors = [abs(fit / each.seconds - 1) for each, fit in zip(measured, fitted, strict=True)]
    worst = max(range(len(errors)), key=errors.__getitem__)
    if errors[worst] < _FAR_OFF:
        return None
    where = measured[worst]
    return (
        f"the fit is {errors[worst]:.0%} off for {where.tokens:,} tokens on "
        f"{counted(where.degree, 'rank')}: "
        "choices by it may be wrong; measure again on an idle machine, or with other --lengths"
    )


def worth_sharing(times: PrefillModel, degree: int, positions: int) -> int | None:
    """Finds from which length on a group is faster than one rank.

    Args:
        times: seconds of prefills.
        degree: ranks of the group.
        positions: most tokens of a prompt.

    Returns:
        Tokens, a multiple of 64 but for the longest prompt; None: no prompt is faster.
    """
    found = None
    for tokens in (positions, *range(positions // _STRIDE * _STRIDE, 0, -_STRIDE)):
        if times.seconds(degree, 0, tokens) >= times.seconds(1, 0, tokens):
            break
        found = tokens
    return found


def _advice(times: PrefillModel, longest: int) -> str:
    """Says which prompts are worth sharing out, of those up to the longest that was measured."""
    degree = times.degrees[-1]
    if degree == 1:
        return "one rank shares nothing: measure more ranks to learn which prompts gain"
    tokens = worth_sharing(times, degree, longest)
    if tokens is None:
        return f"no prompt of up to {longest:,} tokens is faster on {degree} ranks than on one here"
    return (
        f"from {tokens:,} tokens on {degree} ranks are faster than one: distca_min_tokens "
        f"{tokens} of vLLM's connector, if vLLM's own prefill is as fast as one rank"
    )


def _lengths(positions: int) -> list[int]:
    """Returns the default lengths of prompts, by the model's positions."""
    # The token that follows needs a position, too.
    most = min(positions - 1, 131072)
    return [max(most // part, number + 1) for number, part in enumerate((8, 4, 2, 1))]


def _check_flags(args: argparse.Namespace) -> None:
    check_counts(args, "context_parallel_size", "rounds")
    if args.lengths is not None:
        if min(args.lengths) < 1:
            raise ValueError(f"--lengths {min(args.lengths)}: give at least 1")
        if len({*args.lengths}) < 3:
            raise ValueError("--lengths: give at least three, so that times can be fitted")
    check_outputs(args, "--output", "--html")
