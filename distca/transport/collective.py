"""The transport over torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from distca.transport.base import Transport


class CollectiveTransport(Transport):
    """`all_to_all_single` with uneven splits over a process group of its own.

    Args:
        group: the ranks that exchange. Give the exchange a group that nothing else uses, so that
            its collectives are never ordered among those of the gradient reduction.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group = group

    def _exchange(
        self, send: torch.Tensor, send_bytes: Sequence[int], receive_bytes: Sequence[int]
    ) -> torch.Tensor:
        received = send.new_empty(sum(receive_bytes))
        if self.world_size > 1:
            dist.all_to_all_single(
                received, send, list(receive_bytes), list(send_bytes), group=self._group
            )
        return received
