"""The memory that core attention runs in: it is allocated between steps, and never within one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from distca.cost.memory import HEADROOM, CoreAttentionMemory
from distca.runtime.exchange import Exchange
from distca.runtime.workspace import Workspace
from distca.transport import WAYS, Channel, ChannelBytes, Transport

logger = logging.getLogger(__name__)


class Buffers:
    """Workspaces of calls and of single steps; and the transport's buffers with them.

    They only grow, and on all ranks alike, since sizes are a pure function of plans.

    Args:
        device: where the rows are.
        nano_batches: that are under way together, 1 or 2.
        head_groups: of each nano-batch; each group has a slot, and so a call, of its own.
        headroom: by which share more than plans need the buffers grow, so that they rarely grow
            again.

    Attributes:
        head_groups: as given.
        slots: what a call keeps between its steps: of the head groups of the first nano-batch, then
            of the second.
        scratch: for what one step computes on the way.
        indices: for the row indices of the exchanges that run.
        room: what they hold now.
    """

    def __init__(
        self,
        device: torch.device,
        nano_batches: int = 1,
        head_groups: int = 1,
        headroom: float = HEADROOM,
    ) -> None:
        self.head_groups = head_groups
        self.slots = [Workspace(device) for _ in range(nano_batches * head_groups)]
        self.scratch = Workspace(device)
        self.indices = Workspace(device)
        self.room = CoreAttentionMemory()
        self._nano_batches = nano_batches
        self._headroom = headroom
        # What was placed last, as it was given and as it is here.
        self._placed: tuple[Sequence[Exchange], tuple[Exchange, ...]] | None = None

    @property
    def nbytes(self) -> int:
        """The size of all of them, and of the transport's."""
        return self._total(self.room)

    def _total(self, room: CoreAttentionMemory) -> int:
        return room.total(self._nano_batches, self.head_groups)

    def place(self, exchanges: Sequence[Exchange]) -> tuple[Exchange, ...]:
        """The same exchanges with their indices here, in place of those that were placed before.

        For those that were placed last nothing is done.
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

        exchange.map_indices(collect)
        lengths = [len(index) for index in indices]
        place = self.indices.take((sum(lengths),), torch.int64)
        if place.is_cuda:
            # One copy of pinned memory, which the CPU does not wait for.
            place.copy_(torch.cat(indices).pin_memory(), non_blocking=True)
        elif indices:
            torch.cat(indices, out=place)
        places = iter(torch.split(place, lengths))
        return exchange.map_indices(lambda _: next(places))

    def reserve(self, needed: CoreAttentionMemory, transport: Transport) -> None:
        """Makes room for plans. Collective; nothing may be under way.

        Args:
            needed: by the largest plan, for a head group; the same on every rank.
            transport: whose buffers grow, too.
        """
        if needed.fits(self.room):
            return
        self._placed = None
        before = self.room
        room = self.room = before.union(needed.with_headroom(self._headroom))
        transport.reserve(
            {
                Channel(way, number): ChannelBytes(*sizes)
                for number in range(len(self.slots))
                for way, sizes in zip(
                    WAYS,
                    (
                        (room.to_servers_send, room.to_servers_receive),
                        (room.to_owners_send, room.to_owners_receive),
                    ),
                    strict=True,
                )
            }
        )
        for slot in self.slots:
            slot.reserve(room.slot)
        self.scratch.reserve(room.scratch)
        self.indices.reserve(room.indices * self._nano_batches)
        if transport.rank == 0:
            logger.info(
                "core attention's buffers grow from %.1f to %.1f MB on every rank",
                self._total(before) / 1e6,
                self.nbytes / 1e6,
            )
