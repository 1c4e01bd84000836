"""What travels in prefills, and who owns a prompt's tokens, as the flags say."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from distca.commands.chosen_sparsity import chosen_sparsity
from distca.commands.described import RUNAHEAD
from distca.commands.rank_groups import ranks_per_machine
from distca.commands.served_chain import served_chain
from distca.commands.served_layouts import SP_TP
from distca.commands.served_sparsity import near_to_far
from distca.schedule.serving.balanced import NAME as TILES
from distca.schedule.serving.batches import PrefillStrategy
from distca.schedule.serving.csps.pipeline import NearToFar
from distca.schedule.serving.steps import Strategy

if TYPE_CHECKING:
    from distca.inference.models import ServedModel
    from distca.schedule.serving.csps.levels import Levels
    from distca.schedule.serving.partitions import Chain


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
