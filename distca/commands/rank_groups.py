"""Which ranks share a prompt, for commands that run prefills: all, or groups that grow (Tetris)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from distca.commands.described import Group
from distca.schedule.serving.balanced import NAME as TILES
from distca.schedule.serving.cdsp import ImprovementRates, PrefillModel, Search
from distca.schedule.serving.cdsp.growing import GrowingGroups

if TYPE_CHECKING:
    from distca.inference.models import ServedModel

ALL = "all"
"""Value of `--rank-groups` by which all ranks share each prompt."""

_SMALLEST = 128
"""Default of `--smallest-chunk`."""

_STRATEGIES = ("pass-kv", "pass-q", "auto")
"""Values of `--prefill-strategy` that share a prompt among any ranks."""


def add_group_flags(group: Group) -> None:
    """Adds the flags of `served_groups`."""
    group.add_argument(
        "--rank-groups",
        default=ALL,
        metavar="NAME",
        help="Which ranks share a prompt. all: all ranks; fixed-N: the group of N ranks that "
        "is free first; greedy: the group of any size that finishes first; single-chunk: as "
        "greedy, but a larger group must save the share of time in --improvement-rates; cdsp: "
        "as single-chunk, but a prompt is computed in chunks, and the group grows from chunk "
        "to chunk. Default: all.",
    )
    group.add_argument(
        "--prefill-times",
        type=Path,
        metavar="FILE",
        help="Prefill times from `distca tune groups`. --rank-groups requires them.",
    )
    group.add_argument(
        "--improvement-rates",
        type=Path,
        metavar="FILE",
        help="File with a JSON object of improvement rates by arrivals per second. An "
        "improvement rate is the share of the time to the first token that a larger group must "
        "save. The value [rate, ranks] also limits the ranks of a group. Default: any "
        "improvement counts.",
    )
    group.add_argument(
        "--smallest-chunk",
        type=int,
        metavar="N",
        help="With --rank-groups cdsp: minimum number of tokens in each chunk except the last "
        "one. Default: 128.",
    )


def served_groups(args: argparse.Namespace, model: ServedModel) -> GrowingGroups | None:
    """Returns how prompts get ranks of their own; None: all ranks share each prompt.

    Args:
        args: flags of `add_group_flags`, and those of the ranks and the strategy.
        model: model that computes.

    Raises:
        ValueError: the flags contradict each other, or the times are of another model or machine.
    """
    from distca.inference.machine import hardware

    if args.rank_groups == ALL:
        for flag, value in (
            ("--prefill-times", args.prefill_times),
            ("--improvement-rates", args.improvement_rates),
            ("--smallest-chunk", args.smallest_chunk),
        ):
            if value is not None:
                raise ValueError(f"{flag} {value} needs --rank-groups, such as --rank-groups cdsp")
        return None
    if args.prefill_strategy not in _STRATEGIES:
        does = "leaves each prompt on one rank"
        if args.prefill_strategy != TILES:
            does = "shares each prompt among all ranks"
        raise ValueError(
            f"--prefill-strategy {args.prefill_strategy} {does}, and --rank-groups "
            f"{args.rank_groups} does not: give one of {', '.join(_STRATEGIES)}"
        )
    if getattr(args, "even_out", False):
        raise ValueError(f"--even-out has no meaning with --rank-groups {args.rank_groups}")
    smallest = _SMALLEST if args.smallest_chunk is None else args.smallest_chunk
    if smallest < 1:
        raise ValueError(f"--smallest-chunk {smallest}: give at least 1")
    if args.prefill_times is None:
        raise ValueError(
            f"--rank-groups {args.rank_groups} needs --prefill-times FILE: measure them by "
            f"`distca tune groups {args.model} --context-parallel-size "
            f"{args.context_parallel_size} --output FILE`"
        )
    for flag, path in (
        ("--prefill-times", args.prefill_times),
        ("--improvement-rates", args.improvement_rates),
    ):
        if path is not None and not path.is_file():
            raise ValueError(f"{flag} {path}: there is no such file")
    rates = None
    with _naming("--prefill-times", args.prefill_times):
        times = PrefillModel.load(args.prefill_times)
        times.check_is_of(hardware(), model.description)
    if args.improvement_rates is not None:
        with _naming("--improvement-rates", args.improvement_rates):
            rates = ImprovementRates.load(args.improvement_rates)
    with _naming("--rank-groups", args.rank_groups):
        growing = GrowingGroups(
            Search(times, smallest_chunk=smallest),
            args.rank_groups,
            ranks_per_machine(model),
            rates,
        )
        growing.check(args.context_parallel_size)
    return growing


def ranks_per_machine(model: ServedModel) -> int | None:
    """Returns the ranks of a machine, where torchrun's lie on several; None: one machine has all.

    Raises:
        ValueError: a rank lies on two machines.
    """
    from distca.torchrun import read_torchrun

    launched = read_torchrun()
    if launched is None or launched.machines == 1:
        return None
    processes, size = launched.local_world_size, model.tensor_parallel_size
    if processes % size:
        raise ValueError(
            f"{processes} processes a machine are not whole ranks of {size}: start a multiple of "
            "--tensor-parallel-size on each machine"
        )
    return processes // size


@contextmanager
def _naming(flag: str, value: object) -> Iterator[None]:
    """Puts a flag and its value before what is wrong with it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{flag} {value}: {error}") from error
