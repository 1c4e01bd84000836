"""Finds how small `--max-buffer-bytes` may be for a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from distca.schedule import BufferBoundError, ScheduleConfig

_PRECISION = 64
"""The bound that is found is at most this part of itself above one that is refused."""


def least_bound(plan: Callable[[int], object], refused: int, closest: int) -> int:
    """Searches for the least bound that a scheduler keeps to.

    Args:
        plan: plans with a bound; raises `BufferBoundError` if it finds no plan.
        refused: a bound that it has refused.
        closest: most bytes that a server received in the plan that came closest.

    Returns:
        A bound that was seen to work. Smaller ones may work, since schedulers do not try all plans.
    """

    def fails(bound: int) -> BufferBoundError | None:
        try:
            plan(bound)
        except BufferBoundError as error:
            return error
        return None

    low, high = refused, max(closest, refused + 1)
    while fails(high):
        low, high = high, 2 * high
    while high - low > max(high // _PRECISION, 1):
        middle = (low + high) // 2
        error = fails(middle)
        if error is None:
            high = middle
            continue
        low = middle
        if middle < error.least < high and not fails(error.least):
            high = error.least
    return high


def refusal(
    error: BufferBoundError, config: ScheduleConfig, plan: Callable[[ScheduleConfig], object]
) -> str:
    """Says which bound was found to work, where a scheduler keeps to none as small as the given.

    Args:
        error: why no plan was found.
        config: configuration with the bound.
        plan: plans with a configuration.
    """
    bound = config.max_buffer_bytes
    assert bound is not None
    found = least_bound(lambda n: plan(replace(config, max_buffer_bytes=n)), bound, error.least)
    return (
        f"no plan for these documents fits into {bound:,} buffer bytes. The least that was found "
        f"to suffice is --max-buffer-bytes {found}: give at least that, or cut documents shorter"
    )
