"""The transport over torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from distca.transport.base import Pending, Transport


class CollectiveTransport(Transport):
    """`all_to_all_single` with uneven splits over a process group of its own.

    NCCL runs it on a stream of its own, gloo on threads of its own.

    Args:
        group: the ranks that exchange. Give the exchange a group that nothing else uses, so that
            its collectives are never ordered among those of the gradient reduction.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group = group

    def _start(
        self, send: torch.Tensor, send_bytes: Sequence[int], receive_bytes: Sequence[int]
    ) -> Pending:
        received = send.new_empty(sum(receive_bytes))
        work = None
        if self.world_size > 1:
            work = dist.all_to_all_single(
                received,
                send,
                list(receive_bytes),
                list(send_bytes),
                group=self._group,
                async_op=True,
            )
        return _Collective(work, send, received)


class _Collective(Pending):
    """Keeps both buffers until they are no longer used."""

    def __init__(self, work: dist.Work | None, send: torch.Tensor, received: torch.Tensor) -> None:
        self._work, self._send, self._received = work, send, received

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
        return self._received
