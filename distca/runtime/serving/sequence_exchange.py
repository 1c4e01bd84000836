"""Rows that ranks share by sequence, and heads that they share: gathered, added up and exchanged.

Who sends how much to whom is `distca.schedule.serving.csps.layouts`; so no sizes are negotiated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from distca.plan.span import Int64s
from distca.schedule.serving.csps.layouts import gathered_rows
from distca.transport import Channel, ChannelBytes, MessageSizes, Transport

_CHANNEL = Channel("dispatch", 0)


class SequenceExchange:
    """Collectives of the ranks that split a model's weights.

    Args:
        transport: transport that nothing else uses.
        ranks_per_node: ranks of a node; it divides the number of ranks.
    """

    def __init__(self, transport: Transport, ranks_per_node: int) -> None:
        self.transport, self.ranks_per_node = transport, ranks_per_node
        self.rank, self.ranks = transport.rank, transport.world_size
        self._room = ChannelBytes()
        node, number = divmod(self.rank, ranks_per_node)
        self._node = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        self._alike = range(number, self.ranks, ranks_per_node)

    def all_gather(self, own: torch.Tensor, rows: Int64s, phase: str) -> torch.Tensor:
        """Returns the rows of all ranks, in the order of ranks.

        Args:
            own: rows of this rank, `[rows, ...]`.
            rows: rows of each rank, int64 `[ranks]`.
            phase: name under which bytes are counted, and with " between nodes" those there.
        """
        between, within = gathered_rows(rows, self.ranks_per_node)
        received = self.exchange([own] * self.ranks, between, f"{phase} between nodes")
        received[self.rank] = own
        of_alike = torch.cat([received[each] for each in self._alike])
        received = self.exchange([of_alike] * self.ranks, within, phase)
        received[self.rank] = of_alike
        pieces = dict[int, torch.Tensor]()
        for other in self._node:
            alike = range(other % self.ranks_per_node, self.ranks, self.ranks_per_node)
            parts = torch.split(received[other], rows[list(alike)].tolist())
            pieces |= zip(alike, parts, strict=True)
        return torch.cat([pieces[rank] for rank in range(self.ranks)])

    def reduce_scatter(self, parts: torch.Tensor, rows: Int64s, phase: str) -> torch.Tensor:
        """Returns the sums of all ranks' parts of this rank's rows.

        Args:
            parts: this rank's parts of the rows of all ranks, in the order of ranks, `[rows, ...]`.
            rows: rows of each rank, int64 `[ranks]`.
            phase: as for `all_gather`.
        """
        between, within = (each.T for each in gathered_rows(rows, self.ranks_per_node))
        pieces = torch.split(parts, rows.tolist())
        messages = [
            torch.cat(pieces[rank % self.ranks_per_node :: self.ranks_per_node])
            for rank in range(self.ranks)
        ]
        received = self.exchange(messages, within, phase)
        sums = messages[self.rank].clone()
        for other in self._node:
            if other != self.rank:
                sums += received[other]
        pieces = torch.split(sums, rows[list(self._alike)].tolist())
        messages = [pieces[rank // self.ranks_per_node] for rank in range(self.ranks)]
        received = self.exchange(messages, between, f"{phase} between nodes")
        own = messages[self.rank]
        for other in self._alike:
            if other != self.rank:
                own = own + received[other]
        return own

    def exchange(
        self, messages: Sequence[torch.Tensor], rows: Int64s, phase: str
    ) -> list[torch.Tensor]:
        """Returns the rows that each rank has sent, which the next exchange overwrites.

        Args:
            messages: rows to each rank, `[rows, ...]`; those that `rows` has none of stay here.
            rows: rows that travel, int64 `[source, destination]`.
            phase: name under which bytes are counted.
        """
        like = messages[self.rank]
        shape = like.shape[1:]
        sizes = rows * (int(np.prod(shape)) * like.element_size())
        room = ChannelBytes(int(sizes.sum(axis=1).max()), int(sizes.sum(axis=0).max()))
        if not room.send:
            return [like[:0]] * self.ranks
        if not room.fits(self._room):
            self._room = ChannelBytes(
                max(room.send, self._room.send), max(room.receive, self._room.receive)
            )
            self.transport.reserve({_CHANNEL: self._room})
        of_rank = MessageSizes(
            tuple(sizes[self.rank].tolist()),
            tuple(sizes[:, self.rank].tolist()),
            tuple(sizes[: self.rank].sum(axis=0).tolist()),
        )
        staging = self.transport.staging(_CHANNEL, of_rank.sent).view(like.dtype)
        for rank, begin, end in of_rank.outgoing:
            size = like.element_size()
            staging[begin // size : end // size].copy_(messages[rank].flatten())
        pending = self.transport.start(phase, _CHANNEL, of_rank)
        received = pending.wait().view(like.dtype).view(-1, *shape)
        pending.release()
        return list(torch.split(received, rows[:, self.rank].tolist()))
