"""What the ranks of a planner compare: its arguments, micro-batches, and calls of core attention.

Ranks plan each for itself, and their exchanges have no headers. So ranks that differ would take
each other's bytes for something else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import zip_longest

import numpy as np
import torch
import torch.distributed as dist

from distca.plan import Plan
from distca.transport import naming_lost_ranks

_NOTHING = -1
"""In place of a digest: a rank cannot place what it was given."""
_KEPT = 10_000
"""Calls since the last micro-batch that are kept for messages. The digest has all."""


def compare_arguments(
    arguments: Mapping[str, str], wrong: Exception | None, group: dist.ProcessGroup | None
) -> None:
    """Compares the arguments of all ranks' planners. Collective.

    Args:
        arguments: this rank's arguments in words, by name; none if they are wrong.
        wrong: why its planner cannot be made, or None.
        group: the ranks; None: all.

    Raises:
        ValueError: they differ, or those of a rank are wrong; on all ranks, and what is wrong on
            this one.
        LostRankError: another rank has ended or does not answer.
    """
    found: list[Mapping[str, str]] = [{}] * dist.get_world_size(group)
    with naming_lost_ranks("the comparison of planners' arguments"):
        dist.all_gather_object(found, dict(arguments), group)
    if wrong is not None:
        raise wrong
    for rank, each in enumerate(found):
        if not each:
            raise ValueError(f"rank {rank} cannot make its planner, and says why")
    for rank, each in enumerate(found):
        for name, value in each.items():
            if value != found[0][name]:
                raise ValueError(
                    f"rank {rank} makes its planner with {name}={value}, but rank 0 with "
                    f"{name}={found[0][name]}: give the same on all ranks"
                )


def digest_of_plans(plans: Sequence[Plan]) -> int:
    """Returns a number of 63 bits that other plans hardly have."""
    return digest_of_bytes(part for plan in plans for part in _parts(plan))


def digest_of_bytes(parts: object) -> int:
    """Returns a number of 63 bits that other parts hardly have.

    Args:
        parts: an iterable of bytes.
    """
    summed = hashlib.blake2b(digest_size=8)
    for each in parts:  # type: ignore[attr-defined]
        summed.update(len(each).to_bytes(8, "little"))
        summed.update(each)
    return int.from_bytes(summed.digest(), "little") >> 1


def _parts(value: object) -> list[bytes]:
    if isinstance(value, np.ndarray):
        return [value.tobytes()]
    if is_dataclass(value):
        return [part for each in fields(value) for part in _parts(getattr(value, each.name))]
    return [repr(value).encode()]


@dataclass(frozen=True)
class Placed:
    """What a rank says of a micro-batch that it places: digests of 63 bits.

    Attributes:
        documents: of its documents; `_NOTHING` if it cannot place them.
        plans: of its plans.
        arguments: of its planner's arguments.
    """

    documents: int = _NOTHING
    plans: int = _NOTHING
    arguments: int = _NOTHING


@dataclass(frozen=True)
class _Sent:
    """A comparison that is under way.

    Attributes:
        numbers: digests of each rank, int64 `[ranks, 4]`, on the CPU.
        arrived: when the device has written them; None: they are there.
        calls: calls of this rank before it.
    """

    numbers: torch.Tensor
    arrived: torch.cuda.Event | None
    calls: tuple[str, ...]


class Comparisons:
    """Compares what ranks place, and what they have called since the last micro-batch.

    A GPU is not waited for: what it has exchanged is looked at when the next micro-batch is placed.

    Attributes:
        waits: whether each comparison is looked at where it is made.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._calls: list[str] = []
        self._summed = hashlib.blake2b(digest_size=8)
        self._sent: _Sent | None = None
        self.waits = device.type == "cpu"

    def add_call(self, call: str) -> None:
        """Notes a call of this rank, in words."""
        self._summed.update(call.encode())
        if len(self._calls) < _KEPT:
            self._calls.append(call)

    def compare(self, mine: Placed, at_once: bool) -> None:
        """Compares a micro-batch, and the calls before it. Collective.

        Args:
            mine: what this rank places.
            at_once: whether to wait for a GPU.

        Raises:
            ValueError: ranks differ in the micro-batch, or in the one before it.
            LostRankError: another rank has ended or does not answer.
        """
        self._look()
        called = int.from_bytes(self._summed.digest(), "little") >> 1
        numbers = torch.tensor([mine.documents, mine.plans, mine.arguments, called])
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            numbers = numbers.pin_memory().to(self._device, non_blocking=True)
        found = [torch.empty_like(numbers) for _ in range(dist.get_world_size(self._group))]
        with naming_lost_ranks("the comparison of documents in Planner.place"):
            dist.all_gather(found, numbers, self._group)
            stacked, arrived = torch.stack(found), None
            if on_gpu:
                host = torch.empty(stacked.shape, dtype=torch.int64, pin_memory=True)
                stacked = host.copy_(stacked, non_blocking=True)
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record()
        self._sent = _Sent(stacked, arrived, tuple(self._calls))
        self._calls.clear()
        if self.waits or at_once:
            self._look()

    def _look(self) -> None:
        """Looks at the last comparison, all ranks at the same place of their loops."""
        sent, self._sent = self._sent, None
        if sent is None:
            return
        with naming_lost_ranks("the comparison of documents in Planner.place"):
            if sent.arrived is not None:
                sent.arrived.synchronize()
        documents, plans, arguments, called = sent.numbers.T.tolist()
        # What came first explains the rest.
        if _other(called) is not None:
            # What was called stays different: the next comparison begins anew.
            self._summed = hashlib.blake2b(digest_size=8)
            raise ValueError(self._of_calls(sent.calls))
        if _NOTHING in documents:
            raise ValueError(
                f"rank {documents.index(_NOTHING)} cannot place its documents, and says why: give "
                "the same ones on all ranks, or use share_documents"
            )
        if (rank := _other(documents)) is not None:
            raise ValueError(
                f"rank {rank} places other documents than rank 0: read the same ones on all "
                "ranks (a data loader that shuffles needs the same seed), or use share_documents"
            )
        if (rank := _other(arguments)) is not None:
            raise ValueError(
                f"rank {rank} places documents with a planner of other arguments than rank 0: use "
                "planners in the same order on all ranks"
            )
        if (rank := _other(plans)) is not None:
            raise ValueError(
                f"rank {rank} plans the same documents differently from rank 0: plan with "
                "`planner.collate`, and use one version of DistCA and one cost model on all ranks"
            )

    def _of_calls(self, mine: tuple[str, ...]) -> str:
        """Says how the ranks' calls differ. Collective."""
        found: list[tuple[str, ...]] = [()] * dist.get_world_size(self._group)
        with naming_lost_ranks("the comparison of calls in Planner.place"):
            dist.all_gather_object(found, mine, self._group)
        advice = (
            "outputs and gradients since then are wrong: start again from a checkpoint, and call "
            "the layers and their backward passes in one order on all ranks"
        )
        for rank, calls in enumerate(found):
            for number, (one, other) in enumerate(zip_longest(found[0], calls)):
                if one != other:
                    return (
                        f"as call {number} of core attention since the last micro-batch, rank "
                        f"{rank} made {other or 'none'}, but rank 0 {one or 'none'}: {advice}"
                    )
        return f"ranks called core attention in other orders: {advice}"


def _other(numbers: Sequence[int]) -> int | None:
    """Returns the first rank whose number is not that of rank 0."""
    return next((rank for rank, each in enumerate(numbers) if each != numbers[0]), None)
