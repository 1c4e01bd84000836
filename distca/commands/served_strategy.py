"""What travels in prefills, and who owns a prompt's tokens, as the flags say.

`--partition` says the parts of the chain of `runahead`. By `--prefill-strategy sp-tp` ranks that
split the weights share rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from distca.commands.chosen_sparsity import chosen_sparsity
from distca.commands.described import RUNAHEAD, check_selector, given_shares
from distca.commands.rank_groups import ranks_per_machine
from distca.commands.served_sparsity import near_to_far
from distca.schedule.serving.balanced import NAME as TILES
from distca.schedule.serving.batches import PrefillStrategy
from distca.schedule.serving.csps.layouts import LayoutChoice, SplitModel
from distca.schedule.serving.csps.pipeline import NearToFar
from distca.schedule.serving.partitions import Chain, PartitionTable, load_partitions
from distca.schedule.serving.steps import Strategy

if TYPE_CHECKING:
    from distca.inference.models import ServedModel
    from distca.schedule.serving.csps.levels import Levels

SP_TP = "sp-tp"
"""Strategy of prefills by which rows are shared by sequence between blocks whose weights are split
(CSPS)."""

SP_NTP: Literal["sp-ntp"] = "sp-ntp"

SEARCHED = "searched"
"""Value of `--partition` by which parts are searched by simulated seconds."""

_LEAST = 512
"""Least length of a prompt whose parts are searched where lengths are not known."""


def served_strategy(
    args: argparse.Namespace, model: ServedModel, longest: int | None = None
) -> PrefillStrategy:
    """Returns what travels in prefills, or who chooses it.

    Args:
        args: flags.
        model: model that computes.
        longest: tokens of the longest prompt; None: it is not known.

    Raises:
        ValueError: the flags contradict each other, or don't fit the model or the ranks.
    """
    check_selector(args)
    ranks = args.context_parallel_size
    heads = model.kv_heads, model.tensor_parallel_size
    chosen = partial(chosen_sparsity, args, model, longest)
    near = near_to_far(args, model.windows, *heads, ranks, ranks, chosen)
    if near is not None:
        return near
    if args.prefill_strategy in (RUNAHEAD, SP_TP):
        return "pass-kv"
    if args.prefill_strategy not in ("auto", TILES):
        return cast(Strategy, args.prefill_strategy)
    from distca.inference.machine import machine_of

    machine = machine_of(args.profile, args.node_gb_per_s)
    ranks += getattr(args, "attention_servers", 0)
    if args.prefill_strategy == TILES:
        if getattr(args, "even_out", False):
            raise ValueError(
                f"--prefill-strategy {TILES} leaves each prompt on one rank, and --even-out moves "
                "its blocks to others: leave one out"
            )
        return machine.tiles(model.shape, ranks, ranks_per_machine(model))
    # What a choice takes must not be much of a small chunk.
    return machine.selector(args.selector, model.shape, ranks, hurried=len(model.windows))


def served_owners(
    args: argparse.Namespace,
    model: ServedModel,
    strategy: PrefillStrategy,
    lengths: Sequence[int] = (),
) -> Chain | Levels | None:
    """Returns who shares out prompts, a chain or levels; None: all ranks evenly, in zigzag.

    Args:
        args: flags.
        model: model that computes.
        strategy: what travels; see `served_strategy`.
        lengths: tokens of the prompts; none: they are not known.

    Raises:
        ValueError: the partition cannot be used.
    """
    chain = served_chain(args, model, lengths)
    return strategy.levels if isinstance(strategy, NearToFar) else chain


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


def layout_choice(
    strategy: str, selector: str, ranks: int, tensor_parallel_size: int
) -> LayoutChoice | None:
    """How processes that split weights share the rows of prefills; None: they don't.

    Args:
        strategy: value of `--prefill-strategy`.
        selector: who chooses with auto.
        ranks: ranks that have tokens each.
        tensor_parallel_size: processes of each.

    Raises:
        ValueError: nothing is split.
    """
    if strategy == SP_TP and ranks > 1:
        raise ValueError(
            f"--prefill-strategy {SP_TP} shares a prompt among processes that split the weights: "
            f"give --tensor-parallel-size {ranks * tensor_parallel_size} and "
            "--context-parallel-size 1"
        )
    if ranks > 1 or tensor_parallel_size == 1:
        return None
    if strategy == "auto":
        return "paper" if selector == "paper" else "bytes"
    return next((each for each in (SP_NTP, "sp-tp") if each == strategy), None)


def served_split(args: argparse.Namespace, model: ServedModel) -> SplitModel | None:
    """Returns the layers whose rows are shared as the flags say, or None.

    Raises:
        ValueError: the flags ask for what there is not.
    """
    from distca.inference.sequence_parallel import split_model

    ranks = args.context_parallel_size + getattr(args, "attention_servers", 0)
    choice = layout_choice(args.prefill_strategy, args.selector, ranks, args.tensor_parallel_size)
    return None if choice is None else split_model(model, choice)
