"""The memory that core attention runs in, allocated between training steps, never within one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from distca.cost.memory import HEADROOM, CoreAttentionMemory
from distca.runtime.exchange import Exchange, map_indices
from distca.runtime.fused_rows import select_row_kernels
from distca.runtime.row_kernels import RowKernels
from distca.runtime.workspace import Workspace
from distca.transport import DIRECTIONS, Channel, ChannelBytes, Transport

logger = logging.getLogger(__name__)

_PADDING = torch.zeros(1, dtype=torch.int64)
"""Fills up row indices of an odd number of rows."""


class Buffers:
    """Workspaces of calls and of single steps, which grow together with the transport's buffers.

    Buffers never shrink, and have equal sizes on all ranks, since sizes are a pure function of
    plans. Each nano-batch has a slot, of its number.

    Args:
        device: device of the rows.
        nano_batches: nano-batches, or plans of unlike layers, that are placed together.
        headroom: share by which buffers grow beyond what plans need, so that they rarely grow.
        rows: what moves rows in the buffers; None: the fastest that the device has.

    Attributes:
        workspaces: memory for what a call keeps between its steps, by slot.
        scratch: memory for the temporaries of one step.
        indices: memory for the row indices of the exchanges that run.
        rows: what moves rows in the buffers, and makes them of their parts.
        room: sizes now, in bytes.
    """

    def __init__(
        self,
        device: torch.device,
        nano_batches: int = 1,
        headroom: float = HEADROOM,
        rows: RowKernels | None = None,
    ) -> None:
        self.rows = rows or select_row_kernels(device.type)
        self.workspaces = [Workspace(device) for _ in range(nano_batches)]
        self.scratch = Workspace(device)
        self.indices = Workspace(device)
        self.room = CoreAttentionMemory()
        self._nano_batches = nano_batches
        self._headroom = headroom
        # The exchanges that were placed last, and their copies with indices on the device.
        self._placed: tuple[Sequence[Exchange], tuple[Exchange, ...]] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, the transport's included."""
        return self._total(self.room)

    def _total(self, room: CoreAttentionMemory) -> int:
        return room.total(self._nano_batches)

    def place(self, exchanges: Sequence[Exchange]) -> tuple[Exchange, ...]:
        """Copies exchanges with their row indices to the device, over those of the last call.

        The exchanges that were placed last are returned without another copy.
        """
        if self._placed is None or self._placed[0] is not exchanges:
            self.indices.clear()
            self._placed = exchanges, tuple(self._place(exchange) for exchange in exchanges)
        return self._placed[1]

    def _place(self, exchange: Exchange) -> Exchange:
        indices: list[torch.Tensor] = []

        def collect(index: torch.Tensor) -> torch.Tensor:
            indices.append(index)
            return index

        map_indices(exchange, collect)
        # Each begins at a multiple of 16 bytes, as fused kernels are compiled for.
        padded = [each for index in indices for each in (index, _PADDING[: len(index) % 2])]
        place = self.indices.take((sum(map(len, padded)),), torch.int64)
        if place.is_cuda:
            # A single copy, from pinned memory so that the CPU does not wait for it.
            place.copy_(torch.cat(padded).pin_memory(), non_blocking=True)
        elif len(place):
            torch.cat(padded, out=place)
        else:
            # No row travels or is gathered, as in decodes of one rank.
            return exchange
        places = iter(torch.split(place, [len(each) for each in padded])[::2])
        return exchange.map_indices(lambda _: next(places))

    def reserve(self, needed: CoreAttentionMemory, transport: Transport) -> None:
        """Grows the buffers to what plans need. Collective; no call may be under way.

        Args:
            needed: sizes for the largest plan; the same on every rank.
            transport: transport whose buffers grow, too.
        """
        if needed.fits(self.room):
            return
        self._placed = None
        before = self.room
        room = self.room = before.union(needed.with_headroom(self._headroom))
        transport.reserve(
            {
                Channel(direction, slot): ChannelBytes(*sizes)
                for slot in range(len(self.workspaces))
                for direction, sizes in zip(
                    DIRECTIONS,
                    (
                        (room.dispatch_send, room.dispatch_receive),
                        (room.combine_send, room.combine_receive),
                    ),
                    strict=True,
                )
            }
        )
        for workspace in self.workspaces:
            workspace.reserve(room.slot)
        self.scratch.reserve(room.scratch)
        self.indices.reserve(room.indices * self._nano_batches)
        if transport.rank == 0:
            logger.info(
                "core attention's buffers grow from %.1f to %.1f MB on every rank",
                self._total(before) / 1e6,
                self.nbytes / 1e6,
            )
