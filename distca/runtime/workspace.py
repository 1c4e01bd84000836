"""Memory that is allocated once and handed out again and again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from distca.cost.memory import aligned


class Workspace:
    """Hands out tensors one after the other, and all of its memory again after `clear`.

    Args:
        device: where its memory is.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._taken = 0

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self._memory.numel()

    def reserve(self, nbytes: int) -> None:
        """Allocates it anew; tensors that were taken are no longer its own."""
        device = self._memory.device
        # The old memory first, so that both are never there together.
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._taken = 0

    def clear(self) -> None:
        """All that was taken will be overwritten."""
        self._taken = 0

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """What is taken inside will be overwritten afterwards."""
        taken = self._taken
        yield
        self._taken = taken

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with whatever is in memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        end = self._taken + aligned(nbytes)
        assert end <= self.nbytes, "no room was reserved for this plan"
        part = self._memory[self._taken : self._taken + nbytes]
        self._taken = end
        return part.view(dtype).view(shape)

    def rows(self, like: torch.Tensor, rows: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`rows` rows of the shape of those of `like`, in its type or another."""
        return self.take((rows, *like.shape[1:]), dtype or like.dtype)

    def gather(self, tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The rows of a tensor at int64 indices."""
        into = self.rows(tensor, len(rows))
        return torch.index_select(tensor, 0, rows, out=into)

    def copy(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same numbers in another type."""
        return self.rows(tensor, len(tensor), dtype).copy_(tensor)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in it."""
        return tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()
