"""Ranks that share one process and run in turn, to try plans on one device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from distca.transport.base import Channel, ChannelBytes, MessageSizes, Pending, Transport


class VirtualTransport(Transport):
    """The transport of one of several ranks of this process, which copies between their buffers.

    The ranks run in turn: all start an exchange before one waits for it. On a GPU the copies run
    on a stream of their own, beside the kernels.

    Args:
        rank: number of this rank.
        others: all ranks by number; every rank is given the same list, and adds itself to it.
        world_size: ranks that there will be.
        device: device of the rows.
        stream: stream of the copies; None on CPUs.
    """

    def __init__(
        self,
        rank: int,
        others: list[VirtualTransport],
        world_size: int,
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        super().__init__(rank, world_size)
        assert len(others) == rank, "ranks are made in the order of their numbers"
        others.append(self)
        self._others, self._device, self._stream = others, device, stream
        self._staging: dict[Channel, torch.Tensor] = {}
        self._received: dict[Channel, torch.Tensor] = {}
        # Exchanges that this rank has started; by source, the last one that has arrived.
        self._epoch: dict[Channel, int] = {}
        self._arrived: dict[Channel, list[int]] = {}
        self._moved: dict[Channel, torch.cuda.Event] = {}

    def reserve(self, sizes: Mapping[Channel, ChannelBytes]) -> None:
        """See `Transport.reserve`."""
        for channel, room in sizes.items():
            self._staging[channel], self._received[channel] = (
                torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                for nbytes in (room.send, room.receive)
            )
            self._epoch[channel] = 0
            self._arrived[channel] = [0] * self.world_size

    def staging(self, channel: Channel, nbytes: int) -> torch.Tensor:
        """See `Transport.staging`."""
        assert nbytes <= self._staging[channel].numel(), "no room was reserved for this plan"
        if channel in self._moved:
            torch.cuda.current_stream().wait_event(self._moved[channel])
        return self._staging[channel][:nbytes]

    def _start(self, channel: Channel, sizes: MessageSizes) -> Pending:
        self._epoch[channel] += 1
        if self._stream is None:
            self._put(channel, sizes)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._put(channel, sizes)
                self._moved[channel] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._moved[channel].record()
        for other in self._others:
            other._arrived[channel][self.rank] = self._epoch[channel]
        return _Virtual(self, channel, sizes.received)

    def _put(self, channel: Channel, sizes: MessageSizes) -> None:
        for rank, begin, end in sizes.outgoing:
            to, message = sizes.put_at[rank], self._staging[channel][begin:end]
            self._others[rank]._received[channel][to : to + end - begin] = message

    def close(self) -> None:
        """See `Transport.close`."""
        self._staging.clear()
        self._received.clear()

    def _wait(self, channel: Channel, nbytes: int) -> torch.Tensor:
        assert self._arrived[channel] == [self._epoch[channel]] * self.world_size, (
            "a rank waits before all have started"
        )
        if self._stream is not None:
            for other in self._others:
                torch.cuda.current_stream().wait_event(other._moved[channel])
        return self._received[channel][:nbytes]


class _Virtual(Pending):
    def __init__(self, transport: VirtualTransport, channel: Channel, nbytes: int) -> None:
        self._transport, self._channel, self._nbytes = transport, channel, nbytes

    def wait(self) -> torch.Tensor:
        return self._transport._wait(self._channel, self._nbytes)

    def release(self) -> None:
        """Does nothing: no rank of this process starts the channel's next exchange before."""
