"""Measured kernel times over a grid of lengths, and predictions from them (paper, Section 4.2).

    distca profile --heads 8 --kv-heads 2 --head-dim 32 --output profile.json

Both task shapes are measured, full rectangles and tasks that end on the diagonal. A prediction
interpolates the rate, in pairs a second, bilinearly between the four nearest grid points, in the
logarithms of lengths and rates. Beyond the grid, where the kernel is saturated, a length has the
rate of the grid's edge, so that a short query is as slow with more keys than were measured as with
the most that were: measure up to the lengths that matter.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from distca.attention import Kernel, select_kernel
from distca.cost.volume import AttentionShape
from distca.plan.span import Floats, Int64s

FORMAT = 1


@dataclass(frozen=True)
class Profile:
    """Kernel times of one machine; a `CostModel`.

    Attributes:
        lengths: the grid, for queries as well as keys, rising.
        full_seconds: `[query length][key length]`, forward, full rectangles.
        diagonal_seconds: the same for tasks that end on the diagonal; those with fewer keys than
            queries do not exist and repeat the square's time.
        shape: the heads that were measured.
        provenance: hardware, versions, kernel, date.
    """

    lengths: tuple[int, ...]
    full_seconds: tuple[tuple[float, ...], ...]
    diagonal_seconds: tuple[tuple[float, ...], ...]
    shape: AttentionShape
    provenance: dict[str, str]

    def __post_init__(self) -> None:
        size = len(self.lengths)
        tables = (self.full_seconds, self.diagonal_seconds)
        if size < 2 or list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 1:
            raise ValueError(f"a profile's lengths must be two or more and rise: {self.lengths}")
        for table in tables:
            if len(table) != size or any(len(row) != size for row in table):
                raise ValueError(f"a profile's table is not {size} x {size}")
            if not all(math.isfinite(value) and value > 0 for row in table for value in row):
                raise ValueError("a profile's times must be positive")

    @property
    def description(self) -> str:
        what = self.provenance
        return f"measured on {what.get('hardware', '?')} ({what.get('date', '?')})"

    @cached_property
    def _log_rates(self) -> tuple[Floats, Floats]:
        """Logarithms of pairs per second: full rectangles, and tasks that end on the diagonal."""
        q = np.array(self.lengths, dtype=np.float64)[:, None]
        kv = q.T
        full = np.log(q * kv / np.array(self.full_seconds))
        diagonal = np.log(_diagonal_pairs(q, kv) / np.array(self.diagonal_seconds))
        return full, diagonal

    def seconds(self, q_len: Int64s, kv_len: Int64s, pairs: Int64s) -> Floats:
        """See `CostModel.seconds`. A windowed task costs its share of the pairs without window."""
        q, kv = (np.maximum(np.asarray(x, dtype=np.float64), 1.0) for x in (q_len, kv_len))
        pairs_of_task = np.asarray(pairs, dtype=np.float64)
        is_full = pairs_of_task >= q * kv
        share = np.where(is_full, 1.0, np.minimum(pairs_of_task / _diagonal_pairs(q, kv), 1.0))
        # A task below the grid costs what the smallest on the grid does.
        smallest = self.lengths[0]
        q, kv = np.maximum(q, smallest), np.maximum(kv, smallest)
        all_pairs = np.where(is_full, q * kv, _diagonal_pairs(q, kv))
        full, diagonal = self._log_rates
        rate = np.where(
            is_full,
            self._interpolate(full, q, kv),
            self._interpolate(diagonal, q, np.maximum(kv, q)),
        )
        result: Floats = np.where(pairs_of_task > 0, share * all_pairs / rate, 0.0)
        return result

    def _interpolate(self, log_rate: Floats, q: Floats, kv: Floats) -> Floats:
        """Pairs per second, bilinear in logarithms; lengths off the grid take its edge."""
        grid = np.log(np.array(self.lengths, dtype=np.float64))
        top = len(grid) - 2
        (i, x), (j, y) = (self._cell(grid, top, length) for length in (q, kv))
        low = log_rate[i, j] * (1 - y) + log_rate[i, j + 1] * y
        high = log_rate[i + 1, j] * (1 - y) + log_rate[i + 1, j + 1] * y
        result: Floats = np.exp(low * (1 - x) + high * x)
        return result

    @staticmethod
    def _cell(grid: Floats, top: int, length: Floats) -> tuple[Int64s, Floats]:
        where = np.clip(np.log(length), grid[0], grid[-1])
        cell = np.clip(np.searchsorted(grid, where, side="right") - 1, 0, top)
        return cell, (where - grid[cell]) / (grid[cell + 1] - grid[cell])

    def save(self, path: Path) -> None:
        """Writes a readable JSON file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Profile:
        """Reads a file that `save` wrote.

        Raises:
            ValueError: it is missing, corrupt or of another format.
        """
        try:
            saved = json.loads(Path(path).read_text())
            if saved.pop("format") != FORMAT:
                raise ValueError("another format")
            return Profile(
                tuple(saved["lengths"]),
                tuple(tuple(row) for row in saved["full_seconds"]),
                tuple(tuple(row) for row in saved["diagonal_seconds"]),
                AttentionShape(**saved["shape"]),
                dict(saved["provenance"]),
            )
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path} is no usable profile ({error}): make one with `distca profile`"
            ) from error


