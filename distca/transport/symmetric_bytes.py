"""Symmetric memory: allocated by NVSHMEM at the same heap offset of every rank's GPU."""

from __future__ import annotations

from types import ModuleType

import torch

ALIGNMENT = 512
"""Alignment of an allocation, in bytes."""


class _Address:
    """Device memory that torch did not allocate, as `torch.as_tensor` accepts it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class SymmetricBytes:
    """Memory of equal size on every rank's GPU, allocated by NVSHMEM. Collective.

    Attributes:
        address: address of this rank's memory.
        peers: address of each rank's memory as mapped here; 0: not mapped.
        own: this rank's memory, uint8 `[nbytes]`, zeroed.

    Raises:
        RuntimeError: NVSHMEM cannot allocate so much.
    """

    def __init__(self, bindings: ModuleType, ranks: int, nbytes: int, device: torch.device) -> None:
        self._bindings = bindings
        nbytes = max(nbytes, ALIGNMENT)
        self.address = int(bindings.align(ALIGNMENT, nbytes))
        if self.address == 0:
            raise RuntimeError(
                f"NVSHMEM cannot allocate {nbytes / 1e6:.1f} MB: free GPU memory, or raise its "
                "NVSHMEM_SYMMETRIC_SIZE"
            )
        self.peers = [int(bindings.ptr(self.address, peer)) for peer in range(ranks)]
        self.own = torch.as_tensor(_Address(self.address, nbytes), device=device)
        self.own.zero_()

    def free(self) -> None:
        """Frees the memory. Collective."""
        self._bindings.free(self.address)
