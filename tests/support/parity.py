"""How runs with `--distca` are held against plain Megatron."""

from __future__ import annotations

import torch

from support.models import StepsDone, whole_gradients

WHOLE = "--no-distca-ping-pong"
NANO_BATCHES = ("--distca-ping-pong", WHOLE)
RECOMPUTE = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def check_gradients(found: list[StepsDone], expected: StepsDone, case: object) -> None:
    """Every gradient of the ranks together is that of one plain process."""
    gradients, wanted = whole_gradients(found), whole_gradients([expected])
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        error = relative(gradient, wanted[name])
        assert error < 1e-5, (case, name, error)
