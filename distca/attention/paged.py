"""Attention over keys and values that lie in blocks of a pool, where they stay.

A task's keys are rows `first .. used` of a line of a block table. FlashAttention's kernels on GPUs,
and our own for decodes on CPUs, are given the table itself. For torch's operators on CPUs, runs of
neighbouring blocks are views of the pool, one call each, which merge by LSE.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from distca.attention.kernel import Gradients, Kernel, KernelTasks, Outputs
from distca.attention.pinned import copy_to
from distca.plan.span import Int64s, expand_ranges


@dataclass(frozen=True)
class PagedKeys:
    """The keys of tasks in a pool. All layers of a step have the same.

    Attributes:
        table: blocks of each task, int32 `[tasks, columns]`, on the device of the pool.
        host: the same on the CPU.
        first: rows of each task's line before those that its queries see, int64 `[tasks]`.
        used: end of the rows that they see, likewise.
        block_size: rows of a block.
    """

    table: torch.Tensor
    host: NDArray[np.int32]
    first: Int64s
    used: Int64s
    block_size: int

    @cached_property
    def runs(self) -> list[list[tuple[int, int]]]:
        """The slots of each task's keys in order: ranges `(begin, end)`, as few as there are."""
        ends = -(-self.used // self.block_size)
        # A run ends behind a block that is not followed by its neighbour.
        line, column = np.nonzero(np.diff(self.host, axis=1) != 1)
        inner = (column + 1 < ends[line]) & (column + 1 > self.first[line] // self.block_size)
        cuts: list[list[int]] = [[] for _ in self.used]
        for task, cut in zip(line[inner].tolist(), column[inner].tolist(), strict=True):
            cuts[task].append((cut + 1) * self.block_size)
        found = []
        for task, (first, used) in enumerate(
            zip(self.first.tolist(), self.used.tolist(), strict=True)
        ):
            edges = [first, *cuts[task], used] if first < used else []
            found.append([*self._slots(task, edges)])
        return found

    def _slots(self, task: int, edges: list[int]) -> Iterator[tuple[int, int]]:
        for begin, end in pairwise(edges):
            block, offset = divmod(begin, self.block_size)
            slot = int(self.host[task, block]) * self.block_size + offset
            yield slot, slot + end - begin

    def slots(self, device: torch.device) -> torch.Tensor:
        """Returns the slots of all tasks' keys, one task after the other, int64."""
        runs = [run for of_task in self.runs for run in of_task]
        # Without any run numpy would choose floating point.
        begins, ends = np.array(runs, dtype=np.int64).reshape(-1, 2).T
        return copy_to(torch.from_numpy(expand_ranges(begins, ends - begins)), device)

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`first` and `used` beside the table, int32."""
        both = torch.from_numpy(np.stack([self.first, self.used]).astype(np.int32))
        first, used = copy_to(both, self.table.device)
        return first, used


@dataclass(frozen=True)
class KeyTable:
    """Where the keys of tasks lie in a pool, on the device alone: a graph has others in each step.

    Attributes:
        blocks: blocks of each task, int32 `[tasks, columns]`.
        used: rows that each one's queries see, from the first on, int32 `[tasks]`.
        offsets: first query of each task, and the total, int32 `[tasks + 1]`.
        block_size: rows of a block.
    """

    blocks: torch.Tensor
    used: torch.Tensor
    offsets: torch.Tensor
    block_size: int

    @property
    def longest(self) -> int:
        """Most rows that a task may have."""
        return self.blocks.shape[1] * self.block_size

    def pages(self, rows_SHD: torch.Tensor) -> torch.Tensor:
        """Returns a pool's rows by block, `[blocks, block_size, kv_heads, head_dim]`: a view."""
        return rows_SHD.view(-1, self.block_size, *rows_SHD.shape[1:])


@runtime_checkable
class PagedKernel(Kernel, Protocol):
    """A kernel that also computes full rectangles over keys and values of a pool."""

    def forward_paged(
        self,
        q_THD: torch.Tensor,
        k_SHD: torch.Tensor,
        v_SHD: torch.Tensor,
        tasks: KernelTasks,
        keys: PagedKeys,
        into: Outputs | None = None,
    ) -> Outputs:
        """Does what `Kernel.forward` does; `k_SHD` and `v_SHD` are the pool's rows by slot, and
        `keys` tells which of them each task has."""
        ...


@runtime_checkable
class TableKernel(Protocol):
    """A kernel whose call for decoded tokens can be captured: the host has no part in it."""

    def reads_table(self, head_dim: int) -> bool:
        """Returns whether it reads paged keys of heads of this size."""
        ...

    def forward_table(
        self,
        q_THD: torch.Tensor,
        k_SHD: torch.Tensor,
        v_SHD: torch.Tensor,
        table: KeyTable,
        softmax_scale: float,
        window_left: int | None = None,
        softcap: float | None = None,
    ) -> Outputs:
        """Attention of one query of each task, which is the last token of its keys.

        Args:
            q_THD: queries, `[tasks, heads, head_dim]`.
            k_SHD: the pool's keys by slot, `[slots, kv_heads, head_dim]`.
            v_SHD: its values, likewise.
            table: keys of each task, at least one.
            softmax_scale: factor of the scores.
            window_left: earlier tokens that a query sees; None: all.
            softcap: see `KernelTasks`.

        Returns:
            Outputs like the queries, and their LSE, float32 `[tasks, heads]`.
        """
        ...


@dataclass(frozen=True)
class OfPool:
    """The forward pass of a `Kernel` whose keys and values are a pool's rows.

    Attributes:
        kernel: kernel that computes.
        keys: keys of each task.
    """

    kernel: PagedKernel
    keys: PagedKeys

    def forward(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        tasks: KernelTasks,
        into: Outputs | None = None,
    ) -> Outputs:
        """See `PagedKernel.forward_paged`."""
        return self.kernel.forward_paged(q_THD, k_THD, v_THD, tasks, self.keys, into)

    def backward(self, *_: object) -> Gradients:
        """Is never called: calls over a pool run without autograd."""
        raise AssertionError("keys and values of a pool have no gradients")
