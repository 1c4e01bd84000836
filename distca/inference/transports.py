"""The choice of what moves rows between ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from distca.transport import Transport

TransportName = Literal["gloo", "nccl", "shm", "nvshmem"]
"""What moves rows: torch.distributed, memory that processes of a machine share, or puts of GPUs."""

TRANSPORTS: tuple[TransportName, ...] = get_args(TransportName)

_ON_GPUS = frozenset({"nccl", "nvshmem"})


def check_transport(name: TransportName | None, on_gpus: bool) -> None:
    """Refuses a transport that cannot connect these ranks.

    Args:
        name: transport; None: the default.
        on_gpus: whether ranks have GPUs.

    Raises:
        ValueError: there are other devices.
    """
    if name is None:
        return
    if (name in _ON_GPUS) != on_gpus:
        where = "GPUs" if name in _ON_GPUS else "ranks on CPUs"
        raise ValueError(f"--transport {name} is for {where}: leave it out, or choose another")


def make_transport(
    name: TransportName | None, group: dist.ProcessGroup, device: torch.device, timeout: timedelta
) -> Transport:
    """Makes the transport between the ranks of a group, of members only where it can. Collective.

    Args:
        name: which one; None: torch.distributed's, over gloo on CPUs and NCCL on GPUs.
        group: process group of the ranks, which nothing else uses.
        device: device of the rows.
        timeout: time limit of an exchange.

    Raises:
        TransportError: it cannot be started.
    """
    if name == "shm":
        from distca.transport.shared_memory import SharedMemoryTransport

        return SharedMemoryTransport(group, timeout)
    if name == "nvshmem":
        from distca.transport.nvshmem import NvshmemTransport

        return NvshmemTransport(group, device, timeout)
    from distca.transport import CollectiveTransport

    return CollectiveTransport(group, device, members_only=True)
