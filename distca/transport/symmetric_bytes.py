"""Memory that NVSHMEM allocates, at the same place of every rank's GPU."""

from __future__ import annotations

from typing import Any

import torch

ALIGNMENT = 512
"""Bytes."""


class _Address:
    """Device memory that is not torch's, for `torch.as_tensor`."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class SymmetricBytes:
    """As many bytes on every rank's GPU, allocated by NVSHMEM. Collective.

    Attributes:
        address: of this rank's.
        peers: of each rank's as mapped here; 0 where it is not.
        own: this rank's, uint8 `[nbytes]`, zeroed.
    """

    def __init__(self, bindings: Any, ranks: int, nbytes: int, device: torch.device) -> None:
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
        """Collective."""
        self._bindings.free(self.address)
