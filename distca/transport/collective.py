"""The transport over torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from distca.transport.base import (
    Channel,
    ChannelBytes,
    MessageSizes,
    Pending,
    Transport,
    first_bytes,
)
from distca.transport.lost_ranks import naming_lost_ranks

_EXCHANGE = "an exchange of rows"

MAX_CTAS = 8
"""Thread blocks of NCCL in an exchange, by default: as many as the nvshmem transport's kernel has.

Left alone NCCL takes several times as many, each on an SM of its own, from when an exchange starts:
also while it waits for a rank that is late, and the layers beside it compute on what is left.
"""

MOST_CTAS = 64
"""Thread blocks that NCCL can be given at most."""


def nccl_options(max_ctas: int, timeout: timedelta | None = None) -> dist.ProcessGroupNCCL.Options:
    """Returns the options of an NCCL group for exchanges
    (`torch.distributed.ProcessGroupNCCL.Options`).

    Its stream has a high priority: while an exchange waits for SMs, servers wait for it.

    Args:
        max_ctas: thread blocks that an exchange may take, each of which fills most of an SM; a
            power of two, to which NCCL rounds them up.
        timeout: time limit of an operation; None: the backend's default.
    """
    options = dist.ProcessGroupNCCL.Options()
    if timeout is not None:
        options._timeout = timeout
    options.is_high_priority_stream = True
    options.config.max_ctas = max_ctas
    return options


def new_exchange_group(
    ranks: list[int],
    timeout: timedelta | None = None,
    max_ctas: int = MAX_CTAS,
    alone: bool = False,
) -> dist.ProcessGroup | None:
    """Returns a process group for exchanges alone; None on ranks outside it. Collective.

    Args:
        ranks: ranks of the group.
        timeout: time limit of an operation; None: the backend's default.
        max_ctas: as for `nccl_options`, where the backend is NCCL.
        alone: whether only the group's ranks call this, and not all ranks of the job.
    """
    options = nccl_options(max_ctas, timeout) if dist.get_backend() == "nccl" else None
    with naming_lost_ranks("the making of a process group"):
        return dist.new_group(
            ranks, timeout=timeout, pg_options=options, use_local_synchronization=alone
        )


class CollectiveTransport(Transport):
    """A ragged all-to-all over a process group. Its construction is collective.

    NCCL runs an all-to-all with uneven splits on the group's stream. gloo's all-to-all would queue
    for one of two threads, and often use a link in one direction at a time: a late rank finds the
    other ready to receive, fills the connection with its own message, and announces only behind it
    that it is ready, too. So on gloo every rank posts all receives before it sends.

    Args:
        group: ranks that exchange. The group must serve nothing else, so that its collectives are
            never ordered among those of the gradient reduction.
        device: device of the rows.
        members_only: whether a rank that neither sends nor receives in an exchange takes no part,
            as on gloo always: NCCL is then given the messages that are not empty, in one batch.
            Such a rank need not start it, nor reserve the same buffers.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, members_only: bool = False
    ) -> None:
        super().__init__(group.rank(), group.size())
        self._group, self._device, self._members_only = group, device, members_only
        self._staging: dict[Channel, torch.Tensor] = {}
        self._received: dict[Channel, torch.Tensor] = {}
        if group.name() != "gloo" and self.world_size > 1:
            # NCCL connects two ranks at their first message: within a step that would stall, and
            # there may be no memory left by then.
            ones = [1] * self.world_size
            message, received = self._allocate(self.world_size), self._allocate(self.world_size)
            with naming_lost_ranks("the first exchange"):
                group.alltoall_base(received, message, ones, ones).wait()

    def reserve(self, sizes: Mapping[Channel, ChannelBytes]) -> None:
        """See `Transport.reserve`."""
        # The old buffers are freed first, so that old and new never coexist.
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
        """See `Transport.close`. The process group stays open: whoever made it ends it."""
        self._staging.clear()
        self._received.clear()

    def _start(self, channel: Channel, sizes: MessageSizes) -> Pending:
        received = first_bytes(self._received[channel], sizes.received)
        staged = first_bytes(self._staging[channel], sizes.sent)
        with naming_lost_ranks(_EXCHANGE):
            works = self._begin(channel, received, staged, sizes)
        return _Collective(works, received)

    def _begin(
        self, channel: Channel, received: torch.Tensor, staged: torch.Tensor, sizes: MessageSizes
    ) -> list[dist.Work]:
        """Starts an exchange's operations."""
        # The group's own methods: torch.distributed's functions accept registered groups alone, and
        # one that spans two default groups is not (`megatron_patches/pipeline/processes.py`).
        if self._group.name() == "gloo":
            tag = channel.number
            receives = [
                self._group.recv([received[begin:end]], rank, tag)
                for rank, begin, end in sizes.incoming
            ]
            sends = [
                self._group.send([staged[begin:end]], rank, tag)
                for rank, begin, end in sizes.outgoing
            ]
            return receives + sends
        if self._members_only:
            return send_in_one_batch(self._group, channel, received, staged, sizes)
        if self.world_size == 1:
            return []
        lengths = list(sizes.receive), list(sizes.send)
        return [self._group.alltoall_base(received, staged, *lengths)]


def send_in_one_batch(
    group: dist.ProcessGroup,
    channel: Channel,
    received: torch.Tensor,
    staged: torch.Tensor,
    sizes: MessageSizes,
) -> list[dist.Work]:
    """Starts the messages of an exchange that are not empty, as one operation of NCCL.

    Ranks that none is from or to take no part. Between two ranks messages are in order, so
    exchanges cannot be mixed up; and ranks that all start theirs in one order cannot wait for each
    other in a circle. NCCL wants all ranks in a group's first operation, which
    `CollectiveTransport` has made.

    Args:
        group: ranks that exchange; one of torch's registered groups.
        channel: channel of the exchange.
        received: memory for the messages that arrive, concatenated.
        staged: the messages that leave, likewise.
        sizes: sizes of the messages.
    """
    tag = channel.number
    batch = [
        dist.P2POp(action, memory[begin:end], group=group, tag=tag, group_peer=rank)
        for action, memory, messages in (
            (dist.irecv, received, sizes.incoming),
            (dist.isend, staged, sizes.outgoing),
        )
        for rank, begin, end in messages
    ]
    return list(dist.batch_isend_irecv(batch)) if batch else []


class _Collective(Pending):
    def __init__(self, works: Sequence[dist.Work], received: torch.Tensor) -> None:
        self._works, self._received = works, received

    def wait(self) -> torch.Tensor:
        # A gloo message can be waited for once: a second wait would be for another.
        with naming_lost_ranks(_EXCHANGE):
            for work in self._works:
                work.wait()
        self._works = ()
        return self._received

    def release(self) -> None:
        """Does nothing: only the channel's next exchange, which this rank starts, overwrites it."""
