"""Prefills that the Tetris paper measured: its Table 1, Llama-3 8B on A100s."""

from __future__ import annotations

from distca.schedule.serving.cdsp.latency import Prefill, PrefillModel

_SECONDS = {
    1: (0.28, 0.57, 1.29, 3.22, 9.05, 29.20),
    2: (0.16, 0.31, 0.69, 1.67, 4.61, 14.30, 50.07),
    4: (0.13, 0.20, 0.39, 0.92, 2.43, 7.32, 24.77),
    8: (0.21, 0.24, 0.31, 0.58, 1.37, 3.96, 12.81),
    16: (0.39, 0.43, 0.46, 0.53, 0.96, 2.31, 7.02),
}

TABLE_1 = tuple(
    Prefill(degree, 4096 << doubled, seconds)
    for degree, row in _SECONDS.items()
    for doubled, seconds in enumerate(row)
)
"""Seconds by degree and length, from 4K tokens on; one rank has no memory for 256K."""


def published_model() -> PrefillModel:
    """Fits Eq. 1 to Table 1."""
    return PrefillModel.fit(TABLE_1, "dgx-a100", "llama-8b")
