"""A rank's part of batches beside the model: its pool, its exchanges and the layers' attention."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from distca.attention.paged import OfPool, PagedKernel
from distca.attention.pinned import copy_to
from distca.cost.memory import CoreAttentionMemory
from distca.cost.steps import decode_memory, step_memory
from distca.cost.volume import AttentionShape
from distca.plan import Mask
from distca.plan.span import Bools, Int64s, expand_ranges
from distca.runtime import CoreAttention, EventCursor, Exchange
from distca.runtime.exchange import map_indices
from distca.runtime.serving.decode_exchange import build_decode_exchange
from distca.runtime.serving.importance import Importance
from distca.runtime.serving.kept_call import SparseAttention
from distca.runtime.serving.kept_exchange import build_kept_exchange
from distca.runtime.serving.kv_pool import BlockTables, KVCache
from distca.runtime.serving.step_exchange import SteppedExchange, build_stepped_exchange
from distca.runtime.serving.stepped_call import attend_in_steps, key_places
from distca.schedule.program import LayerGroup, Program, tick_program
from distca.schedule.serving.batches import Batch, DecodeBatch, PrefillBatch

# A call of core attention by itself: the model decides which layer is next.
_ONE_CALL: Program = tick_program("forward", (LayerGroup(range(1), False),), 1, False, False)


class LayerWatch(Protocol):
    """Callbacks for the layers of a batch as they run."""

    def begins(self, layer: int) -> None:
        """A layer's rows are about to be written: those of earlier tokens must be in the pool."""
        ...

    def written(self, layer: int) -> None:
        """Keys and values of a layer's new tokens on this rank are in the pool."""
        ...


class AttentionRunner:
    """One rank's attention: keys and values that it keeps, and its part of batches.

    Args:
        core: core attention of this rank.
        windows: for each layer how many earlier tokens a query sees; None: all.
        shape: heads of a layer on this rank.
        dtype: dtype of rows.
        device: device of the rows.
        blocks: blocks of this rank's pool of keys and values.
        block_size: rows of a block.
        tensor_rank: number of this rank among those that share each layer, whose heads follow each
            other in plans that drop rows.

    Attributes:
        pool: keys and values of this rank.
        tables: blocks of the sequences.
        kernel: kernel of this rank's device.
        watch: callbacks for the batches that begin from now on.
    """

    def __init__(
        self,
        core: CoreAttention,
        windows: Sequence[int | None],
        shape: AttentionShape,
        dtype: torch.dtype,
        device: torch.device,
        blocks: int,
        block_size: int,
        tensor_rank: int = 0,
    ) -> None:
        assert isinstance(core.kernel, PagedKernel), "a kernel that knows no pools"
        self.kernel = core.kernel
        self._heads = slice(tensor_rank * shape.kv_heads, (tensor_rank + 1) * shape.kv_heads)
        self._core, self._windows, self._shape, self._device = core, windows, shape, device
        self.tables, self._dtype = BlockTables(block_size, device), dtype
        self.watch: LayerWatch | None = None
        self.resize_pool(blocks)

    def resize_pool(self, blocks: int) -> None:
        """Makes a pool of another size; whatever the old one holds is lost."""
        size = len(self._windows), blocks, self.tables.block_size
        self.pool = KVCache(*size, self._shape, self._dtype, self._device)

    def add_blocks(self, sequence: int, blocks: Sequence[int]) -> None:
        """Adds blocks of this rank behind those that a sequence has here."""
        self.tables.append(sequence, blocks)

    def begin(self, batch: Batch) -> ForwardContext:
        """Finds this rank's part of a batch, whose layers can then run. Collective."""
        new = self.new_rows(batch)
        labels = self._core.trace.labels
        slots = copy_to(torch.from_numpy(new.slots), self._device)
        return ForwardContext(
            new, self._windows, self.pool, slots, self._parts(batch), labels, self.watch
        )

    def new_rows(self, batch: Batch) -> BatchRows:
        """Finds this rank's new tokens of a batch."""
        rank = self._core.transport.rank
        return BatchRows([NewRows.of(part, rank, self.tables) for part in batch.parts])

    @property
    def alone(self) -> bool:
        """Whether all keys that this rank's queries see are its own."""
        return self._core.transport.world_size == 1

    def drop(self, sequence: int) -> None:
        """Forgets where the keys and values of a sequence are."""
        self.tables.drop(sequence)

    def _slots(self, sequences: Sequence[int], counts: Int64s) -> Int64s:
        """Slots of the first rows here of each sequence, those of one after the other."""
        lines = np.repeat(self.tables.lines(sequences), counts)
        return self.tables.slots(lines, expand_ranges(np.zeros_like(counts), counts))

    def _parts(self, batch: Batch) -> list[_PartRun]:
        """Prepares this rank's work of each part of a batch: prefills, and decodes. Collective."""
        parts = [
            self._decode(part) if isinstance(part, DecodeBatch) else self._prefill(part)
            for part in batch.parts
        ]
        needed = CoreAttentionMemory()
        for part in parts:
            needed = needed.union(part.memory)
        # Indices of all parts lie beside each other.
        indices = sum(part.memory.indices for part in parts)
        self._core.reserve(replace(needed, indices=indices))
        calls = [call for part in parts for call in part.calls.values()]
        decoding = [call for call in calls if isinstance(call, _AtOnce)]
        placed = self._core.buffers.place([call.exchange for call in decoding])
        for call, exchange in zip(decoding, placed, strict=True):
            call.exchange = exchange
        return parts

    def _prefill(self, part: PrefillBatch) -> _PartRun:
        rank, needed = self._core.transport.rank, CoreAttentionMemory()
        # Keys and values of all the sequences' rows here, in the order of the plans.
        slots = self._slots(part.sequences, part.rows[:, rank])
        calls: dict[Mask, _Attention] = {}
        sparse, shared = dict[int, SparseAttention](), dict[int, SparseAttention]()
        importance = None
        if part.plans.sparse:
            full = part.plans.by_mask[Mask()]
            importance = Importance(full.plan, rank, slots, self._shape.kv_heads, self._device)
        for mask, stepped in part.plans.by_mask.items():
            needed = needed.union(step_memory(stepped, self._shape))
            places = key_places(slots, stepped.plan.head_groups, self._shape.kv_heads)
            exchange = build_stepped_exchange(stepped, rank, places)
            on_device = exchange.map_indices(self._on_device)
            told = importance if mask.window_left is None else None
            calls[mask] = _InSteps(self._core, on_device, told)
        for layer, stepped in part.plans.sparse.items():
            assert importance is not None
            if id(stepped) not in shared:
                mine = stepped.of_kv_heads(self._heads)
                needed = needed.union(step_memory(mine, self._shape))
                kept = map_indices(build_kept_exchange(mine, rank, slots), self._on_device)
                shared[id(stepped)] = SparseAttention(self._core, kept, importance)
            sparse[layer] = shared[id(stepped)]
        return _PartRun(calls, needed, sparse)

    def _on_device(self, index: torch.Tensor) -> torch.Tensor:
        return copy_to(index, self._device)

    def _decode(self, part: DecodeBatch) -> _PartRun:
        transport, kernel = self._core.transport, self.kernel
        lines, calls = self.tables.lines(part.sequences), dict[Mask, _Attention]()
        for mask in part.hidden:
            exchange, keys = build_decode_exchange(
                part, mask, transport.rank, self.tables, lines, self.pool.slots
            )
            calls[mask] = _AtOnce(replace(self._core, kernel=OfPool(kernel, keys)), exchange)
        needed = decode_memory(len(part.sequences), transport.world_size, self._shape)
        return _PartRun(calls, needed)


