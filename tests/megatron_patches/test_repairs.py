"""Megatron-core where something that it counts on is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_patches.mcore_fixes import with_whole_state
from megatron_patches.without_triton import _NeedsTriton


def test_without_triton_modes_are_off_and_kernels_name_it() -> None:
    kernels = _NeedsTriton("kernels")
    assert kernels.is_batch_invariant_mode_enabled() is False
    with pytest.raises(ImportError, match="multiply needs triton: pip install triton"):
        kernels.multiply(1, out=2)
    # Not taken for a package by those that look for its path.
    assert not hasattr(kernels, "__path__")


class Wrapped:
    """As megatron-core wraps an optimizer."""

    def __init__(self, optimizer: Any, config: Any, init_state_fn: Any = None) -> None:
        self.fill: Callable[[Any], None] = init_state_fn


def steps(optimizer: Any, parameters: list[torch.nn.Parameter], seeds: range) -> None:
    for seed in seeds:
        for parameter in parameters:
            generator = torch.Generator().manual_seed(seed)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    ],
    ids=["adamw", "adam", "sgd"],
)
def test_an_optimizer_goes_on_from_a_state_that_megatron_loads(make: Callable[..., Any]) -> None:
    """Filled before anything is loaded, and with one `step` for all parameters."""
    whole, stopped, resumed = ([torch.nn.Parameter(torch.ones(3)) for _ in "ab"] for _ in range(3))
    uninterrupted, first, second = map(make, (whole, stopped, resumed))
    steps(uninterrupted, whole, range(5))
    steps(first, stopped, range(3))
    saved = first.state_dict()
    common = torch.tensor(3.0)
    for state in saved["state"].values():
        if "step" in state:
            state["step"] = common
    wrapped = Wrapped.__new__(Wrapped)
    with_whole_state(Wrapped.__init__)(wrapped, second, None)
    wrapped.fill(second)
    assert second.state_dict()["state"].keys() == saved["state"].keys()
    for mine, theirs in zip(resumed, stopped, strict=True):
        mine.data.copy_(theirs.data)
    second.load_state_dict(saved)
    steps(second, resumed, range(3, 5))
    assert all(torch.equal(*pair) for pair in zip(resumed, whole, strict=True))
