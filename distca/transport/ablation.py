"""Transports that leave something out, to measure what it costs (paper, Section 6.3)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from distca.transport.base import Channel, ChannelBytes, MessageSizes, Pending, Transport


class _Wrapper(Transport):
    """A transport that wraps another, which moves the bytes.

    Args:
        inner: the wrapped transport.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.rank, inner.world_size)
        self._inner = inner

    def reserve(self, sizes: Mapping[Channel, ChannelBytes]) -> None:
        """See `Transport.reserve`."""
        self._inner.reserve(sizes)

    def staging(self, channel: Channel, nbytes: int) -> torch.Tensor:
        """See `Transport.staging`."""
        return self._inner.staging(channel, nbytes)

    def check(self, finished: bool) -> None:
        """See `Transport.check`."""
        self._inner.check(finished)

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()


class SingleStream(_Wrapper):
    """A transport that waits for each exchange where it starts, so that nothing overlaps."""

    def _start(self, channel: Channel, sizes: MessageSizes) -> Pending:
        pending = self._inner.start("all", channel, sizes)
        pending.wait()
        return pending


class Signal(_Wrapper):
    """A transport that sends one byte for each message, and hands out zeros as what was received.

    Ranks wait for each other as they would, but next to nothing is moved. Losses mean nothing.
    """

    def reserve(self, sizes: Mapping[Channel, ChannelBytes]) -> None:
        """See `Transport.reserve`."""
        super().reserve(sizes)
        for channel, room in sizes.items():
            self._inner.staging(channel, room.send).zero_()
        most = max((room.receive for room in sizes.values()), default=0)
        nothing = self._inner.staging(next(iter(sizes)), 0)
        self._zeros = nothing.new_zeros(most)

    def start(self, phase: str, channel: Channel, sizes: MessageSizes) -> Pending:
        """See `Transport.start`. Counts the bytes that are really moved."""
        outgoing, incoming = (
            tuple(int(size > 0) for size in sizes_of) for sizes_of in (sizes.send, sizes.receive)
        )
        # Each byte goes where its message would begin, since room there is reserved.
        signals = super().start(phase, channel, MessageSizes(outgoing, incoming, sizes.put_at))
        return _Zeros(signals, self._zeros[: sizes.received])

    def _start(self, channel: Channel, sizes: MessageSizes) -> Pending:
        return self._inner.start("all", channel, sizes)


class _Zeros(Pending):
    """An exchange of signals; its result is zeros."""

    def __init__(self, signals: Pending, zeros: torch.Tensor) -> None:
        self._signals, self._zeros = signals, zeros

    def wait(self) -> torch.Tensor:
        self._signals.wait()
        return self._zeros

    def release(self) -> None:
        self._signals.release()
