"""The chain of `--prefill-strategy runahead` for commands that run it, as `--partition` says."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distca.commands.described import RUNAHEAD, given_shares
from distca.schedule.serving.partitions import Chain, PartitionTable, load_partitions

if TYPE_CHECKING:
    from distca.inference.models import ServedModel
    from distca.schedule.serving.csps.levels import Levels

SEARCHED = "searched"
"""Value of `--partition` by which parts are searched by simulated seconds."""

_LEAST = 512
"""Least length of a prompt whose parts are searched where lengths are not known."""


def served_chain(
    args: argparse.Namespace, model: ServedModel, lengths: Sequence[int] = ()
) -> Chain | None:
    """Returns the chain that owns the tokens of prefills, or None.

    Args:
        args: flags.
        model: model that answers.
        lengths: tokens of the prompts; none: they are not known.

    Raises:
        ValueError: the partition cannot be used.
    """
    from distca.inference.machine import hardware

    ranks = args.context_parallel_size
    shares = given_shares(args, ranks)
    if shares is not None or args.prefill_strategy != RUNAHEAD:
        return None if shares is None else Chain(ranks, shares)
    if args.partition == SEARCHED:
        return Chain(ranks, _searched(args, model, lengths))
    table = load_partitions(Path(args.partition))
    table.check(model.description, hardware(), ranks)
    return Chain(ranks, table)


def _searched(
    args: argparse.Namespace, model: ServedModel, lengths: Sequence[int]
) -> PartitionTable:
    """Returns a table of the prompts' lengths, or of doubling ones, by this machine's simulated
    seconds."""
    from distca.inference.machine import machine_of
    from distca.simulate.serving import searched_table

    ranks = args.context_parallel_size
    # Of a command that has no such flags they are the machine's own.
    measured, speed = (getattr(args, name, None) for name in ("profile", "node_gb_per_s"))
    costs, cost_model = machine_of(measured, speed).costs(model, ranks)
    doubling = [_LEAST << n for n in range(30) if _LEAST << n < model.positions]
    return searched_table(lengths or [*doubling, model.positions], costs, cost_model, ranks)


def tell_of_lengths(
    command: str, chain: Chain | Levels | None, partition: str, lengths: Sequence[int]
) -> None:
    """Says once that prompts are shorter or longer than those of a table, if any are.

    Args:
        command: command that says so.
        chain: chain that owns the prompts' tokens, if there is one.
        partition: file of the table.
        lengths: tokens of the prompts.
    """
    table = chain.partition if isinstance(chain, Chain) else None
    if not isinstance(table, PartitionTable):
        return
    if beyond := [length for length in lengths if not table.covers(length)]:
        sys.stderr.write(
            f"distca {command}: {partition} has partitions of {min(table.shares):,} to "
            f"{max(table.shares):,} tokens, and prompts of {min(beyond):,} to {max(beyond):,} "
            "take the nearest\n"
        )
