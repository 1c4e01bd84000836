"""The processes that share a model: how they join, and what they tell each other."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from distca.inference.config import EngineConfig
from distca.torchrun import read_torchrun

T = TypeVar("T")


class Processes:
    """This process among all that make the same calls; to make one joins them. Collective.

    Args:
        config: configuration of the engine.

    Attributes:
        device: device of this process.
        count: number of processes.

    Raises:
        ValueError: there are not as many processes as the configuration has.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._made = not dist.is_initialized()
        self.device = _join(config)
        self.count = dist.get_world_size()
        # What processes tell each other lies on the host.
        self._group: dist.ProcessGroup | None = None
        if self.count > 1 and self.device.type == "cuda":
            timeout = timedelta(seconds=config.parallel.step_timeout)
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, mine: T) -> list[T]:
        """Returns what each process gives, in their order. Collective."""
        found = [mine] * self.count
        if self.count > 1:
            dist.all_gather_object(found, mine, group=self._group)
        return found

    def broadcast(self, mine: T) -> T:
        """Returns what the first process gives. Collective."""
        told = [mine]
        if self.count > 1:
            dist.broadcast_object_list(told, 0, group=self._group)
        return told[0]

    def reduce(
        self, numbers: torch.Tensor, by: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """Combines the numbers of all processes, on the host, in place. Collective.

        Args:
            numbers: any number of them, as many on each process.
            by: what becomes of several.

        Returns:
            The same tensor.
        """
        if self.count > 1:
            dist.all_reduce(numbers, by, group=self._group)
        return numbers

    def leave(self) -> None:
        """Destroys the process groups, if they were made here. Others of them end likewise."""
        self._group = None
        if self._made and dist.is_initialized():
            dist.destroy_process_group()

    def wait_for_all(self) -> None:
        """Waits until all processes are here."""
        if self.count > 1:
            dist.barrier()


def _attempt() -> str:
    """Name of this start of the ranks by torchrun.

    Ranks that start again meet in the store of those before, which still has the addresses of dead
    ranks. On one machine all ranks have the same number of restarts. On several machines they may
    not, so the name is always the same there.
    """
    launched = read_torchrun()
    assert launched is not None, "torchrun started the ranks"
    return f"start {launched.restarts}" if launched.machines == 1 else "ranks"


def _join(config: EngineConfig) -> torch.device:
    """Joins this process with the others, unless it has; returns its device. Collective.

    Raises:
        ValueError: there are not as many processes as the configuration has.
    """
    gpus = torch.cuda.is_available()
    if not dist.is_initialized():
        backend = "nccl" if gpus else "gloo"
        timeout = timedelta(seconds=config.parallel.step_timeout)
        if read_torchrun() is not None:
            store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
            store = dist.PrefixStore(_attempt(), store)  # type: ignore[attr-defined]
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timeout
            )
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    if dist.get_world_size() != config.processes:
        raise ValueError(
            f"{config.processes} processes are needed, and there are {dist.get_world_size()}: "
            f"start the program by torchrun --nproc-per-node {config.processes}"
        )
    if not gpus:
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_node_local_rank(dist.get_rank()))
    torch.cuda.set_device(device)
    return device
