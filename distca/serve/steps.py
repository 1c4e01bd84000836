"""Steps of a model's inference, and a rank's part of them: its tokens' layers, shared attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from distca.attention.paged import OfPool, PagedKernel
from distca.cost.decode_memory import decode_memory
from distca.cost.memory import CoreAttentionMemory
from distca.cost.step_memory import step_memory
from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Mask, Placement, Plan
from distca.plan.span import Bools, Int64s, expand_ranges
from distca.runtime import CoreAttention, Exchange, ProgramRun
from distca.runtime.decode_exchange import build_decode_exchange
from distca.runtime.kv_pool import BlockTables, KvPool
from distca.runtime.step_exchange import SteppedExchange, build_stepped_exchange
from distca.runtime.stepped_call import attend_in_steps
from distca.schedule.program import LayerGroup, Program, tick_program
from distca.schedule.serving import Strategy, shard_evenly, step_plan
from distca.schedule.serving.accounts import Accounts, Growth, NewBlocks
from distca.schedule.serving.blocks import BlockPool
from distca.schedule.serving.decode import Decode, plan_decode
from distca.schedule.serving.holdings import Holdings
from distca.serve.models import IMPLEMENTATION, ServedModel, need_transformers
from distca.serve.tensor_parallel import ALONE, TensorRanks

# A call of core attention by itself: the model decides which layer is next.
_ONE_CALL: Program = tick_program("forward", (LayerGroup(range(1), False),), 1, False, False)


@dataclass(frozen=True)
class Prefill:
    """Prompts, turns or chunks of either, with the plans of their attention.

    Attributes:
        sequences: sequences that are fed, by number.
        plans: plan of the layers of each mask, over these sequences in their order.
        new: owners of the new tokens.
        before: rows of each sequence on each rank before, int64 `[sequences, ranks]`.
    """

    sequences: tuple[int, ...]
    plans: Mapping[Mask, Plan]
    new: Placement
    before: Int64s

    @cached_property
    def rows(self) -> Int64s:
        """Rows of each sequence on each rank afterwards, int64 `[sequences, ranks]`."""
        after = self.before.copy()
        np.add.at(after, (self.new.document, self.new.rank), self.new.end - self.new.start)
        return after

    def bytes_by_sequence(self, mask: Mask, shape: AttentionShape) -> Int64s:
        """Bytes that a layer moves for each sequence."""
        plan = self.plans[mask]
        documents = (plan.tasks[plan.tasks.document == n] for n in range(len(self.sequences)))
        found = [plan_bytes(replace(plan, tasks=tasks), shape) for tasks in documents]
        return np.array([each.forward().total for each in found], dtype=np.int64)


@dataclass(frozen=True)
class Step:
    """What all ranks know of a step before it runs.

    Attributes:
        parts: prefills and decoded tokens; in each layer their attention runs in this order.
        blocks: blocks that it adds to sequences.
    """

    parts: tuple[Prefill | Decode, ...]
    blocks: NewBlocks = field(default_factory=dict)

    @property
    def sequences(self) -> tuple[int, ...]:
        """Sequences that the step feeds, those of one part after the other."""
        return tuple(sequence for part in self.parts for sequence in part.sequences)

    def bytes_by_sequence(self, model: ServedModel) -> list[int]:
        """Bytes that the step moves for each sequence, in all layers, by its plans."""
        found: list[int] = []
        for part in self.parts:
            layers = Counter(model.windows).items()
            of_windows = [
                count * part.bytes_by_sequence(Mask(window), model.shape)
                for window, count in layers
            ]
            found += (model.tensor_parallel_size * np.sum(of_windows, axis=0)).tolist()
        return found


class StepPlanner:
    """Plans steps, and knows who holds which keys and values in which blocks: alike on all ranks.

    Args:
        pool: blocks of all ranks.
        masks: masks of the model's layers.
        stripe: consecutive positions of a sequence that one rank owns in decoding.
    """

    def __init__(self, pool: BlockPool, masks: Sequence[Mask], stripe: int) -> None:
        self._masks, self._world_size = tuple(masks), pool.world_size
        self.holdings, self.accounts = Holdings(pool.world_size, stripe), Accounts(pool)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence whose keys and values are held."""
        return self.holdings.length(sequence)

    def rows_per_rank(self, sequence: int) -> list[int]:
        """Rows of a sequence that each rank holds."""
        if sequence not in self.holdings:
            return [0] * self._world_size
        lines = self.holdings.lines([sequence])
        return [int(n) for n in self.holdings.rows(lines, self.holdings.lengths(lines))[0]]

    def plan(self, counts: Mapping[int, int], strategy: Strategy, decodes: bool) -> Step:
        """Plans the step that feeds so many new tokens of each sequence, and takes its blocks.

        Args:
            counts: new tokens by sequence, at least 1 each.
            strategy: what travels.
            decodes: whether one token of each is decoded; others are shared out evenly.

        Raises:
            NoFreeBlocks: a rank's pool is too small; nothing has changed.
        """
        sequences = tuple(counts)
        if decodes:
            assert all(count == 1 for count in counts.values()), "one token is decoded at a time"
            decode = plan_decode(self.holdings, sequences, self._masks)
            blocks = self._take(decode)
            self.holdings.note_decoded(self.holdings.lines(sequences))
            return Step((decode,), blocks)
        lines = self.holdings.lines(sequences)
        starts = self.holdings.lengths(lines)
        before = self.holdings.rows(lines, starts)
        ends = starts + np.fromiter(counts.values(), dtype=np.int64, count=len(counts))
        new, held = shard_evenly(starts, ends, self._world_size), self.holdings.placement(sequences)
        plans = {mask: step_plan(held, new, strategy, mask, in_steps=True) for mask in self._masks}
        prefill = Prefill(sequences, plans, new, before)
        blocks = self._take(prefill)
        self.holdings.note(sequences, new)
        return Step((prefill,), blocks)

    def blocks_needed(self, counts: Mapping[int, int], most_new: int) -> Int64s:
        """Blocks that each rank needs for prompts or turns and their whole answers, `[ranks]`.

        Args:
            counts: tokens of each sequence that are fed, beside those that are held.
            most_new: most tokens of an answer; the last is never fed.
        """
        holdings, sequences = self.holdings, tuple(counts)
        starts = np.array([holdings.length(each) for each in sequences], dtype=np.int64)
        ends = starts + np.fromiter(counts.values(), dtype=np.int64, count=len(counts))
        before = np.array([self.rows_per_rank(each) for each in sequences], dtype=np.int64)
        new, numbers = shard_evenly(starts, ends, self._world_size), np.array(sequences)
        after = before + holdings.in_stripes(numbers, ends, ends + most_new - 1)
        np.add.at(after, (new.document, new.rank), new.end - new.start)
        growth = Growth(sequences, before, after)
        blocks: Int64s = growth.blocks(self.accounts.pool.block_size).sum(axis=0)
        return blocks

    def _take(self, part: Prefill | Decode) -> NewBlocks:
        return self.accounts.take(Growth(part.sequences, part.before, part.rows))

    def drop(self, sequence: int) -> None:
        """Forgets a sequence, and gives its blocks back."""
        self.holdings.drop(sequence)
        self.accounts.drop(sequence)


