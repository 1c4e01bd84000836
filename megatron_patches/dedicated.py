"""Dedicated attention servers: processes that hold no model and only serve (paper, Section 8).

They are the last processes of the job. To Megatron the others are all there are: these form the
default process group, and megatron-core divides them as ever. A dedicated server makes the same
plans from the same data. Before each global batch the first rank tells it which split's is next.
"""

from __future__ import annotations

import json
import logging
import math
import signal
from argparse import Namespace
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from megatron_patches.job import DataIterators, Job
from megatron_patches.serving import serve_tick
from megatron_patches.tick_batches import TickStream

logger = logging.getLogger(__name__)

SPLITS = ("train", "valid", "test")
_END = -1

Place = tuple[int, int, int]
"""Of a process with a model: its tensor-parallel rank, stage and data-parallel rank."""


@dataclass(frozen=True)
class Processes:
    """All processes of a job, those with a model first.

    Attributes:
        store: where they meet.
        rank: of this process among all.
        with_model: how many hold a model.
        dedicated: how many only serve.
        tensor_parallel_size: a server is so many processes, one for each part of the heads.
        timeout: after which a process gives up waiting for the others.
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
        """Of a dedicated process."""
        assert self.serves_only
        return (self.rank - self.with_model) % self.tensor_parallel_size

    @property
    def dedicated_number(self) -> int:
        """Of a dedicated process: its server's number among the dedicated ones."""
        assert self.serves_only
        return (self.rank - self.with_model) // self.tensor_parallel_size

    def init_default_group(self, backend: str) -> None:
        """Makes torch's default process group: those with a model, or those without. Collective."""
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
        """Where the processes with a model stand, for all; dedicated ones have None to give."""
        key = "places of the processes with a model"
        if places is None:
            self.store.wait([key], self.timeout)
            return [(t, s, d) for t, s, d in json.loads(self.store.get(key))]
        if self.rank == 0:
            self.store.set(key, json.dumps(places))
        return places

    def exchange_group(self, places: list[Place], tensor_parallel_rank: int) -> Any:
        """The processes that exchange with this one, of both kinds, in order. Collective."""
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
            options = dist.ProcessGroupNCCL.Options()
            options.is_high_priority_stream = True
            options._timeout = self.timeout
            return dist.ProcessGroupNCCL(store, rank, size, options)
        return dist.ProcessGroupGloo(store, rank, size, self.timeout)


class Control:
    """What the first rank tells the dedicated servers. All calls are collective.

    Args:
        group: the ranks that exchange.
        device: where their tensors are.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device

    def _broadcast(self, numbers: list[int]) -> list[int]:
        told = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([told], options).wait()
        return told.tolist()

    def share_consumed(self, args: Namespace) -> None:
        """Lets dedicated servers begin where the checkpoint left off."""
        args.consumed_train_samples, args.consumed_valid_samples = self._broadcast(
            [args.consumed_train_samples, args.consumed_valid_samples]
        )

    def announce(self, split: str) -> None:
        """A global batch of a split comes next."""
        self._broadcast([SPLITS.index(split)])

    def dismiss(self) -> None:
        """Nothing comes any more."""
        self._broadcast([_END])

    def next_split(self) -> str | None:
        """What comes next; None: nothing."""
        (number,) = self._broadcast([_END])
        return None if number == _END else SPLITS[number]


def serve(job: Job, args: Namespace) -> None:
    """What a dedicated process does instead of training. Collective with the whole job.

    Args:
        job: what the others run.
        args: its arguments, the same in all processes.
    """
    if args.exit_signal_handler:
        # The others end at the end of an iteration, and say so.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    samples, evaluations = args.global_batch_size, args.train_iters // args.eval_interval + 1
    data = job.build_data(
        args,
        args.train_iters * samples,
        evaluations * args.eval_iters * samples,
        args.eval_iters * samples,
    )
    control = data.control
    assert control is not None
    while (split := control.next_split()) is not None:
        _serve_global_batch(args, _ticks(data, split))
    data.finish()


def _ticks(data: DataIterators, split: str) -> TickStream:
    stream = getattr(data, split)
    assert isinstance(stream, TickStream)
    return stream


def _serve_global_batch(args: Namespace, ticks: TickStream) -> None:
    current = next(ticks)
    made = ticks.batches
    activation = torch.empty(0, dtype=args.params_dtype, device=ticks.device)
    layers = range(1, 1 + max(call.layer for call in made.rounds["forward"]) + 1)
    with made.core_attention.transport.checked():
        for number in range(len(current.schedule.ticks)):
            if number:
                current = next(ticks)
            placed = made.placed(current)
            serve_tick(made, placed, list(layers), 1 / math.sqrt(args.kv_channels), activation)