@dataclass(frozen=True)
class NewRows:
    """A rank's new tokens of a part of a batch, in the order of its rows.

    Attributes:
        part: part of the batch.
        document: index of each token's sequence among the part's.
        positions: position of each token.
        slots: where its keys and values lie in the pool.
    """

    part: PrefillBatch | DecodeBatch
    document: Int64s
    positions: Int64s
    slots: Int64s

    @staticmethod
    def of(part: PrefillBatch | DecodeBatch, rank: int, tables: BlockTables) -> NewRows:
        """Finds the tokens of a rank; `tables` have the batch's blocks."""
        mine = part.new.of_rank(rank)
        mine = mine.select(np.lexsort((mine.start, mine.document)))
        counts = mine.end - mine.start
        document = np.repeat(mine.document, counts)
        # Behind the rows that the rank has of the sequence, as far as they are all before.
        first = np.searchsorted(document, document)
        row = part.before[document, rank] + np.arange(len(document)) - first
        slots = tables.slots(tables.lines(part.sequences)[document], row)
        return NewRows(part, document, expand_ranges(mine.start, counts), slots)

    @property
    def last(self) -> Bools:
        """Whether each is the last token of its sequence."""
        return self.positions == self.part.rows.sum(axis=1)[self.document] - 1

    def ids(self, tokens: Mapping[int, Sequence[int]]) -> Int64s:
        """Token ids; `tokens` are the new ones of each sequence."""
        theirs = [tokens[sequence] for sequence in self.part.sequences]
        begins = np.cumsum([0, *map(len, theirs)])[:-1] - self.part.before.sum(axis=1)
        joined = np.fromiter(itertools.chain.from_iterable(theirs), dtype=np.int64)
        return joined[begins[self.document] + self.positions]