class ModelRank:
    """A model on one of the ranks that answer together.

    Args:
        model: model to load.
        core: core attention of this rank.
        device: device of the weights.
        blocks: blocks of this rank's pool of keys and values.
        block_size: rows of a block.
        tensor_ranks: ranks that share each layer with this one.
    """

    def __init__(
        self,
        model: ServedModel,
        core: CoreAttention,
        device: torch.device,
        blocks: int,
        block_size: int,
        tensor_ranks: TensorRanks = ALONE,
    ) -> None:
        # Without a function for masks of this name transformers makes none: the plan has it.
        need_transformers().AttentionInterface.register(IMPLEMENTATION, _attend)
        self._served, self._core, self._device = model, core, device
        self._model = model.load(device, ranks=tensor_ranks)
        self._speaks = tensor_ranks.rank == 0
        layers, shape = len(model.windows), model.shape
        self._pool = KvPool(layers, blocks, block_size, shape, model.dtype, device)
        self._tables = BlockTables(block_size, device)
        self._scales = {
            int(module.layer_idx): float(module.scaling)
            for module in self._model.modules()
            if hasattr(module, "layer_idx") and hasattr(module, "scaling")
        }
        assert sorted(self._scales) == list(range(layers)), "layers of another kind"

    @torch.no_grad()
    def run(self, step: Step, tokens: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Runs a step. Collective.

        Args:
            step: step that all ranks run.
            tokens: new tokens of each sequence.

        Returns:
            Logits of the token that follows each sequence whose last token is of this rank,
            float32 `[vocabulary]`, by sequence; of ranks that share layers the first has them.
        """
        rank = self._core.transport.rank
        for (sequence, owner), blocks in step.blocks.items():
            if owner == rank:
                self._tables.append(sequence, blocks)
        rows = [_NewRows.of(part, rank, self._tables) for part in step.parts]
        slots = np.concatenate([each.slots for each in rows])
        run = _StepRun(self._served.windows, self._pool, self._index(slots), self._parts(step))
        if not len(slots):
            # A model of transformers does not run without tokens.
            for layer in range(len(self._served.windows)):
                self._serve(run, layer)
            return {}
        last = np.flatnonzero(np.concatenate([each.last for each in rows]))
        out = self._model(
            input_ids=self._index(np.concatenate([each.ids(tokens) for each in rows]))[None],
            position_ids=self._index(np.concatenate([each.positions for each in rows]))[None],
            use_cache=False,
            logits_to_keep=self._index(last),
            distca_run=run,
        )
        assert run.layers_run == len(self._served.windows), "a layer did not ask for its attention"
        if not self._speaks:
            return {}
        owned = [each.part.sequences[number] for each in rows for number in each.document]
        found = (owned[row] for row in last)
        return dict(zip(found, out.logits[0].float(), strict=True))

    def _parts(self, step: Step) -> list[_PartRun]:
        """This rank's part of each part of a step, with room in the buffers. Collective."""
        parts = [
            self._decode(part) if isinstance(part, Decode) else self._prefill(part)
            for part in step.parts
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

    def _prefill(self, part: Prefill) -> _PartRun:
        rank, needed = self._core.transport.rank, CoreAttentionMemory()
        # Keys and values of all the sequences' rows here, in the order of the plans.
        counts = part.rows[:, rank]
        lines = np.repeat(self._tables.lines(part.sequences), counts)
        slots = self._tables.slots(lines, expand_ranges(np.zeros_like(counts), counts))
        calls: dict[Mask, _Attention] = {}
        for mask, plan in part.plans.items():
            needed = needed.union(step_memory(plan, self._served.shape))
            exchange = build_stepped_exchange(plan, rank, slots)
            on_device = exchange.map_indices(lambda index: index.to(self._device))
            calls[mask] = _InSteps(self._core, on_device)
        return _PartRun(calls, needed)

    def _decode(self, part: Decode) -> _PartRun:
        transport, kernel = self._core.transport, self._core.kernel
        assert isinstance(kernel, PagedKernel), "a kernel that knows no pools"
        lines, calls = self._tables.lines(part.sequences), dict[Mask, _Attention]()
        for mask in part.hidden:
            exchange, keys = build_decode_exchange(
                part, mask, transport.rank, self._tables, lines, self._pool.slots
            )
            calls[mask] = _AtOnce(replace(self._core, kernel=OfPool(kernel, keys)), exchange)
        needed = decode_memory(len(part.sequences), transport.world_size, self._served.shape)
        return _PartRun(calls, needed)

    def _serve(self, run: _StepRun, layer: int) -> None:
        """Takes part in a layer's attention as a server alone."""
        shape, dtype = self._served.shape, self._served.dtype
        q, kv = (
            torch.empty((0, heads, shape.head_dim), dtype=dtype, device=self._device)
            for heads in (shape.heads, shape.kv_heads)
        )
        run.attend(layer, q, kv, kv, self._scales[layer])

    def _index(self, values: Int64s) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def drop(self, sequence: int) -> None:
        """Forgets where the keys and values of a sequence are."""
        self._tables.drop(sequence)


@dataclass(frozen=True)
class _NewRows:
    """A rank's new tokens of a part of a step, in the order of its rows.

    Attributes:
        part: part of the step.
        document: index of each token's sequence among the part's.
        positions: position of each token.
        slots: where its keys and values lie in the pool.
    """

    part: Prefill | Decode
    document: Int64s
    positions: Int64s
    slots: Int64s

    @staticmethod
    def of(part: Prefill | Decode, rank: int, tables: BlockTables) -> _NewRows:
        """Finds the tokens of a rank; `tables` have the step's blocks."""
        mine = part.new.of_rank(rank)
        mine = mine.select(np.lexsort((mine.start, mine.document)))
        counts = mine.end - mine.start
        document = np.repeat(mine.document, counts)
        # Behind the rows that the rank has of the sequence, as far as they are all before.
        first = np.searchsorted(document, document)
        row = part.before[document, rank] + np.arange(len(document)) - first
        slots = tables.slots(tables.lines(part.sequences)[document], row)
        return _NewRows(part, document, expand_ranges(mine.start, counts), slots)

    @property
    def last(self) -> Bools:
        """Whether each is the last token of its sequence."""
        return self.positions == self.part.rows.sum(axis=1)[self.document] - 1

    def ids(self, tokens: Mapping[int, Sequence[int]]) -> Int64s:
        """Token ids; `tokens` are the new ones of each sequence."""
        theirs = [np.array(tokens[sequence], dtype=np.int64) for sequence in self.part.sequences]
        begins = np.cumsum([0, *map(len, theirs)])[:-1] - self.part.before.sum(axis=1)
        return np.concatenate(theirs)[begins[self.document] + self.positions]


class _Attention(Protocol):
    """Core attention of a part of a step, in the layers of one mask."""

    @property
    def queries(self) -> int:
        """Query rows of this rank."""
        ...

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
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
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return self.core(q, k, v, ProgramRun((self.exchange,), _ONE_CALL), scale)


@dataclass(frozen=True)
class _InSteps:
    """Rows that travel step by step of a plan, as in prefills."""

    core: CoreAttention
    exchange: SteppedExchange

    @property
    def queries(self) -> int:
        return self.exchange.queries

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return attend_in_steps(self.core, q, k, v, self.exchange, scale)


@dataclass(frozen=True)
class _PartRun:
    """What the layers need of a part of a step.

    Attributes:
        calls: core attention of the layers of each mask.
        memory: buffers that the calls need.
    """

    calls: Mapping[Mask, _Attention]
    memory: CoreAttentionMemory


@dataclass
class _StepRun:
    """What the layers of a step need; a layer knows its number.

    Attributes:
        layers_run: layers whose attention has run.
    """

    windows: Sequence[int | None]
    pool: KvPool
    slots: torch.Tensor
    parts: Sequence[_PartRun]
    layers_run: int = 0

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Core attention of a layer: `q` and its result are `[rows, heads, head_dim]`."""
        self.pool.write(layer, self.slots, k, v)
        calls = [part.calls[Mask(self.windows[layer])] for part in self.parts]
        queries = torch.split(q, [call.queries for call in calls])
        out = [
            call(query, *self.pool.rows(layer), scale)
            for query, call in zip(queries, calls, strict=True)
        ]
        self.layers_run += 1
        return out[0] if len(out) == 1 else torch.cat(out)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    dropout: float = 0.0,
    *,
    distca_run: _StepRun,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: `[1, heads, rows, dim]` -> `[1, rows, heads, dim]`."""
    layer = int(module.layer_idx)
    window = distca_run.windows[layer]
    assert sliding_window is None or window == sliding_window - 1, "a layer has another window"
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    return distca_run.attend(layer, q.contiguous(), k, v, scaling)[None], None
