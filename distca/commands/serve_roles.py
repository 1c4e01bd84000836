"""Flags of `distca serve` by which some ranks prefill and others decode."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from distca.commands.command_line import Parser
from distca.schedule.serving.cdsp import ImprovementRates, PrefillModel
from distca.schedule.serving.cdsp.strategies import strategy_of

if TYPE_CHECKING:
    from distca.serve.handoff.settings import Roles

EAGER = ImprovementRates({0.0: 0.0})
"""Any improvement is enough, at every load."""


def add_role_flags(parser: Parser) -> None:
    """Adds the flags."""
    roles = parser.add_argument_group("prefill and decode apart")
    roles.add_argument(
        "--prefill-ranks",
        type=int,
        metavar="P",
        help="Ranks that only prefill; --decode-ranks others decode.",
    )
    roles.add_argument(
        "--decode-ranks", type=int, metavar="D", help="Ranks that only decode, each by itself."
    )
    roles.add_argument(
        "--decode-tensor-parallel-size",
        type=int,
        default=1,
        metavar="T",
        help="Processes of each decode rank, which share its layers.",
    )
    roles.add_argument(
        "--prefill-times",
        type=Path,
        metavar="FILE",
        help="Seconds of prefills, by which their ranks are chosen, as this flag wrote them: if "
        "there is no such file, they are measured at the start and kept there.",
    )
    roles.add_argument(
        "--improvement-rates",
        type=Path,
        metavar="FILE",
        help="JSON object of improvement rates by arrivals a second: the part of the time that a "
        "larger group must save; [rate, ranks] bounds groups, too. Default: any improvement is "
        "enough.",
    )
    roles.add_argument(
        "--smallest-chunk",
        type=int,
        default=128,
        metavar="N",
        help="Fewest tokens of a chunk with ranks of its own, before the last one.",
    )
    roles.add_argument(
        "--backends",
        type=int,
        default=4,
        metavar="N",
        help="Prompts that a decode rank receives at a time.",
    )
    roles.add_argument(
        "--handoff-lease",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="Time without a word after which the other side of a hand-off counts as dead.",
    )


def roles_of(args: argparse.Namespace) -> Roles | None:
    """Returns the roles that flags give; None: all ranks do both.

    Raises:
        ValueError: they cannot be used.
    """
    if args.prefill_ranks is None and args.decode_ranks is None:
        return None
    for flag, value in (
        ("--prefill-ranks", args.prefill_ranks),
        ("--decode-ranks", args.decode_ranks),
        ("--decode-tensor-parallel-size", args.decode_tensor_parallel_size),
        ("--smallest-chunk", args.smallest_chunk),
        ("--backends", args.backends),
    ):
        if value is None:
            raise ValueError(f"{flag} is missing: prefill and decode ranks are given together")
        if value < 1:
            raise ValueError(f"{flag} {value}: give at least 1")
    for flag, value in (
        ("--context-parallel-size", args.context_parallel_size),
        ("--tensor-parallel-size", args.tensor_parallel_size),
        ("--nnodes", args.nnodes),
    ):
        if value != 1:
            raise ValueError(
                f"{flag} {value} has no meaning with --prefill-ranks: leave it out, or give "
                "--decode-tensor-parallel-size"
            )
    for flag, given in (
        ("--transport", args.transport not in (None, "gloo", "nccl")),
        ("--attention-servers", args.attention_servers),
    ):
        if given:
            raise ValueError(f"{flag} cannot be given with --prefill-ranks: leave it out")
    if not 0 < args.handoff_lease < float("inf"):
        raise ValueError(f"--handoff-lease {args.handoff_lease}: give more than 0")
    strategy = args.prefill_strategy or "cdsp"
    strategy_of(strategy)
    from distca.serve.handoff.settings import Roles

    times = None
    if args.prefill_times is not None and args.prefill_times.exists():
        from distca.serve.handoff.measure import hardware

        times = PrefillModel.load(args.prefill_times)
        times.check_is_of(hardware(), args.model)
    rates = EAGER
    if args.improvement_rates is not None:
        if not args.improvement_rates.is_file():
            raise ValueError(f"--improvement-rates {args.improvement_rates}: there is no such file")
        rates = ImprovementRates.load(args.improvement_rates)
    return Roles(
        args.prefill_ranks,
        args.decode_ranks,
        args.decode_tensor_parallel_size,
        strategy,
        times,
        rates,
        args.smallest_chunk,
        args.backends,
        args.handoff_lease,
        None if args.prefill_times is None else str(args.prefill_times),
    )