class _Attention(Protocol):
    """Core attention of a part of a batch, in the layers of one mask."""

    @property
    def queries(self) -> int:
        """Query rows of this rank."""
        ...

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sink: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the outputs of this rank's queries; `k` and `v` are the pool's rows by slot."""
        ...


@dataclass
class _AtOnce:
    """Rows that travel all at once, as queries do in decoding."""

    core: CoreAttention
    exchange: Exchange

    @property
    def queries(self) -> int:
        return self.exchange.q.local

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sink: torch.Tensor | None,
    ) -> torch.Tensor:
        run = EventCursor((self.exchange,), _ONE_CALL)
        return self.core(q, k, v, run, scale, sink_H=sink)


@dataclass(frozen=True)
class _InSteps:
    """Rows that travel step by step of a plan, as in prefills."""

    core: CoreAttention
    exchange: SteppedExchange
    importance: Importance | None

    @property
    def queries(self) -> int:
        return self.exchange.tokens

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sink: torch.Tensor | None,
    ) -> torch.Tensor:
        return attend_in_steps(
            self.core, q, k, v, self.exchange, scale, importance=self.importance, sink_H=sink
        )


@dataclass(frozen=True)
class _PartRun:
    """What the layers need of a part of a batch.

    Attributes:
        calls: core attention of the layers of each mask.
        memory: buffers that the calls need.
        sparse: core attention of each layer that drops rows.
    """

    calls: Mapping[Mask, _Attention]
    memory: CoreAttentionMemory
    sparse: Mapping[int, _Attention] = field(default_factory=dict)

    def call(self, layer: int, mask: Mask) -> _Attention:
        """Core attention of a layer."""
        return self.sparse.get(layer) or self.calls[mask]


@dataclass
class BatchRows:
    """A rank's new tokens of a batch, those of one part after the other.

    Attributes:
        rows: its new tokens of each part.
    """

    rows: Sequence[NewRows]

    @property
    def positions(self) -> Int64s:
        """Positions of all new tokens of this rank."""
        return np.concatenate([each.positions for each in self.rows])

    def ids(self, tokens: Mapping[int, Sequence[int]]) -> Int64s:
        """Token ids of all new tokens of this rank; `tokens` are the new ones of each sequence."""
        return np.concatenate([each.ids(tokens) for each in self.rows])

    def last(self) -> dict[int, int]:
        """The row of each sequence's last token, of those that are of this rank."""
        last_rows, begin = {}, 0
        for each in self.rows:
            at = np.flatnonzero(each.last)
            for number, row in zip(each.document[at].tolist(), at.tolist(), strict=True):
                last_rows[each.part.sequences[number]] = begin + row
            begin += len(each.document)
        return last_rows

    def rows_of(self, sequence: int) -> Int64s:
        """The rows of a sequence's new tokens that are of this rank."""
        rows, begin = [np.zeros(0, dtype=np.int64)], 0
        for each in self.rows:
            if sequence in each.part.sequences:
                number = each.part.sequences.index(sequence)
                rows.append(begin + np.flatnonzero(each.document == number))
            begin += len(each.document)
        return np.concatenate(rows)

    @property
    def slots(self) -> Int64s:
        """Slots of the pool that the new tokens' keys and values get."""
        return np.concatenate([each.slots for each in self.rows])


@dataclass
class ForwardContext:
    """What the layers of a batch need; a layer knows its number.

    Attributes:
        new: this rank's new tokens.
        windows: for each layer how many earlier tokens a query sees; None: all.
        pool: keys and values of this rank.
        slots: slots of the pool that the new tokens' keys and values get, int64 `[new tokens]`.
        parts: core attention of each part.
        labels: labels of the timeline's spans.
        watch: callbacks for the layers.
        layers_run: layers whose attention has run.
    """

    new: BatchRows
    windows: Sequence[int | None]
    pool: KVCache
    slots: torch.Tensor
    parts: Sequence[_PartRun]
    labels: dict[str, object]
    watch: LayerWatch | None = None
    layers_run: int = 0

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the core attention of a layer.

        Args:
            layer: number of the layer.
            q: queries of this rank's new tokens, `[rows, heads, head_dim]`.
            k: their keys, `[rows, kv_heads, head_dim]`, which are written to the pool.
            v: their values, `[rows, kv_heads, v_head_dim]`, likewise.
            scale: factor of the scores.
            sink: one more logit of each head, which has no value, `[heads]`, or None.

        Returns:
            Outputs, `[rows, heads, v_head_dim]`.
        """
        if self.watch is not None:
            self.watch.begins(layer)
        self.pool.write(layer, self.slots, k, v)
        if self.watch is not None:
            self.watch.written(layer)
        calls = [part.call(layer, Mask(self.windows[layer])) for part in self.parts]
        queries = torch.split(q, [call.queries for call in calls])
        self.labels["layer"] = layer
        out = [
            call(query, *self.pool.rows(layer), scale, sink)
            for query, call in zip(queries, calls, strict=True)
        ]
        del self.labels["layer"]
        self.layers_run += 1
        return out[0] if len(out) == 1 else torch.cat(out)
