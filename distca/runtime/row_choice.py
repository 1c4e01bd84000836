"""The choice of what moves rows on a device."""

from __future__ import annotations

from distca.attention.fused import load_fused_kernels
from distca.runtime.fused_rows import FusedRowKernels
from distca.runtime.row_kernels import RowKernels
from distca.runtime.torch_rows import TorchRowKernels


def select_row_kernels(device_type: str) -> RowKernels:
    """Makes the row kernels of a device: fused ones on GPUs where triton is installed.

    Args:
        device_type: "cpu" or "cuda".

    Raises:
        ValueError: triton is installed but cannot be used.
    """
    kernels = load_fused_kernels(device_type)
    if kernels is None:
        return TorchRowKernels()
    return FusedRowKernels(kernels)
