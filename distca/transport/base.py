"""The interface of a transport: a ragged all-to-all whose sizes every rank knows beforehand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

import torch


class Pending(ABC):
    """An exchange that is under way."""

    @abstractmethod
    def wait(self) -> torch.Tensor:
        """What was received; on a GPU the current stream waits for it, not the CPU."""


class Transport(ABC):
    """A ragged all-to-all between the ranks of one group, which counts what it moved.

    Attributes:
        rank: this rank's number in the group.
        world_size: ranks in the group.
        bytes_sent: bytes that this rank sent to others, by phase.
        bytes_received: bytes that this rank received from others, by phase.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.bytes_sent: Counter[str] = Counter()
        self.bytes_received: Counter[str] = Counter()

    def all_to_all(
        self,
        phase: str,
        send: torch.Tensor,
        send_bytes: Sequence[int],
        receive_bytes: Sequence[int],
    ) -> torch.Tensor:
        """`start`, and what it gives, waited for."""
        return self.start(phase, send, send_bytes, receive_bytes).wait()

    def start(
        self,
        phase: str,
        send: torch.Tensor,
        send_bytes: Sequence[int],
        receive_bytes: Sequence[int],
    ) -> Pending:
        """Sends `send_bytes[d]` bytes to each rank `d`, and receives `receive_bytes[s]` from `s`.

        Collective: every rank of the group calls it, in the same order, also with nothing to send.
        Several may be under way. No sizes are negotiated: both sides read them off the plan.

        Args:
            phase: the name under which the bytes are counted.
            send: uint8 `[sum(send_bytes)]`, the messages to rank 0, 1, ... one after the other.
            send_bytes: one for each rank; 0 for this rank itself.
            receive_bytes: one for each rank; 0 for this rank itself.

        Returns:
            What can be waited for: uint8 `[sum(receive_bytes)]`, the messages from rank 0, 1, ...
            one after the other. `send` must stay as it is until then.
        """
        assert send_bytes[self.rank] == 0
        assert receive_bytes[self.rank] == 0
        assert send.dtype == torch.uint8
        assert send.numel() == sum(send_bytes)
        self.bytes_sent[phase] += send.numel()
        self.bytes_received[phase] += sum(receive_bytes)
        return self._start(send, send_bytes, receive_bytes)

    @abstractmethod
    def _start(
        self, send: torch.Tensor, send_bytes: Sequence[int], receive_bytes: Sequence[int]
    ) -> Pending:
        """Does what `start` says."""
