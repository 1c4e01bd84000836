"""The transport over torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from distca.transport.base import (
    WAYS,
    Channel,
    ChannelBytes,
    MessageSizes,
    Pending,
    Transport,
    first_bytes,
)


def new_exchange_group(
    ranks: list[int], timeout: timedelta | None = None
) -> dist.ProcessGroup | None:
    """A process group for exchanges alone; None on ranks that are not in it. Collective.

    On GPUs its stream comes before those of other kernels: while it waits, servers wait.

    Args:
        ranks: that are in it.
        timeout: of its operations; None: the backend's own.
    """
    if dist.get_backend() != "nccl":
        return dist.new_group(ranks, timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return dist.new_group(ranks, timeout=timeout, pg_options=options)


class CollectiveTransport(Transport):
    """A ragged all-to-all over a process group of its own.

    NCCL runs `all_to_all_single` with uneven splits on a stream of its own. gloo's would wait for
    its turn among two threads, and often use a link in one direction at a time: a rank that comes
    late finds the other ready to receive, fills the connection with its own message, and says only
    behind it that it is ready, too. So on gloo every rank first starts to receive, then to send.

    Making one is collective.

    Args:
        group: the ranks that exchange. Give the exchange a group that nothing else uses, so that
            its collectives are never ordered among those of the gradient reduction.
        device: where the rows are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group.rank(), group.size())
        self._group, self._device = group, device
        self._staging: dict[Channel, torch.Tensor] = {}
        self._received: dict[Channel, torch.Tensor] = {}
        if group.name() != "gloo" and self.world_size > 1:
            # NCCL connects two ranks at their first message. Later on that would stall a step, and
            # there may be no memory left for it.
            ones = [1] * self.world_size
            message, received = self._allocate(self.world_size), self._allocate(self.world_size)
            group.alltoall_base(received, message, ones, ones).wait()

    def reserve(self, sizes: Mapping[Channel, ChannelBytes]) -> None:
        """See `Transport.reserve`."""
        # The old ones first, so that both are never there together.
        self._staging.clear()
        self._received.clear()
        for channel, room in sizes.items():
            self._staging[channel] = self._allocate(room.send)
            self._received[channel] = self._allocate(room.receive)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def staging(self, channel: Channel, nbytes: int) -> torch.Tensor:
        """See `Transport.staging`."""
        return first_bytes(self._staging[channel], nbytes)

    def close(self) -> None:
        """See `Transport.close`; the process group is its owner's."""
        self._staging.clear()
        self._received.clear()

    def _start(self, channel: Channel, sizes: MessageSizes) -> Pending:
        received = first_bytes(self._received[channel], sum(sizes.receive))
        staged = first_bytes(self._staging[channel], sum(sizes.send))
        # The group's own methods: torch.distributed's functions know registered groups alone, and
        # one that spans two default groups is not (`megatron_patches/dedicated.py`).
        works: list[dist.Work] = []
        if self._group.name() == "gloo":
            tag = channel.slot * len(WAYS) + WAYS.index(channel.way)
            incoming, outgoing = (
                torch.split(buffer, list(lengths))
                for buffer, lengths in ((received, sizes.receive), (staged, sizes.send))
            )
            works += [self._group.recv([p], r, tag) for r, p in enumerate(incoming) if len(p)]
            works += [self._group.send([p], r, tag) for r, p in enumerate(outgoing) if len(p)]
        elif self.world_size > 1:
            lengths = list(sizes.receive), list(sizes.send)
            works.append(self._group.alltoall_base(received, staged, *lengths))
        return _Collective(works, received)


class _Collective(Pending):
    def __init__(self, works: Sequence[dist.Work], received: torch.Tensor) -> None:
        self._works, self._received = works, received

    def wait(self) -> torch.Tensor:
        # gloo's messages can be waited for once; a second wait would be for another message.
        for work in self._works:
            work.wait()
        self._works = ()
        return self._received

    def release(self) -> None:
        """The next exchange of the channel, which this rank starts itself, may overwrite it."""
