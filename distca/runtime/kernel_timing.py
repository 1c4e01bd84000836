"""Measurement of this machine's attention kernel, one task at a time (paper, Section 4.2)."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch

from distca.attention import Kernel, KernelTasks, select_kernel_of_heads
from distca.cost.profile import Profile
from distca.cost.volume import AttentionShape

_FEW = (1, 8)
"""Lengths that are measured below the powers of two."""


class KernelTimer:
    """A stopwatch for single forward tasks of a kernel.

    Args:
        kernel: attention kernel.
        shape: heads; `dtype_bytes` 4 is float32, 2 bfloat16.
        max_length: tokens of the longest task.
        device: "cpu" or "cuda".
    """

    def __init__(self, kernel: Kernel, shape: AttentionShape, max_length: int, device: str) -> None:
        self._kernel, self._device = kernel, device
        dtype = {4: torch.float32, 2: torch.bfloat16}[shape.dtype_bytes]
        generator = torch.Generator().manual_seed(0)
        self._q, self._k, self._v = (
            torch.randn(max_length, *head, generator=generator).to(device, dtype)
            for head in (
                (shape.heads, shape.head_dim),
                (shape.kv_heads, shape.head_dim),
                (shape.kv_heads, shape.value_dim),
            )
        )

    def seconds(self, q_len: int, kv_len: int, causal: bool, budget: float = 0.15) -> float:
        """Seconds of the fastest run of a task, of three or more within a budget in seconds."""
        q, k, v = self._q[:q_len], self._k[:kv_len], self._v[:kv_len]
        edges = [torch.tensor([0, n], dtype=torch.int32) for n in (q_len, kv_len)]
        tasks = KernelTasks(edges[0], edges[1], causal, window_left=None, softmax_scale=0.1)

        def run() -> None:
            self._kernel.forward(q, k, v, tasks)

        return fastest(run, self._synchronize, budget)

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def fastest(run: Callable[[], None], synchronize: Callable[[], None], budget: float) -> float:
    """Seconds of the fastest run, after a warm-up; three runs or more, within a budget."""
    run()
    synchronize()
    best, spent, times = math.inf, 0.0, 0
    while times < 3 or (spent < budget and times < 50):
        start = time.perf_counter()
        run()
        synchronize()
        took = time.perf_counter() - start
        best, spent, times = min(best, took), spent + took, times + 1
    return best


def profile_kernel(
    shape: AttentionShape, max_length: int, device: str = "cpu", min_length: int = 32
) -> Profile:
    """Measures this machine on a grid of powers of two up to `max_length`, and on few tokens.

    A decoded token is one query; between one and `min_length` another point shows the bend.

    Raises:
        ValueError: the grid would have fewer than two lengths.
    """
    if min_length < 1 or max_length < 2 * min_length:
        raise ValueError(f"--max-length {max_length} must be at least {2 * min_length}")
    from tqdm import tqdm

    doublings = int(math.log2(max_length / min_length))
    few = tuple(n for n in _FEW if n < min_length)
    lengths = (*few, *(min_length * 2**n for n in range(doublings + 1)))
    kernel = select_kernel_of_heads(device, shape.head_dim, shape.value_dim)
    timer = KernelTimer(kernel, shape, lengths[-1], device)
    full = [[0.0] * len(lengths) for _ in lengths]
    diagonal = [[0.0] * len(lengths) for _ in lengths]
    cells = [(i, j) for i in range(len(lengths)) for j in range(len(lengths))]
    for i, j in tqdm(cells, unit=" points", disable=None):
        full[i][j] = timer.seconds(lengths[i], lengths[j], causal=False)
        if j >= i:
            diagonal[i][j] = timer.seconds(lengths[i], lengths[j], causal=True)
    for i in range(len(lengths)):
        for j in range(i):
            diagonal[i][j] = diagonal[i][i]
    return Profile(
        lengths,
        tuple(tuple(row) for row in full),
        tuple(tuple(row) for row in diagonal),
        shape,
        _provenance(device, kernel),
    )


def _provenance(device: str, kernel: Kernel) -> dict[str, str]:
    hardware = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{cpu_name()}, {torch.get_num_threads()} thread(s)"
    )
    return {
        "hardware": hardware,
        "kernel": type(kernel).__name__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def cpu_name() -> str:
    """Name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def held_out_errors(profile: Profile, device: str, points: int = 40, seed: int = 0) -> list[float]:
    """Relative errors of predictions for lengths that are not on the grid."""
    generator = np.random.default_rng(seed)
    low, high = profile.lengths[0], profile.lengths[-1]
    shape = profile.shape
    kernel = select_kernel_of_heads(device, shape.head_dim, shape.value_dim)
    timer = KernelTimer(kernel, shape, high, device)
    errors = []
    for number in range(points):
        drawn = np.exp(generator.uniform(np.log(low), np.log(high), size=2)).astype(np.int64)
        causal = number % 2 == 1
        q, kv = (int(drawn.min()), int(drawn.max())) if causal else map(int, drawn)
        pairs = q * kv - q * (q - 1) // 2 if causal else q * kv
        columns = (np.array([x], dtype=np.int64) for x in (q, kv, pairs))
        measured = timer.seconds(q, kv, causal)
        errors.append(abs(float(profile.seconds(*columns)[0]) / measured - 1))
    return errors
