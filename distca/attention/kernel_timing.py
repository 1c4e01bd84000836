"""Measurement of this machine's attention kernel, many tasks in a call (paper, Section 4.2)."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

import numpy as np
import torch

from distca.attention import Kernel, KernelTasks, select_kernel_of_heads
from distca.cost.profile import Profile
from distca.cost.volume import AttentionShape
from distca.machine import cpu_name

Direction = Literal["forward", "backward"]
"""Pass of a kernel."""
HELD_OUT = 40
"""Number of points that are measured to see how far predictions are off."""
_FEW = (1, 8)
"""Lengths that are measured below the powers of two."""
_SATURATED = 1.5
"""A call with twice the tasks takes so much longer where half of them keep the device busy, and
their work at least as long as the launch."""


class KernelTimer:
    """A stopwatch for the tasks of a kernel, as attention servers run them.

    A server computes many tasks in one call. A short task that is alone in a call takes a launch
    and leaves most of a GPU empty, which it does not in company. So equal tasks share a call, in
    growing number, until twice the tasks take much longer: then the seconds that a further task
    adds are what a task costs.

    Args:
        kernel: attention kernel.
        shape: heads; `dtype_bytes` 4 is float32, 2 bfloat16.
        max_length: tokens of the longest task; calls have up to twice as many rows.
        device: "cpu" or "cuda".
        clock: function that returns the seconds now.
    """

    def __init__(
        self,
        kernel: Kernel,
        shape: AttentionShape,
        max_length: int,
        device: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._kernel, self._device, self._clock = kernel, device, clock
        self._rows = 2 * max_length
        dtype = {4: torch.float32, 2: torch.bfloat16}[shape.dtype_bytes]
        generator = torch.Generator().manual_seed(0)
        self._q, self._k, self._v = (
            torch.randn(self._rows, *head, generator=generator).to(device, dtype)
            for head in (
                (shape.heads, shape.head_dim),
                (shape.kv_heads, shape.head_dim),
                (shape.kv_heads, shape.value_dim),
            )
        )

    def seconds(
        self,
        q_len: int,
        kv_len: int,
        causal: bool,
        budget: float = 0.1,
        direction: Direction = "forward",
    ) -> float:
        """Measures the seconds that one more task adds to a call which keeps the device busy.

        If a call has too few rows to keep the device busy, it is a task's part of the largest call.

        Args:
            q_len: query rows of the task.
            kv_len: key rows of the task.
            causal: whether the task ends on the diagonal; otherwise it is a full rectangle.
            budget: seconds that may be spent on each number of tasks.
            direction: pass that is measured.
        """

        def call(tasks: int) -> float:
            return self._call(tasks, q_len, kv_len, causal, budget, direction)

        tasks, took = 1, call(1)
        while 2 * tasks * max(q_len, kv_len) <= self._rows:
            twice = call(2 * tasks)
            if twice >= _SATURATED * took:
                return (twice - took) / tasks
            tasks, took = 2 * tasks, twice
        return took / tasks

    def _call(
        self,
        tasks: int,
        q_len: int,
        kv_len: int,
        causal: bool,
        budget: float,
        direction: Direction = "forward",
    ) -> float:
        """Returns the seconds of the fastest run of a call with a number of equal tasks."""
        q, k, v = self._q[: tasks * q_len], self._k[: tasks * kv_len], self._v[: tasks * kv_len]
        edges = [torch.arange(tasks + 1, dtype=torch.int32) * n for n in (q_len, kv_len)]
        equal = KernelTasks(edges[0], edges[1], causal, window_left=None, softmax_scale=0.1)

        def forward() -> None:
            self._kernel.forward(q, k, v, equal)

        if direction == "forward":
            return fastest(forward, self._synchronize, budget, self._clock)
        out, lse = self._kernel.forward(q, k, v, equal)

        def backward() -> None:
            self._kernel.backward(out, q, k, v, out, lse, equal)

        return fastest(backward, self._synchronize, budget, self._clock)

    def backward_over_forward(self, tokens: int, budget: float = 0.1) -> float:
        """Measures a document's backward pass over its forward pass.

        Args:
            tokens: tokens of the document.
            budget: seconds that may be spent on each of the two.
        """
        took = self._call(1, tokens, tokens, True, budget, "backward")
        return took / self._call(1, tokens, tokens, True, budget)

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def fastest(
    run: Callable[[], object],
    synchronize: Callable[[], None],
    budget: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Returns the seconds of the fastest run, after a warm-up; three runs or more, within a
    budget."""
    run()
    synchronize()
    best, spent, times = math.inf, 0.0, 0
    while times < 3 or (spent < budget and times < 50):
        start = clock()
        run()
        synchronize()
        took = clock() - start
        best, spent, times = min(best, took), spent + took, times + 1
    return best


