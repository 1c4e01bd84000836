"""A rank's pool of keys and values in blocks, and the tables of each sequence's blocks.

A sequence's rows on a rank are its keys and values there in the order of positions, whichever
positions those are. Row `i` lies in the pool at

    slot = table[i // block_size] * block_size + i % block_size

so rows are written once, where they stay, and a table grows by an entry when a block is full. Which
blocks a sequence gets is not decided here: see `distca.schedule.serving.blocks`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from distca.attention.fused import load_fused_kernels
from distca.attention.pinned import copy_into, copy_to
from distca.cost.volume import AttentionShape
from distca.plan.span import Int64s

Int32s = NDArray[np.int32]


class KVCache:
    """Keys and values of all layers.

    Args:
        layers: layers of the model.
        blocks: blocks of the pool.
        block_size: rows of a block.
        shape: heads of a layer on this rank.
        dtype: dtype of keys and values.
        device: device of the memory.

    Attributes:
        keys: `[layers, blocks, block_size, kv_heads, head_dim]`.
        values: likewise.
    """

    def __init__(
        self,
        layers: int,
        blocks: int,
        block_size: int,
        shape: AttentionShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._kernels = load_fused_kernels(device.type)
        size = layers, blocks, block_size, shape.kv_heads, shape.head_dim
        self.keys = torch.empty(size, dtype=dtype, device=device)
        self.values = torch.empty(size, dtype=dtype, device=device)
        # Views are made once, not in each step.
        self._rows = [
            (k.flatten(0, 1), v.flatten(0, 1)) for k, v in zip(self.keys, self.values, strict=True)
        ]

    @property
    def slots(self) -> int:
        """Rows of a layer's keys, used or not."""
        return self.keys.shape[1] * self.keys.shape[2]

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a layer's keys and values by slot, `[slots, kv_heads, head_dim]`: views."""
        return self._rows[layer]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes rows `[n, kv_heads, head_dim]` to int64 slots `[n]`."""
        if self._kernels is not None:
            self._kernels.write_rows(k, v, slots, *self._rows[layer])
            return
        for memory, rows in zip(self._rows[layer], (k, v), strict=True):
            memory.index_copy_(0, slots, rows)


class BlockTables:
    """Blocks of the sequences that have rows in a rank's pool, a line of a table each.

    A sequence keeps its line until it is dropped.

    Args:
        block_size: rows of a block.
        device: device of `table`.

    Attributes:
        table: blocks of each line, int32 `[lines, columns]`, the first of a line in use; the rest
            is any. It grows, and is then another tensor.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size, self._device = block_size, device
        self._host: Int32s = np.zeros((4, 4), dtype=np.int32)
        self._used: Int64s = np.zeros(4, dtype=np.int64)
        self._line: dict[int, int] = {}
        # A heap: sequences that begin together get lines in their order, which kernels then use
        # as it is.
        self._free_lines = list(range(4))
        self.table = self._on_device()

    def _on_device(self) -> torch.Tensor:
        host = torch.from_numpy(self._host)
        return host if self._device.type == "cpu" else copy_to(host, self._device)

    @property
    def host(self) -> Int32s:
        """The table on the CPU."""
        return self._host

    def lines(self, sequences: Sequence[int]) -> Int64s:
        """Returns the line of each sequence, `[sequences]`; one without a line is given one."""
        for sequence in sequences:
            if sequence not in self._line:
                if not self._free_lines:
                    self._grow(2 * len(self._used), self._host.shape[1])
                self._line[sequence] = heapq.heappop(self._free_lines)
        lines_of_all = map(self._line.__getitem__, sequences)
        return np.fromiter(lines_of_all, dtype=np.int64, count=len(sequences))

    def append(self, sequence: int, blocks: Sequence[int]) -> None:
        """Adds blocks behind those that a sequence has."""
        (line,) = self.lines([sequence])
        begin = int(self._used[line])
        end = begin + len(blocks)
        if end > self._host.shape[1]:
            self._grow(len(self._used), max(end, 2 * self._host.shape[1]))
        self._host[line, begin:end] = blocks
        self._used[line] = end
        if self._device.type != "cpu":
            told = torch.from_numpy(self._host[line, begin:end])
            copy_into(self.table[line, begin:end], told)

    def drop(self, sequence: int) -> None:
        """Frees the line of a sequence, if it has one."""
        line = self._line.pop(sequence, None)
        if line is not None:
            self._used[line] = 0
            heapq.heappush(self._free_lines, line)

    def slots(self, lines: Int64s, rows: Int64s) -> Int64s:
        """Returns the slot of row `rows[i]` of line `lines[i]`, int64 `[n]`."""
        column, offset = np.divmod(rows, self.block_size)
        assert (column < self._used[lines]).all(), "a row has no block"
        return self._host[lines, column].astype(np.int64) * self.block_size + offset

    def _grow(self, lines: int, columns: int) -> None:
        """Makes a larger table; lines keep their numbers."""
        before = self._host
        self._host = np.zeros((lines, columns), dtype=np.int32)
        self._host[: before.shape[0], : before.shape[1]] = before
        # Behind all others, so that it stays a heap.
        self._free_lines += range(before.shape[0], lines)
        self._used = np.concatenate([self._used, np.zeros(lines - len(self._used), dtype=np.int64)])
        self.table = self._on_device()