def _diagonal_pairs(q: Floats, kv: Floats) -> Floats:
    """Visible pairs of a task that ends on the diagonal; of a square where keys are fewer."""
    return q * np.maximum(kv, q) - q * (q - 1) / 2


class KernelTimer:
    """Measures single forward tasks of a kernel.

    Args:
        kernel: the attention kernel.
        shape: heads; `dtype_bytes` 4 is float32, 2 bfloat16.
        max_length: the longest task.
        device: "cpu" or "cuda".
    """

    def __init__(self, kernel: Kernel, shape: AttentionShape, max_length: int, device: str) -> None:
        self._kernel, self._device = kernel, device
        dtype = {4: torch.float32, 2: torch.bfloat16}[shape.dtype_bytes]
        generator = torch.Generator().manual_seed(0)
        self._q, self._k, self._v = (
            torch.randn(max_length, heads, shape.head_dim, generator=generator).to(device, dtype)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )

    def seconds(self, q_len: int, kv_len: int, causal: bool, budget: float = 0.15) -> float:
        """The fastest of several runs of one task, within a budget of seconds (three at least)."""
        q, k, v = self._q[:q_len], self._k[:kv_len], self._v[:kv_len]
        edges = (torch.tensor([0, n], dtype=torch.int32) for n in (q_len, kv_len))
        cu_seqlens_q, cu_seqlens_kv = edges

        def run() -> None:
            self._kernel.forward(
                q,
                k,
                v,
                cu_seqlens_q,
                cu_seqlens_kv,
                causal=causal,
                window_left=None,
                softmax_scale=0.1,
            )

        return fastest(run, self._synchronize, budget)

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def fastest(run: Callable[[], None], synchronize: Callable[[], None], budget: float) -> float:
    """Seconds of the fastest run, after one to warm up."""
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
    """Measures this machine on a grid of powers of two up to `max_length`.

    Raises:
        ValueError: the lengths leave no grid.
    """
    if min_length < 1 or max_length < 2 * min_length:
        raise ValueError(f"--max-length {max_length} must be at least {2 * min_length}")
    from tqdm import tqdm

    steps = int(math.log2(max_length / min_length))
    lengths = tuple(min_length * 2**n for n in range(steps + 1))
    timer = KernelTimer(select_kernel(device), shape, lengths[-1], device)
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
        _provenance(device),
    )


def _provenance(device: str) -> dict[str, str]:
    hardware = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{cpu_name()}, {torch.get_num_threads()} thread(s)"
    )
    return {
        "hardware": hardware,
        "kernel": type(select_kernel(device)).__name__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def cpu_name() -> str:
    """What this machine calls its processor."""
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
    timer = KernelTimer(select_kernel(device), profile.shape, high, device)
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


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog="distca profile", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "--heads", type=int, default=8, metavar="N", help="query heads of a tensor-parallel rank"
    )
    parser.add_argument("--kv-heads", type=int, default=2, metavar="N", help="its key-value heads")
    parser.add_argument("--head-dim", type=int, default=32, metavar="N", help="elements of a head")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="default: bf16 on GPUs only")
    parser.add_argument(
        "--max-length",
        type=int,
        default=4096,
        metavar="TOKENS",
        help="of the longest task that is measured; beyond, its rate counts",
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="for --distca-profile"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(args.threads)
    dtype = args.dtype or ("bf16" if device == "cuda" else "fp32")
    try:
        element_bytes = {"fp32": 4, "bf16": 2}[dtype]
        shape = AttentionShape(args.heads, args.kv_heads, args.head_dim, element_bytes)
        profile = profile_kernel(shape, args.max_length, device)
    except ValueError as error:
        parser.error(str(error))
    profile.save(args.output)
    errors = held_out_errors(profile, device)
    sys.stdout.write(
        f"{args.output}: {profile.description}\n"
        f"held-out points: median error {statistics.median(errors):.1%}, "
        f"largest {max(errors):.1%} of {len(errors)}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
