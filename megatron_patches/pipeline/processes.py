"""The processes of a job with dedicated attention servers, and the messages that steer the servers.

The servers are the last processes of the job. The processes before them form the default process
group, which is all that Megatron sees: megatron-core divides it as ever.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from distca.attention.pinned import copy_to
from distca.transport.collective import nccl_options

_END = -1

Place = tuple[int, int, int]
"""Tensor-parallel rank, stage and data-parallel rank of a process with a model."""


@dataclass(frozen=True)
class Processes:
    """All processes of a job, those with a model first.

    Attributes:
        store: store in which all processes meet.
        rank: rank of this process among all.
        with_model: number of processes that hold a model.
        dedicated: number of processes that only serve.
        tensor_parallel_size: number of processes of a server, one for each part of the heads.
        timeout: time after which a process gives up waiting for the others.
    """

    store: Any
    rank: int
    with_model: int
    dedicated: int
    tensor_parallel_size: int
    timeout: timedelta

    @property
    def serves_only(self) -> bool:
        return self.rank >= self.with_model

    @property
    def dedicated_servers(self) -> int:
        return self.dedicated // self.tensor_parallel_size

    @property
    def tensor_parallel_rank(self) -> int:
        """Tensor-parallel rank of this dedicated process."""
        assert self.serves_only
        return (self.rank - self.with_model) % self.tensor_parallel_size

    @property
    def dedicated_number(self) -> int:
        """Number of this dedicated process's server among the dedicated servers."""
        assert self.serves_only
        return (self.rank - self.with_model) // self.tensor_parallel_size

    def init_default_group(self, backend: str) -> None:
        """Makes torch's default process group, of the processes of this one's kind. Collective."""
        name, first, size = (
            ("dedicated servers", self.with_model, self.dedicated)
            if self.serves_only
            else ("model", 0, self.with_model)
        )
        dist.init_process_group(
            backend,
            store=PrefixStore(name, self.store),
            rank=self.rank - first,
            world_size=size,
            timeout=self.timeout,
        )

    def share_places(self, places: list[Place] | None) -> list[Place]:
        """Tells all processes the places of those with a model; dedicated ones give None."""
        key = "places of the processes with a model"
        if places is None:
            self.store.wait([key], self.timeout)
            return [(t, s, d) for t, s, d in json.loads(self.store.get(key))]
        if self.rank == 0:
            self.store.set(key, json.dumps(places))
        return places

    def exchange_group(self, places: list[Place], tensor_parallel_rank: int, max_ctas: int) -> Any:
        """Makes the group of all processes that exchange with this one. Collective.

        Args:
            places: places of the processes with a model.
            tensor_parallel_rank: tensor-parallel rank of this process.
            max_ctas: as for `nccl_options`, where the backend is NCCL.
        """
        members = [n for n, place in enumerate(places) if place[0] == tensor_parallel_rank]
        members += range(
            self.with_model + tensor_parallel_rank,
            self.with_model + self.dedicated,
            self.tensor_parallel_size,
        )
        store = PrefixStore(f"exchange {tensor_parallel_rank}", self.store)
        rank, size = members.index(self.rank), len(members)
        # torch's own new_group() knows processes of the default group alone.
        if dist.get_backend() == "nccl":
            options = nccl_options(max_ctas, self.timeout)
            return dist.ProcessGroupNCCL(store, rank, size, options)
        return dist.ProcessGroupGloo(store, rank, size, self.timeout)


def join(dedicated: int, args: Namespace, environment: Mapping[str, str]) -> Processes:
    """Meets the other processes of a job with dedicated servers, and makes the default group.

    Collective. Where there are GPUs, this process gets its own.

    Args:
        dedicated: number of processes that only serve.
        args: Megatron-LM's arguments, whose world size counts processes with a model alone.
        environment: variables of this process, which are torchrun's interface.
    """
    rank, size = args.rank, args.world_size + dedicated
    if torch.cuda.is_available():
        torch.cuda.set_device(int(environment["LOCAL_RANK"]))
    store, _, _ = next(dist.rendezvous("env://", rank, size))  # type: ignore[attr-defined]
    processes = Processes(
        store,
        rank,
        args.world_size,
        dedicated,
        args.tensor_model_parallel_size,
        timedelta(minutes=args.distributed_timeout_minutes),
    )
    processes.init_default_group(args.distributed_backend)
    return processes


class Control:
    """Messages of the first rank to the dedicated servers. All calls are collective.

    Args:
        group: process group of the ranks that exchange.
        device: device of their tensors.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device

    def broadcast(self, numbers: Sequence[int]) -> list[int]:
        """Returns the first rank's numbers.

        The first rank does not wait for its device.

        Args:
            numbers: what the first rank tells; the others give as many.
        """
        sent = copy_to(torch.tensor(list(numbers), dtype=torch.int64), self._device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([sent], options).wait()
        return list(numbers) if self._group.rank() == 0 else sent.tolist()

    def announce(self, number: int) -> None:
        """Announces the iterator of the next global batch: see `DataIterators.numbered`."""
        self.broadcast([number])

    def dismiss(self) -> None:
        """Tells that no global batch follows."""
        self.broadcast([_END])

    def next_number(self) -> int | None:
        """Waits for the iterator of the next global batch; None: no global batch follows."""
        (number,) = self.broadcast([_END])
        return None if number == _END else number
