"""Transports that leave something out, to measure what it costs (paper, Section 6.3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distca.transport.base import Pending, Transport


class SingleStream(Transport):
    """Every exchange is waited for where it starts: nothing overlaps.

    Args:
        inner: what moves the bytes.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.rank, inner.world_size)
        self._inner = inner

    def _start(
        self, send: torch.Tensor, send_bytes: Sequence[int], receive_bytes: Sequence[int]
    ) -> Pending:
        return Arrived(self._inner.all_to_all("all", send, send_bytes, receive_bytes))


class Signal(Transport):
    """Every message is one byte, and zeros are received: servers wait for each other as they
    would, but next to nothing is moved. Losses mean nothing.

    Args:
        inner: what moves the bytes.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.rank, inner.world_size)
        self._inner = inner

    def start(
        self,
        phase: str,
        send: torch.Tensor,
        send_bytes: Sequence[int],
        receive_bytes: Sequence[int],
    ) -> Pending:
        """See `Transport.start`; counts the bytes that are really moved."""
        outgoing, incoming = (
            [int(size > 0) for size in sizes] for sizes in (send_bytes, receive_bytes)
        )
        signals = super().start(phase, send.new_zeros(sum(outgoing)), outgoing, incoming)
        return _Zeros(signals, send.new_zeros(sum(receive_bytes)))

    def _start(
        self, send: torch.Tensor, send_bytes: Sequence[int], receive_bytes: Sequence[int]
    ) -> Pending:
        return self._inner.start("all", send, send_bytes, receive_bytes)


class Arrived(Pending):
    """An exchange that has been waited for.

    Args:
        received: what came.
    """

    def __init__(self, received: torch.Tensor) -> None:
        self._received = received

    def wait(self) -> torch.Tensor:
        return self._received


class _Zeros(Pending):
    def __init__(self, signals: Pending, zeros: torch.Tensor) -> None:
        self._signals, self._zeros = signals, zeros

    def wait(self) -> torch.Tensor:
        self._signals.wait()
        return self._zeros
