"""NVSHMEM and a GPU for `NvshmemTransport` where there is neither: they note their calls."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from distca.transport import nvshmem, symmetric_bytes
from distca.transport.nvshmem import NvshmemTransport


@dataclass
class Fake:
    """What a rank's NVSHMEM does, and what it was asked for.

    Attributes:
        calls: names, in order.
        fails: the call that raises.
        unmapped: ranks on other machines.
        free_bytes: free bytes of the GPU.
        failure: what the kernels report.
        gpu_initiated: whether its GPU starts transfers between machines, once it was asked to.
    """

    calls: list[str] = field(default_factory=list)
    fails: str = ""
    unmapped: tuple[int, ...] = ()
    free_bytes: int = 1 << 40
    failure: str | None = None
    gpu_initiated: bool = False
    _memory: list[np.ndarray] = field(default_factory=list)

    def called(self, name: str) -> None:
        if name == self.fails:
            raise RuntimeError(f"{name} fails")
        self.calls.append(name)

    def align(self, alignment: int, nbytes: int) -> int:
        self.called("allocate")
        self._memory.append(np.zeros(nbytes, np.uint8))
        return int(self._memory[-1].ctypes.data)

    def ptr(self, address: int, peer: int) -> int:
        return 0 if peer in self.unmapped else address

    def free(self, address: int) -> None:
        self.called("free")

    def get_unique_id(self, empty: bool = False) -> Any:
        return types.SimpleNamespace(_data=np.zeros(4, np.uint8))

    def init(self, **how: Any) -> None:
        self.gpu_initiated &= os.environ.get("NVSHMEM_IB_ENABLE_IBGDA") == "1"
        self.called("init")

    def init_status(self) -> int:
        return 2

    def library_init(self, kernels: Any) -> None:
        self.called("library_init")

    def library_finalize(self, kernels: Any) -> None:
        self.called("library_finalize")

    def finalize(self) -> None:
        self.called("finalize")

    def putmem_on_stream(self, to: int, source: int, nbytes: int, peer: int, stream: int) -> None:
        self.called(f"put {peer}")

    def putmem_nbi_on_stream(
        self, to: int, source: int, nbytes: int, peer: int, stream: int
    ) -> None:
        self.called(f"start to put {peer}")

    def quiet_on_stream(self, stream: int) -> None:
        self.called("quiet")

    def compiled(self, architecture: int) -> str:
        self.called("compile")
        return "code"

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """It is what `NvshmemTransport` finds here, with a GPU."""
        cuda_core = types.ModuleType("cuda.core")
        cuda_core.Device = mock.MagicMock()  # type: ignore[attr-defined]
        kernel_object = types.SimpleNamespace(from_obj=lambda code: code)
        of_bytes = lambda at, n: np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(at))  # noqa: E731
        rank = mock.MagicMock()
        rank.failure = lambda: self.failure
        rank.gpu_initiated = lambda: self.gpu_initiated
        with (
            mock.patch.dict(sys.modules, {"cuda.core": cuda_core}),
            # What is set for NVSHMEM does not last.
            mock.patch.dict(os.environ),
            mock.patch.object(nvshmem, "_nvshmem", return_value=(self, self)),
            mock.patch.object(Fake, "NvshmemKernelObject", kernel_object, create=True),
            mock.patch.object(symmetric_bytes, "_Address", of_bytes),
            mock.patch.object(nvshmem, "_stream"),
            mock.patch.object(nvshmem, "Kernels"),
            mock.patch.object(nvshmem, "DeviceRank", return_value=rank),
            mock.patch.object(nvshmem, "kernels_of_mapped_peers", self.compiled),
            mock.patch.object(nvshmem, "kernels_with_nvshmem", self.compiled),
            mock.patch.multiple(
                torch.cuda,
                synchronize=mock.DEFAULT,
                current_stream=mock.DEFAULT,
                empty_cache=lambda: self.calls.append("empty cache"),
                mem_get_info=lambda device: (self.free_bytes, 1 << 40),
                get_device_capability=lambda device: (9, 0),
                Event=mock.DEFAULT,
            ),
        ):
            yield

    def transport(self, **how: Any) -> NvshmemTransport:
        return NvshmemTransport(dist.group.WORLD, torch.device("cpu"), **how)  # type: ignore[arg-type]
