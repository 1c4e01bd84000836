"""Prefills from near to far, `--prefill-strategy csps`, for commands that run or plan them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from distca.commands.command_line import Parser
from distca.commands.described import Group
from distca.cost.link import Links
from distca.schedule.serving.csps import LEVELS, NODE_PARTS, Levels, Sparsity
from distca.schedule.serving.csps.configure import Configuration, Partitions
from distca.schedule.serving.csps.pipeline import NAME, NearToFar

CSPS = NAME
"""Strategy of prefills by which keys travel from near to far, and of far ones only some."""

_FLAGS = (
    *("sparsity", "calibration", "micro_partitions"),
    *("max_degradation", "max_recall_loss", "max_ttft"),
    *("ranks_per_node", "nodes_per_rack", "node_parts"),
)

Chosen = Callable[[Levels, Partitions | None], Configuration | None]
"""Chooses a sparsity for levels, and micro-partitions where none are given, or None."""


def add_sparsity_flags(group: Group) -> None:
    """Adds the flags of `near_to_far`."""
    group.add_argument(
        "--sparsity",
        metavar="FILE|P|P,Q",
        help="What csps drops. P: share of the keys on other ranks of the node; each farther "
        "level keeps half as much. Q: share of the queries that skip the keys of this level; "
        "the last token's query skips none. FILE: shares by layer, head and level. Default: 0, "
        "nothing.",
    )
    group.add_argument(
        "--micro-partitions",
        metavar="M",
        help="Number of parts in which csps sends the keys of a level. Each part is sent while "
        "kernels compute with the part before. One number, or one for each level, such as 4,2. "
        "Default: 2.",
    )
    group.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="For csps: number of ranks per node. Default: the ranks of a machine.",
    )
    group.add_argument(
        "--nodes-per-rack",
        type=int,
        metavar="N",
        help="For csps: number of nodes per rack. Default: one rack has all nodes.",
    )
    add_node_parts_flag(group)


def add_node_parts_flag(group: Group | Parser) -> None:
    """Adds the flag of a node's parts."""
    group.add_argument(
        "--node-parts",
        choices=NODE_PARTS,
        help="How csps divides a node's tokens among its ranks. zigzag: equal work; "
        "contiguous: fewer keys are sent inside the node. Default: zigzag.",
    )


def near_to_far(
    args: argparse.Namespace,
    windows: Sequence[int | None],
    kv_heads: int,
    tensor_parallel_size: int,
    ranks: int,
    ranks_of_machine: int,
    chosen: Chosen = lambda *_: None,
) -> NearToFar | None:
    """Returns the strategy that the flags describe; None: it is another than csps.

    Args:
        args: flags.
        windows: for each layer how many earlier tokens a query sees; None: all.
        kv_heads: key-value heads of a layer.
        tensor_parallel_size: ranks that share them; the ratios have each one's own heads.
        ranks: ranks that share tokens.
        ranks_of_machine: those of one machine.
        chosen: what a calibration chooses.

    Raises:
        ValueError: the flags contradict each other, or don't fit the model or the ranks.
    """
    given = [name for name in _FLAGS if getattr(args, name, None) is not None]
    if args.prefill_strategy != CSPS:
        if given:
            flag = "--" + given[0].replace("_", "-")
            raise ValueError(f"{flag} {getattr(args, given[0])} needs --prefill-strategy {CSPS}")
        return None
    per_node = ranks_of_machine if args.ranks_per_node is None else args.ranks_per_node
    links = Links(per_node, nodes_per_rack=args.nodes_per_rack)
    levels = Levels(links, ranks, args.node_parts or NODE_PARTS[0])
    partitions = None if args.micro_partitions is None else _partitions(args.micro_partitions)
    found = chosen(levels, partitions)
    if found is not None:
        sparsity, partitions = found.sparsity, found.partitions
    else:
        sparsity = _sparsity(args.sparsity or "0", len(windows), kv_heads)
    of_ranks = sparsity.repeated(tensor_parallel_size)
    return NearToFar(levels, of_ranks, tuple(windows), partitions or (2,))


def refuse_check(args: argparse.Namespace, strategy: object) -> None:
    """Refuses `--check` where rows are dropped.

    Raises:
        ValueError: they are.
    """
    if args.check and isinstance(strategy, NearToFar) and strategy.sparsity.drops:
        raise ValueError(
            "--check holds answers against dense attention, but "
            f"--sparsity {args.sparsity or args.calibration} drops keys: leave one out, or give "
            "--sparsity 0"
        )


def _sparsity(given: str, layers: int, kv_heads: int) -> Sparsity:
    try:
        drop, *of_queries = map(float, given.split(",", 1))
    except ValueError:
        sparsity = Sparsity.load(Path(given))
        sparsity.check_fits(layers, kv_heads)
        return sparsity
    try:
        return Sparsity.of_drop_ratio(drop, layers, kv_heads, len(LEVELS), *of_queries)
    except ValueError as error:
        raise ValueError(f"--sparsity {given}: {error}") from error


def _partitions(given: str) -> tuple[int, ...]:
    try:
        found = tuple(int(each) for each in given.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ValueError(
            f"--micro-partitions {given}: give a number of at least 1, or one for each level: 4,2"
        )
    return found
