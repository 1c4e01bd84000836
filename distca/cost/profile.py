"""Measured kernel times over a grid of lengths, and predictions from them (paper, Section 4.2).

`distca profile` (`distca.attention.kernel_timing`) measures both task shapes: full rectangles, and
tasks that end on the diagonal, many of each in a call, forward and backward. A prediction
interpolates the rate, in pairs
a second, bilinearly between the four nearest grid points, in the logarithms of lengths and rates.
Beyond the grid, where the kernel is saturated, the rate is that of the grid's edge. So a short
query is as slow with more keys than the grid has as with the most it has: measure up to the lengths
that matter.
"""

from __future__ import annotations

import json
import math
import operator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.cost.volume import AttentionShape
from distca.json_files import read_text
from distca.plan.span import Floats, Int64s
from distca.whole_file import write_text

FORMAT = 1


@dataclass(frozen=True)
class Profile:
    """Kernel times of one machine; a `CostModel`.

    Attributes:
        lengths: lengths of the grid, for queries as well as keys, rising.
        full_seconds: forward seconds of full rectangles, `[query length][key length]`.
        diagonal_seconds: forward seconds of tasks that end on the diagonal, likewise; a task with
            fewer keys than queries does not exist, and repeats the square's time.
        shape: heads that were measured.
        provenance: hardware, versions, kernel, date.
        backward_full_seconds, backward_diagonal_seconds: seconds of the same tasks' backward
            passes; None: these were not measured.

    Raises:
        ValueError: lengths don't rise, or a table has another size or a time that is not positive.
    """

    lengths: tuple[int, ...]
    full_seconds: tuple[tuple[float, ...], ...]
    diagonal_seconds: tuple[tuple[float, ...], ...]
    shape: AttentionShape
    provenance: dict[str, str]
    backward_full_seconds: tuple[tuple[float, ...], ...] | None = None
    backward_diagonal_seconds: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        size = len(self.lengths)
        tables = [self.full_seconds, self.diagonal_seconds]
        if (self.backward_full_seconds is None) != (self.backward_diagonal_seconds is None):
            raise ValueError("a profile has backward times of full tasks and of others, or of none")
        if self.backward_full_seconds is not None and self.backward_diagonal_seconds is not None:
            tables += [self.backward_full_seconds, self.backward_diagonal_seconds]
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
    def backward(self) -> Profile | None:
        """The seconds of backward passes as a `CostModel`; None: these were not measured."""
        full, diagonal = self.backward_full_seconds, self.backward_diagonal_seconds
        if full is None or diagonal is None:
            return None
        return Profile(self.lengths, full, diagonal, self.shape, self.provenance)

    def of_training(self) -> CostModel:
        """Returns the cost model by which training balances: that of both passes, if measured."""
        return self if self.backward is None else BothPasses(self, self.backward)

    @property
    def flops_per_second(self) -> float:
        """Highest rate of full rectangles, in operations of all heads."""
        full, _ = self._log_rates
        return float(np.exp(full.max())) * self.shape.flops_per_pair

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
        """Pairs per second, bilinear in logarithms; lengths off the grid have the edge's rate."""
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
        write_text(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Profile:
        """Reads a file that `save` wrote.

        Raises:
            ValueError: the file is missing, corrupt or of another format.
        """
        text = read_text(Path(path), "make a profile with `distca profile`")
        try:
            saved = json.loads(text)
            if not isinstance(saved, dict) or saved.pop("format", None) != FORMAT:
                raise ValueError(f'it lacks "format": {FORMAT}')
            return Profile(
                tuple(map(operator.index, saved["lengths"])),
                _table(saved["full_seconds"]),
                _table(saved["diagonal_seconds"]),
                AttentionShape(**saved["shape"]),
                dict(saved["provenance"]),
                *(
                    None if saved.get(name) is None else _table(saved[name])
                    for name in ("backward_full_seconds", "backward_diagonal_seconds")
                ),
            )
        except (
            *(KeyError, TypeError, AttributeError, ValueError),
            *(RecursionError, OverflowError),
        ) as error:
            raise ValueError(
                f"{path} is no usable profile ({error}): make one with `distca profile`"
            ) from error


def _table(rows: object) -> tuple[tuple[float, ...], ...]:
    """Returns a table of times as a file has it."""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError("its times are no lists of rows")
    return tuple(tuple(row) for row in rows)


@dataclass(frozen=True)
class BothPasses:
    """A `CostModel` of a task's forward and backward passes, which the same server runs.

    Short tasks' backward passes are not as many times as long as long tasks'. Seconds are scaled so
    that the longest task on the diagonal has those of its forward pass, as elsewhere.

    Attributes:
        forward: seconds of forward passes.
        backward: seconds of backward passes.
    """

    forward: Profile
    backward: Profile

    @property
    def description(self) -> str:
        return f"{self.forward.description}, both passes"

    @cached_property
    def ratio(self) -> float:
        """Backward over forward seconds of the longest task on the diagonal."""
        return self.backward.diagonal_seconds[-1][-1] / self.forward.diagonal_seconds[-1][-1]

    def seconds(self, q_len: Int64s, kv_len: Int64s, pairs: Int64s) -> Floats:
        """See `CostModel.seconds`."""
        columns = q_len, kv_len, pairs
        both = self.forward.seconds(*columns) + self.backward.seconds(*columns)
        result: Floats = both / (1 + self.ratio)
        return result


def _diagonal_pairs(q: Floats, kv: Floats) -> Floats:
    """Visible pairs of a task that ends on the diagonal; with fewer keys, of the square."""
    return q * np.maximum(kv, q) - q * (q - 1) / 2
