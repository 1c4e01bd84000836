"""Keys and values that arrive at a decode process: where they go, and when a layer is complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from distca.plan.span import Int64s, expand_ranges
from distca.runtime.serving.kv_pool import KVCache
from distca.schedule.serving.cdsp.handoff import Transfer
from distca.serve.handoff.messages import Rows

_CLOSED_KEPT = 4096
"""Requests of which it is known that they have ended: later than their rows may come."""

Layer = tuple[Transfer, int, int]
"""A layer of a chunk of a transfer."""


class Landing:
    """What arrives at one process of a decode rank.

    Rows of requests that it doesn't know are dropped, and count as arrived: whoever sends them
    waits until nothing is under way.

    Args:
        waits: whether rows may come before the blocks of their request are known here; then they
            are kept until they are.
    """

    def __init__(self, waits: bool) -> None:
        self._waits = waits
        self._blocks: dict[Transfer, Int64s] = {}
        self._closed: dict[Transfer, None] = {}
        self._early: dict[Transfer, list[tuple[Rows, Sequence[bytes]]]] = {}
        self._arrived: Counter[Layer] = Counter()

    def reserve(self, transfer: Transfer, blocks: Sequence[int]) -> None:
        """Makes blocks known that a request's rows go to."""
        self._blocks[transfer] = np.array(blocks, dtype=np.int64)

    def early(self, transfer: Transfer) -> list[tuple[Rows, Sequence[bytes]]]:
        """Gives rows out that came before the blocks of their request were known."""
        return self._early.pop(transfer, [])

    def close(self, transfer: Transfer) -> None:
        """Lets nothing more of a request into its blocks."""
        self._blocks.pop(transfer, None)
        if self._waits:
            self._closed[transfer] = None
        if len(self._closed) > _CLOSED_KEPT:
            del self._closed[next(iter(self._closed))]

    def take(self, rows: Rows, frames: Sequence[bytes], pool: KVCache) -> Layer | None:
        """Puts rows into the pool; returns their layer, if it is complete by that."""
        transfer = rows.transfer
        blocks = self._blocks.get(transfer)
        if blocks is None and self._waits and transfer not in self._closed:
            self._early.setdefault(transfer, []).append((rows, frames))
            return None
        starts, ends = np.array(rows.pieces, dtype=np.int64).T
        if blocks is not None:
            size = pool.keys.shape[2]
            positions = expand_ranges(starts, ends - starts)
            slots = blocks[positions // size] * size + positions % size
            shape = len(slots), *pool.keys.shape[3:]
            k, v = (
                torch.frombuffer(bytearray(frame), dtype=pool.keys.dtype).view(shape)
                for frame in frames
            )
            device = pool.keys.device
            pool.write(rows.layer, torch.from_numpy(slots).to(device), k.to(device), v.to(device))
        layer = transfer, rows.chunk, rows.layer
        self._arrived[layer] += int((ends - starts).sum())
        if self._arrived[layer] < rows.expected:
            return None
        del self._arrived[layer]
        return layer
