"""`--context-parallel-size auto`: as few ranks as have room for keys and values (CSPS, Section
3.2.2), for commands that run them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from distca.commands.described import RUNAHEAD, Group

if TYPE_CHECKING:
    from distca.inference.models import ServedModel


AUTO: Literal["auto"] = "auto"

Size = int | Literal["auto"]


def add_ranks_flag(
    group: Group, of_what: str, default: Size | None = None, required: bool = False
) -> None:
    """Adds the flag.

    Args:
        group: group of the flag.
        of_what: whose keys and values the ranks' memory must hold with auto.
        default: number of ranks if the flag is not given.
        required: whether it must be given.
    """
    group.add_argument(
        "--context-parallel-size",
        type=_size,
        metavar="N",
        help=f"Number of ranks that share a prompt. auto: the fewest whose memory holds {of_what}.",
        default=default,
        required=required,
    )


def _size(given: str) -> Size:
    if given == AUTO:
        return AUTO
    try:
        return int(given)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{given!r}: give a number, or {AUTO}") from None


def ranks_for_prompts(args: argparse.Namespace, model: ServedModel, lengths: Sequence[int]) -> int:
    """As few ranks of this machine as have room for the longest prompt and its answer.

    Args:
        args: flags.
        model: model that answers.
        lengths: tokens of the prompts; none: they are not known.

    Raises:
        ValueError: it is not known what there is room for, or all ranks have too little.
    """
    from distca.inference.pool_size import check_room, ranks_needed

    if args.kv_cache_memory_bytes is None or not lengths:
        raise ValueError(
            f"--context-parallel-size {AUTO} needs to know the memory of a rank and the prompts: "
            "give --kv-cache-memory-bytes, and --prompt or --prompt-ids"
        )
    if args.prefill_strategy == RUNAHEAD:
        raise ValueError(
            f"--context-parallel-size {AUTO} does not support {RUNAHEAD}, whose parts are unequal: "
            "give a number"
        )
    most = max(_processes() // args.tensor_parallel_size, 1)
    longest, size, nbytes = max(lengths), args.block_size, args.kv_cache_memory_bytes
    check_room(model, longest, args.max_tokens, most, size, nbytes)
    return ranks_needed(model, longest, args.max_tokens, size, nbytes)


def _processes() -> int:
    """Processes that this machine has GPUs for, or else cores."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return os.cpu_count() or 1
