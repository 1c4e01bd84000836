"""Actions that succeed on every rank of a group, or on none."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from distca.transport.base import TransportError

T = TypeVar("T")


def on_all_ranks(group: dist.ProcessGroup, action: Callable[[], T]) -> list[T]:
    """Runs an action on every rank. Collective.

    Args:
        group: the ranks.
        action: work of this rank; its result is pickled.

    Returns:
        The results of all ranks.

    Raises:
        ValueError: the action raised a ValueError on some rank; every rank raises the same.
        TransportError: the action raised another exception on some rank; every rank raises it.
    """
    mine: tuple[object, str | None, bool] = (None, None, False)
    cause: Exception | None = None
    try:
        mine = (action(), None, False)
    except Exception as error:
        cause = error
        mine = (None, str(error) or type(error).__name__, isinstance(error, ValueError))
    everyone = gather_objects(group, mine)
    for rank, (_, message, is_value_error) in enumerate(everyone):
        if message is not None:
            text = f"rank {rank}: {message}"
            raise (ValueError(text) if is_value_error else TransportError(text)) from cause
    return [cast(T, result) for result, _, _ in everyone]


def gather_objects(group: dist.ProcessGroup, mine: T) -> list[T]:
    """Gathers each rank's object, in the order of ranks. Collective.

    Calls the group's own methods, since `torch.distributed.all_gather_object` accepts registered
    groups alone.
    """
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    data = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8).to(device)
    size = torch.tensor([data.numel()], device=device)
    sizes = [torch.empty_like(size) for _ in range(group.size())]
    group.allgather([sizes], [size]).wait()
    most = int(max(sizes))
    padded = torch.zeros(most, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    found = [torch.empty_like(padded) for _ in sizes]
    group.allgather([found], [padded]).wait()
    return [
        pickle.loads(each[: int(length)].cpu().numpy().tobytes())
        for each, length in zip(found, sizes, strict=True)
    ]
