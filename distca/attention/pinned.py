"""Copies from the host that it does not wait for."""

from __future__ import annotations

import torch


def copy_to(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor of the host to a device, by pinned memory where that is a GPU.

    The host would wait for a copy of pageable memory, and for all work that the stream was given
    before. torch keeps the pinned memory until the copy has ended.
    """
    return _pinned_for(device, source).to(device, non_blocking=True)


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies a tensor of the host to one of a device, as `copy_to` does."""
    target.copy_(_pinned_for(target.device, source), non_blocking=True)


def _pinned_for(device: torch.device, source: torch.Tensor) -> torch.Tensor:
    if device.type == "cuda":
        source = source.pin_memory()
    return source
