"""CUDA graphs of whole decode steps, core attention among the rest, where a rank has all keys.

What differs between steps is a tensor of numbers, which one copy replaces before a replay: tokens,
positions, slots of the pool, lines of the block tables and how many rows of them are used. Kernels
find keys by a table whose lines the graph gathers. This has not been run on a GPU yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distca.attention.paged import KeyTable, TableKernel
from distca.attention.pinned import copy_into, copy_to
from distca.attention.sink import with_sink
from distca.inference.attention_runner import AttentionRunner, BatchRows
from distca.inference.cuda_graphs import SIZES, Capture, size_for
from distca.inference.runnable import RunnableModel
from distca.plan.span import Int64s
from distca.runtime.serving.kv_pool import KVCache

logger = logging.getLogger(__name__)


def steps_are_whole(attention: AttentionRunner, head_dim: int) -> bool:
    """Tells whether a rank's decode steps can be one graph each."""
    kernel = attention.kernel
    return attention.alone and isinstance(kernel, TableKernel) and kernel.reads_table(head_dim)


@dataclass(frozen=True)
class _TableAttention:
    """Core attention of one token of each sequence. See `LayerAttention`.

    Attributes:
        windows: for each layer how many earlier tokens a query sees; None: all.
        pool: keys and values.
        kernel: kernel that reads them where they lie.
        slots: slot of each token's key and value, int64 `[rows]`.
        table: the blocks of each token's sequence.
    """

    windows: Sequence[int | None]
    pool: KVCache
    kernel: TableKernel
    slots: torch.Tensor
    table: KeyTable

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `distca.inference.attention_runner.ForwardContext.attend`."""
        self.pool.write(layer, self.slots, k, v)
        rows = self.pool.rows(layer)
        out, lse = self.kernel.forward_table(q, *rows, self.table, scale, self.windows[layer])
        return out if sink is None else with_sink(out, lse, sink)[0]


class _Step:
    """The graph of one number of rows. It is captured in a step, which has run then.

    Args:
        model: model whose layers are captured.
        windows: see `_TableAttention`.
        attention: pool and tables of the rank.
        capture: what captures.
        numbers: see `StepGraphs._numbers`.
        memory_like: returns memory for the logits of that many rows that all graphs share, like
            some logits.
    """

    def __init__(
        self,
        model: RunnableModel,
        windows: Sequence[int | None],
        attention: AttentionRunner,
        capture: Capture,
        numbers: Int64s,
        memory_like: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        pool, kernel, tables = attention.pool, attention.kernel, attention.tables
        assert isinstance(kernel, TableKernel)
        device, size = pool.keys.device, numbers.shape[1]
        self._numbers = copy_to(torch.from_numpy(numbers), device)
        ids, positions, slots, lines, used = self._numbers
        every = torch.arange(size, device=device)
        offsets = torch.arange(size + 1, dtype=torch.int32, device=device)

        def run() -> torch.Tensor:
            blocks = tables.table.index_select(0, lines)
            table = KeyTable(blocks, used.int(), offsets, tables.block_size)
            attends = _TableAttention(windows, pool, kernel, slots, table)
            return model.logits(ids, positions, every, attends)

        with capture.prepared():
            # Libraries make room for themselves when they are first called. This writes keys and
            # values, so that it must be of a step that is to run.
            self._logits = memory_like(run())
            capture.begin()
            self._logits.copy_(run())
            self._replay = capture.end()

    def run(self, numbers: Int64s) -> torch.Tensor:
        """Logits of all rows, `[size, vocabulary]`, in memory that the next step writes to."""
        copy_into(self._numbers, torch.from_numpy(numbers))
        self._replay()
        return self._logits


class StepGraphs:
    """Graphs of a model on a rank, captured when a number of rows first comes.

    Args:
        model: model whose layers are captured.
        windows: see `_TableAttention`.
        attention: pool and tables of the rank, for which `steps_are_whole`.
        capture: what captures.
    """

    def __init__(
        self,
        model: RunnableModel,
        windows: Sequence[int | None],
        attention: AttentionRunner,
        capture: Capture,
    ) -> None:
        self._model, self._windows, self._attention = model, windows, attention
        self._capture = capture
        self._steps: dict[int, _Step] = {}
        self._reads: tuple[KVCache, torch.Tensor] | None = None
        self._logits: torch.Tensor | None = None

    def run(self, new: BatchRows, tokens: Mapping[int, Sequence[int]]) -> torch.Tensor | None:
        """Runs a batch that decodes alone.

        Args:
            new: the tokens, one of each sequence and at least one.
            tokens: see `BatchRows.ids`.

        Returns:
            Logits of each row, float32 `[rows, vocabulary]`; None, and nothing has run: there are
            too many.
        """
        rows = len(new.positions)
        size = size_for(rows)
        if size is None:
            return None
        numbers = self._numbers(new, tokens, size)
        self._forget_what_is_gone()
        if size not in self._steps:
            logger.info("a CUDA graph of decode steps of up to %d rows is captured", size)
            made = self._model, self._windows, self._attention, self._capture, numbers
            self._steps[size] = _Step(*made, self._memory_like)
        logits = self._steps[size].run(numbers)
        return logits[:rows].to(torch.float32, copy=True)

    def _memory_like(self, logits: torch.Tensor) -> torch.Tensor:
        if self._logits is None:
            self._logits = logits.new_empty((SIZES[-1], logits.shape[1]))
        return self._logits[: len(logits)]

    def forget(self) -> None:
        """Drops all graphs, and with them the pool that they read."""
        self._steps.clear()
        self._reads = None

    def _forget_what_is_gone(self) -> None:
        """Drops graphs of a pool or a table that another has replaced."""
        reads = self._attention.pool, self._attention.tables.table
        if self._reads is None or any(a is not b for a, b in zip(reads, self._reads, strict=True)):
            self.forget()
            self._reads = reads

    def _numbers(self, new: BatchRows, tokens: Mapping[int, Sequence[int]], size: int) -> Int64s:
        """Tokens, positions, slots, lines and rows of keys, int64 `[5, size]`.

        A step is filled up with the row that has the fewest keys, once more: all of these compute
        the same, and write the same to one slot.
        """
        tables, lines, used = self._attention.tables, [], []
        for each in new.rows:
            lines.append(tables.lines(each.part.sequences)[each.document])
            used.append(each.part.rows[each.document].sum(axis=1))
        columns = new.ids(tokens), new.positions, new.slots, np.concatenate(lines)
        numbers = np.stack([*columns, np.concatenate(used)])
        fewest = int(numbers[-1].argmin())
        more = np.repeat(numbers[:, fewest : fewest + 1], size - numbers.shape[1], axis=1)
        return np.concatenate([numbers, more], axis=1)
