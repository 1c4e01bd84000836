"""Steps that succeed on every rank of a group, or on none."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from distca.transport.base import TransportError

T = TypeVar("T")


def on_all_ranks(group: dist.ProcessGroup, step: Callable[[], T]) -> list[T]:
    """Runs a step on every rank. Collective.

    Args:
        group: the ranks.
        step: what this rank does; its result is pickled.

    Returns:
        The results of all ranks.

    Raises:
        ValueError: the step raised it on some rank; every rank raises the same then.
        TransportError: the step raised another exception on some rank; likewise.
    """
    mine: tuple[Any, str | None, bool] = (None, None, False)
    cause: Exception | None = None
    try:
        mine = (step(), None, False)
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
    """What each rank of a group has. Collective.

    By the group's own methods: `torch.distributed.all_gather_object` knows registered groups alone.
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
