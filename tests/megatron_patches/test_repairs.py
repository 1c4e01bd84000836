"""Megatron-core where something that it counts on is not installed."""

from __future__ import annotations

import pytest

from megatron_patches.without_triton import _NeedsTriton


def test_without_triton_modes_are_off_and_kernels_name_it() -> None:
    kernels = _NeedsTriton("kernels")
    assert kernels.is_batch_invariant_mode_enabled() is False
    with pytest.raises(ImportError, match="multiply needs triton: pip install triton"):
        kernels.multiply(1, out=2)
    # Not taken for a package by those that look for its path.
    assert not hasattr(kernels, "__path__")
