"""Sizes of the ranks' pools of keys and values: how many blocks, and what has room in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distca.inference.models import ServedModel
from distca.inference.step_planner import StepPlanner
from distca.schedule.serving import Sharding
from distca.schedule.serving.accounts import block_bytes
from distca.schedule.serving.blocks import BlockPool
from distca.schedule.serving.csps.head_scatter import head_groups
from distca.schedule.serving.csps.layouts import SplitModel

BLOCK_SIZE = 256
"""Rows of a block by default: FlashAttention 2 reads blocks of its multiples alone."""

DEFAULT_BYTES = 4 * 1024**3
"""Most bytes of a rank's pool where neither a flag nor prompts say how many are needed."""


@dataclass(frozen=True)
class Sharing:
    """Who holds which tokens of sequences.

    Attributes:
        world_size: ranks.
        stripe: consecutive positions that one rank owns in decoding.
        sharding: who owns the new tokens of prefills; None: all ranks evenly, in zigzag.
        restripes: whether rows move after prefills, so that all ranks hold equal shares.
        split: layers whose weights processes split, if they share the rows of prefills.
    """

    world_size: int
    stripe: int
    sharding: Sharding | None = None
    restripes: bool = False
    split: SplitModel | None = None


@dataclass(frozen=True)
class PoolSize:
    """Blocks of each rank's pool.

    Attributes:
        blocks: blocks of a rank.
        block_size: rows of a block.
    """

    blocks: int = 64
    block_size: int = BLOCK_SIZE

    @staticmethod
    def of_bytes(nbytes: int, block_size: int, model: ServedModel) -> PoolSize:
        """As many blocks as fit into so many bytes of a rank.

        Raises:
            ValueError: not even one fits.
        """
        one = block_bytes(model.shape, len(model.windows), block_size)
        if nbytes < one:
            raise ValueError(
                f"--kv-cache-memory-bytes {nbytes:,} is less than a block of {block_size} tokens, "
                f"which takes {one:,}: give more, or lower --block-size"
            )
        return PoolSize(nbytes // one, block_size)

    def planner(self, model: ServedModel, sharing: Sharing) -> StepPlanner:
        """Makes a planner of steps over empty pools of this size.

        Raises:
            ValueError: the stripe does not divide a block.
        """
        check_stripe(sharing.stripe, self.block_size)
        pool = BlockPool(sharing.world_size, self.blocks, self.block_size)
        how = sharing.stripe, sharing.sharding, sharing.restripes
        groups = head_groups(model.shape.heads, model.shape.kv_heads, sharing.world_size)
        return StepPlanner(pool, model.masks, *how, groups, sharing.split)


class NoRoom(ValueError):
    """Raised if keys and values do not fit into the pools; nothing has run."""


def check_stripe(stripe: int, block_size: int) -> None:
    """Checks that a stripe divides a block, so that a block's rows are whole stripes.

    Raises:
        ValueError: it does not.
    """
    if stripe < 1 or block_size % stripe:
        raise ValueError(
            f"--cp-kv-cache-interleave-size {stripe} does not divide --block-size {block_size}: "
            "give numbers that do"
        )


def check_room(
    planner: StepPlanner, model: ServedModel, counts: Mapping[int, int], most_new: int
) -> None:
    """Checks that keys and values of prompts and their answers have room, before any work.

    Args:
        planner: planner of the steps to come.
        model: model that answers.
        counts: tokens of each sequence that are fed, beside those that are held.
        most_new: most tokens of an answer.

    Raises:
        NoRoom: a rank's pool is too small; the message has the bytes.
    """
    pool = planner.accounts.pool
    needed = planner.blocks_needed(counts, most_new)
    free = np.array([pool.free(rank) for rank in range(pool.world_size)])
    rank = int((needed - free).argmax())
    if needed[rank] <= free[rank]:
        return
    one = block_bytes(model.shape, len(model.windows), pool.block_size)
    raise NoRoom(
        f"{sum(counts.values()):,} tokens of {len(counts)} sequences, with answers of up to "
        f"{most_new:,}, need {int(needed[rank]) * one:,} bytes of keys and values on rank {rank}, "
        f"where {int(free[rank]) * one:,} of {pool.blocks_per_rank * one:,} are free: raise "
        "--kv-cache-memory-bytes or --context-parallel-size, or lower --max-tokens"
    )


def batches_that_fit(
    size: PoolSize,
    model: ServedModel,
    lengths: Sequence[int],
    most_new: int,
    sharing: Sharing,
) -> list[list[int]]:
    """Cuts prompts into batches whose keys and values have room together, in their order.

    Raises:
        NoRoom: a prompt alone has none; the message has the bytes.
    """
    planner = size.planner(model, sharing)
    batches: list[list[int]] = [[]]
    taken = np.zeros(sharing.world_size, dtype=np.int64)
    for number, length in enumerate(lengths):
        check_room(planner, model, {number: length}, most_new)
        needed = planner.blocks_needed({number: length}, most_new)
        if (taken + needed > size.blocks).any():
            batches.append([])
            taken[:] = 0
        taken += needed
        batches[-1].append(number)
    return batches


def size_for(
    model: ServedModel,
    lengths: Sequence[int],
    most_new: int,
    sharing: Sharing,
    block_size: int,
    at_most: int | None = None,
) -> PoolSize:
    """The size in which all prompts have room together, or one of so many bytes.

    Raises:
        ValueError: the stripe does not divide a block.
    """
    planner = PoolSize(1, block_size).planner(model, sharing)
    blocks = int(planner.blocks_needed(dict(enumerate(lengths)), most_new).max())
    if at_most is not None:
        blocks = min(blocks, PoolSize.of_bytes(at_most, block_size, model).blocks)
    return PoolSize(blocks, block_size)


def ranks_that_fit(
    size: PoolSize,
    model: ServedModel,
    length: int,
    most_new: int,
    sharings: Sequence[Sharing],
) -> int:
    """Finds the fewest ranks whose pools have room for a prompt and its answer.

    Args:
        size: size of each rank's pool.
        model: model that answers.
        length: tokens of the prompt.
        most_new: most tokens of an answer.
        sharings: who holds which tokens, of ever more ranks.

    Raises:
        NoRoom: not even the most have; the message has the bytes.
    """
    for sharing in sharings:
        try:
            check_room(size.planner(model, sharing), model, {0: length}, most_new)
        except NoRoom:
            if sharing is sharings[-1]:
                raise
        else:
            return sharing.world_size
    raise AssertionError("no ranks to choose from")