def profiled_lengths(max_length: int, min_length: int = 32) -> tuple[int, ...]:
    """Returns the lengths of the grid: powers of two up to `max_length`, and few tokens.

    A decoded token is one query; between one and `min_length` another point shows the bend.

    Raises:
        ValueError: the grid would have fewer than two lengths.
    """
    if min_length < 1 or max_length < 2 * min_length:
        raise ValueError(f"--max-length {max_length} must be at least {2 * min_length}")
    doublings = int(math.log2(max_length / min_length))
    few = tuple(n for n in _FEW if n < min_length)
    return (*few, *(min_length * 2**n for n in range(doublings + 1)))


def profile_kernel(
    shape: AttentionShape,
    max_length: int,
    device: str = "cpu",
    min_length: int = 32,
    told: Callable[[], None] = lambda: None,
    budget: float = 0.1,
    backward: bool = True,
) -> Profile:
    """Measures this machine at each pair of `profiled_lengths`.

    Args:
        shape: heads; `dtype_bytes` 4 is float32, 2 bfloat16.
        max_length: tokens of the longest task.
        device: "cpu" or "cuda".
        min_length: tokens from which on each length is twice the one before.
        told: function that is called after each pair of lengths.
        budget: seconds that may be spent on each call.
        backward: whether backward passes are measured, too.

    Raises:
        ValueError: the grid would have fewer than two lengths.
    """
    lengths = profiled_lengths(max_length, min_length)
    kernel = select_kernel_of_heads(device, shape.head_dim, shape.value_dim)
    timer = KernelTimer(kernel, shape, lengths[-1], device)
    directions: tuple[Direction, ...] = ("forward", "backward") if backward else ("forward",)
    tables = {
        (direction, causal): [[0.0] * len(lengths) for _ in lengths]
        for direction in directions
        for causal in (False, True)
    }
    for i, q_len in enumerate(lengths):
        for j, kv_len in enumerate(lengths):
            for (direction, causal), seconds in tables.items():
                if causal and j < i:
                    continue
                seconds[i][j] = timer.seconds(q_len, kv_len, causal, budget, direction)
            told()
    for (_, causal), seconds in tables.items():
        if causal:
            for i, row in enumerate(seconds):
                row[:i] = [row[i]] * i
    full, diagonal, *of_backward = (
        tuple(tuple(row) for row in seconds) for seconds in tables.values()
    )
    return Profile(lengths, full, diagonal, shape, _provenance(device, kernel), *of_backward)


def backward_over_forward(shape: AttentionShape, tokens: int, device: str) -> float:
    """Measures how many times as long as its forward pass a document's backward pass takes.

    Args:
        shape: heads; `dtype_bytes` 4 is float32, 2 bfloat16.
        tokens: tokens of the document.
        device: "cpu" or "cuda".
    """
    kernel = select_kernel_of_heads(device, shape.head_dim, shape.value_dim)
    return KernelTimer(kernel, shape, tokens, device).backward_over_forward(tokens)


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
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def held_out_errors(
    profile: Profile,
    device: str,
    points: int = HELD_OUT,
    seed: int = 0,
    told: Callable[[], None] = lambda: None,
) -> list[float]:
    """Returns the relative errors of predictions for lengths that are not on the grid.

    Args:
        profile: times that predict.
        device: "cpu" or "cuda".
        points: number of lengths.
        seed: seed of the lengths.
        told: function that is called after each of them.
    """
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
        told()
    return errors
