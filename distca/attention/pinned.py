"""Copies from the host that it does not wait for."""

from __future__ import annotations

import torch


def copy_to(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor of the host to a device, by pinned memory where that is a GPU.

    The host would wait for a copy of pageable memory, and for all work that the stream was given
    before. torch keeps the pinned memory until the copy has ended.
    """
    if device.type == "cuda":
        source = source.pin_memory()
    return source.to(device, non_blocking=True)
