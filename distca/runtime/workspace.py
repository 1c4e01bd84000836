"""A bump allocator: memory that is allocated once and handed out again and again."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from distca.cost.memory import aligned


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor of this shape without gaps."""
    strides = accumulate(reversed(shape[1:]), operator.mul, initial=1)
    return tuple(strides)[::-1] if shape else ()


class Workspace:
    """A bump allocator of tensors, whose memory is all free again after `clear`.

    Args:
        device: device of the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._taken = 0
        # The whole memory as other types: a tensor is a slice of it.
        self._as: dict[torch.dtype, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return self._memory.numel()

    def reserve(self, nbytes: int) -> None:
        """Allocates the memory anew; tensors that were taken keep the old memory."""
        device = self._memory.device
        # The old memory is freed first, so that old and new never coexist.
        self._as.clear()
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._taken = 0

    def clear(self) -> None:
        """Frees all memory: tensors that were taken will be overwritten."""
        self._taken = 0

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Frees, at the end, what was taken inside."""
        taken = self._taken
        yield
        self._taken = taken

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Takes an uninitialised tensor."""
        begin = self._taken // dtype.itemsize
        end = self._taken + int(aligned(math.prod(shape) * dtype.itemsize))
        assert end <= self.nbytes, "no room was reserved for this plan"
        self._taken = end
        return self.elements(dtype).as_strided(shape, contiguous_strides(shape), begin)

    def elements(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the whole memory as elements of a dtype."""
        if dtype not in self._as:
            self._as[dtype] = self._memory.view(dtype)
        return self._as[dtype]

    def rows(self, like: torch.Tensor, rows: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Takes `rows` rows, each with the shape of those of `like`, of its dtype or another."""
        return self.take((rows, *like.shape[1:]), dtype or like.dtype)

    def gather(self, tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Copies the rows of a tensor at int64 indices `[n]`."""
        into = self.rows(tensor, rows.shape[0])
        return torch.index_select(tensor, 0, rows, out=into)

    def copy(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Copies a tensor to another dtype."""
        return self.rows(tensor, tensor.shape[0], dtype).copy_(tensor)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor lies in this workspace's memory."""
        return tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()
