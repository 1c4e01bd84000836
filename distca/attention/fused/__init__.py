"""Fused kernels in Triton, in place of many small operators of torch, and their choice.

Each does in one launch what torch's operators do in many; these stay as the reference, and are what
runs on CPUs and where triton is not installed. `make_rows` copies rows, or sums them, from and to
wherever they lie; `merge_rows` merges partial outputs by their LSE; `finish_outputs` writes what an
attention kernel returned. Models that are served have `write_rows`, which writes keys and values to
a pool, `normalize_rows`, `rotate_heads`, and `ExpertKernels`. None has run on a GPU yet.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import re

import torch

from distca.attention.fused.experts import ClampedGate, ExpertKernels
from distca.attention.fused.jobs import FusedKernels, RowJob, RowMemory

__all__ = [
    "ClampedGate",
    "ExpertKernels",
    "FusedKernels",
    "RowJob",
    "RowMemory",
    "load_expert_kernels",
    "load_fused_kernels",
]

logger = logging.getLogger(__name__)

LEAST_TRITON = (3, 4)
"""Oldest version of triton that the kernels were compiled with."""
MODULE = "distca.attention.fused.triton_kernels"
EXPERTS_MODULE = "distca.attention.fused.triton_experts"


def load_fused_kernels(device_type: str) -> FusedKernels | None:
    """Returns the fused kernels of a device; None: it has none, and torch's operators do the work.

    Args:
        device_type: "cpu" or "cuda".

    Raises:
        ValueError: triton is installed but cannot be used.
    """
    return _load() if device_type == "cuda" else None


def load_expert_kernels(device_type: str) -> ExpertKernels | None:
    """Returns the fused kernels of layers with experts; None and errors as `load_fused_kernels`."""
    if load_fused_kernels(device_type) is None:
        return None
    return ExpertKernels(importlib.import_module(EXPERTS_MODULE))


@functools.cache
def _load() -> FusedKernels | None:
    version = _version()
    numbers = tuple(int(each) for each in re.findall(r"\d+", version or ""))
    if version is not None and numbers < LEAST_TRITON:
        least = ".".join(map(str, LEAST_TRITON))
        logger.info("rows move by torch's operators: triton %s is older than %s", version, least)
        return None
    try:
        kernels = FusedKernels(importlib.import_module(MODULE))
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        logger.info("rows move by torch's operators: triton is not installed")
        return None
    try:
        _try(kernels)
    except Exception as error:  # A missing compiler or driver raises anything.
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"triton {version} is installed but cannot be used ({why}): mend it, or uninstall it: "
            "then torch's operators are used"
        ) from error
    logger.info("rows move by fused kernels of triton %s", version)
    return kernels


def _version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def _try(kernels: FusedKernels) -> None:
    """Runs the smallest kernel, before any work relies on it."""
    rows = torch.arange(4.0, device="cuda").view(2, 2)
    found = torch.empty_like(rows)
    kernels.make_rows([RowJob(RowMemory(rows), RowMemory(found), 2)])
    if not torch.equal(rows, found):
        raise RuntimeError("rows are not copied as they are")
