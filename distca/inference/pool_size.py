"""Sizes of the ranks' pools of keys and values: how many blocks prompts and their answers need."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from distca.inference.models import ServedModel
from distca.schedule.serving.blocks import block_bytes
from distca.schedule.serving.csps.levels import Levels
from distca.schedule.serving.partitions import Chain

DEFAULT_BYTES = 4 * 1024**3
"""Most bytes of a rank's pool where neither a flag nor prompts say how many are needed."""


def bytes_of_block(model: ServedModel, block_size: int) -> int:
    """Returns the bytes of a block on one process, all layers."""
    return block_bytes(model.shape, len(model.windows), block_size)


def blocks_in(nbytes: int, model: ServedModel, block_size: int) -> int:
    """Returns the blocks that fit into bytes of a rank.

    Raises:
        ValueError: not even one fits.
    """
    one = bytes_of_block(model, block_size)
    if nbytes < one:
        raise ValueError(
            f"--kv-cache-memory-bytes {nbytes:,} is less than a block of {block_size} tokens, "
            f"which takes {one:,}: give more, or lower --block-size"
        )
    return nbytes // one


def bytes_needed(
    model: ServedModel,
    lengths: Sequence[int],
    max_tokens: int,
    ranks: int,
    block_size: int,
    chain: Chain | Levels | None = None,
    whole: bool = False,
) -> int:
    """Returns the bytes of each rank in which all prompts and their answers have room together.

    Args:
        model: model that answers.
        lengths: tokens of each prompt.
        max_tokens: most tokens of an answer; the last is never fed.
        ranks: ranks that share each prompt.
        block_size: tokens of a block.
        chain: who shares out prompts; None: in zigzag.
        whole: whether each prompt lies on one rank, with its answer; else all ranks share it.
    """
    blocks = 0
    every = [-(-(length + max_tokens - 1) // block_size) for length in lengths]
    if whole:
        # The rank that has least gets the next one.
        return (-(-sum(every) // ranks) + max(every)) * bytes_of_block(model, block_size)
    for length, all_blocks in zip(lengths, every, strict=True):
        prompt = -(-length // block_size)
        most = -(-prompt // ranks)
        if chain is not None:
            most = int(np.bincount(chain.owners(prompt, 0, length)).max())
        # Decoded blocks go round, beginning anywhere.
        blocks += most + -(-(all_blocks - prompt) // ranks)
    return blocks * bytes_of_block(model, block_size)


def check_stripe(stripe: int, block_size: int) -> None:
    """Checks that a stripe is whole blocks.

    Raises:
        ValueError: it is not.
    """
    if stripe % block_size:
        raise ValueError(
            f"--cp-kv-cache-interleave-size {stripe} is not a multiple of --block-size "
            f"{block_size}: a block lies on one rank"
        )


def check_room(
    model: ServedModel, length: int, max_tokens: int, ranks: int, block_size: int, nbytes: int
) -> None:
    """Checks, before any work, that all ranks together can hold a prompt and its answer.

    Raises:
        ValueError: they cannot; the message has the bytes.
    """
    if ranks_needed(model, length, max_tokens, block_size, nbytes) > ranks:
        blocks = math.ceil((length + max_tokens - 1) / block_size)
        needed = blocks * bytes_of_block(model, block_size)
        raise ValueError(
            f"{length:,} tokens, with an answer of up to {max_tokens:,}, need {needed:,} bytes of "
            f"keys and values, and {ranks} ranks have {nbytes:,} each: raise "
            "--kv-cache-memory-bytes or --context-parallel-size, or lower --max-tokens"
        )


def ranks_needed(
    model: ServedModel, length: int, max_tokens: int, block_size: int, nbytes: int
) -> int:
    """Returns the fewest ranks that can hold a prompt and its answer.

    Raises:
        ValueError: a rank has no room for a block.
    """
    per_rank = blocks_in(nbytes, model, block_size)
    return math.ceil(math.ceil((length + max_tokens - 1) / block_size) / per_rank)
