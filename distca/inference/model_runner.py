"""A model on one of the ranks that answer together: its tokens' layers, and shared attention.

Keys and values of the rank lie in a pool of blocks that the engine gives out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch

from distca.attention import PagedKernel
from distca.attention.pinned import copy_to
from distca.attention.softcap import SoftCapped
from distca.inference.attention_runner import AttentionRunner, ForwardContext
from distca.inference.config import EngineConfig
from distca.inference.cuda_graphs import Capture, DecodeGraphs
from distca.inference.finite import Outputs, first_of_all_ranks
from distca.inference.models import ServedModel
from distca.inference.runnable import LayerAttention
from distca.inference.sampling import NO_LOGITS, NextLogits
from distca.inference.step_graphs import StepGraphs, steps_are_whole
from distca.inference.tensor_parallel import ALONE, TensorRanks
from distca.plan.span import Int64s
from distca.runtime import CoreAttention
from distca.runtime.serving.kv_moves import KvMoves
from distca.schedule.serving.batches import Batch, DecodeBatch
from distca.schedule.serving.blocks import block_bytes
from distca.schedule.serving.csps.layouts import SplitModel
from distca.schedule.serving.iteration import BatchPlan
from distca.schedule.serving.moves import BlockTransfer
from distca.transport import Transport

OnLogits = Callable[[Int64s, torch.Tensor], None]
"""Function of positions, int64 `[rows]`, and their logits, float32 `[rows, vocabulary]`."""


class ModelRunner:
    """A model on one of the ranks that answer together.

    Args:
        model: model to load.
        core: core attention of this rank.
        device: device of the weights.
        blocks: blocks of this rank's pool of keys and values.
        block_size: rows of a block.
        tensor_ranks: ranks that share each layer with this one.
        capture: what captures graphs of decode steps; None: they run without.
        computes: whether this rank has weights; else it holds keys and values of others' tokens.
        mover: transport of blocks that change their ranks, or None.
        split: layers whose weights processes split, if they share the rows of prefills.

    Attributes:
        device: device of the weights.
        block_bytes: bytes of a block, all layers of this process.
        attention: pool and exchanges beside the model.
    """

    def __init__(
        self,
        model: ServedModel,
        core: CoreAttention,
        device: torch.device,
        blocks: int,
        block_size: int,
        tensor_ranks: TensorRanks = ALONE,
        capture: Capture | None = None,
        computes: bool = True,
        mover: Transport | None = None,
        split: SplitModel | None = None,
    ) -> None:
        self._served, self.device = model, device
        self._transport, self._mover = core.transport, mover
        self._split = split
        self.block_bytes = block_bytes(model.shape, len(model.windows), block_size)
        self._last: tuple[Batch, Mapping[int, Sequence[int]]] | None = None
        self._forgotten_bytes = 0
        self._model = model.runnable(device, tensor_ranks, computes)
        assert len(self._model.scales) == len(model.windows), "layers of another kind"
        self._returns_logits, self._sharing = tensor_ranks.rank == 0, tensor_ranks.sharing
        if model.softcap is not None:
            assert isinstance(core.kernel, PagedKernel), "a kernel that knows no pools"
            core = replace(core, kernel=SoftCapped(core.kernel, model.softcap))
        self.attention = AttentionRunner(
            core,
            model.windows,
            model.shape,
            model.dtype,
            device,
            blocks,
            block_size,
            tensor_ranks.rank,
        )
        self._graphs: DecodeGraphs | StepGraphs | None = None
        if capture is None or self._model.asks_host:
            return
        if steps_are_whole(self.attention, model.shape.head_dim):
            self._graphs = StepGraphs(self._model, model.windows, self.attention, capture)
        else:
            self._graphs = DecodeGraphs(self._model, model.windows, device, capture)

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights."""
        there = (each for each in self._model.module.parameters() if not each.is_meta)
        return sum(each.nbytes for each in there)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to others."""
        transports = (self._transport, self._mover)
        of_all = (sum(each.bytes_sent.values()) for each in transports if each is not None)
        shared = 0 if self._sharing is None else self._sharing.bytes_sent
        return sum(of_all) + shared - self._forgotten_bytes

    @property
    def rank(self) -> int:
        """Number of this rank among those that share sequences."""
        return self._transport.rank

    def resize_pool(self, blocks: int) -> None:
        """Makes a pool of another size; whatever the old one holds is lost."""
        if isinstance(self._graphs, StepGraphs):
            self._graphs.forget()
        self.attention.resize_pool(blocks)

    def forget(self) -> None:
        """Forgets the last batch, and the bytes that were sent so far."""
        self._last = None
        self._forgotten_bytes += self.bytes_sent

    def room(self, config: EngineConfig, needed: int = 0) -> int:
        """Returns the blocks that this rank has room for.

        Args:
            config: configuration of the engine.
            needed: bytes that a GPU keeps free beside them for what steps need for a while.
        """
        nbytes = config.cache.nbytes
        if nbytes is None:
            free, total = torch.cuda.mem_get_info(self.attention.pool.keys.device)
            kept = int((1 - config.cache.gpu_utilization) * total) + needed
            nbytes = max(free - kept, 0)
        return nbytes // self.block_bytes

    def add_blocks(self, sequence: int, blocks: Sequence[int]) -> None:
        """Adds blocks of this rank behind those that a sequence has here."""
        self.attention.add_blocks(sequence, blocks)

    def set_blocks(self, sequence: int, blocks: Sequence[int]) -> None:
        """Replaces the blocks of this rank that a sequence has."""
        self.drop(sequence)
        self.add_blocks(sequence, blocks)

    def drop(self, sequence: int) -> None:
        """Forgets the blocks of a sequence."""
        self.attention.drop(sequence)

    def move(self, moves: Sequence[BlockTransfer]) -> None:
        """Moves blocks of all layers between ranks."""
        if not moves:
            return
        assert self._mover is not None, "blocks move, and nothing carries them"
        under_way = KvMoves(self.attention.pool, self._mover, moves)
        for layer in range(len(self._served.windows)):
            under_way.begins(layer)

    def run_batch(
        self,
        plan: BatchPlan,
        tokens: Mapping[int, Sequence[int]],
        scoring: Mapping[int, OnLogits] = MappingProxyType({}),
    ) -> NextLogits:
        """Runs an iteration on the blocks that sequences have been given. Ranks that are no members
        may be left out.

        Args:
            plan: the plans.
            tokens: tokens that are fed, by sequence.
            scoring: as for `run`.

        Returns:
            As `run` does.
        """
        shared = None
        if plan.prefill is not None and self._split is not None:
            shared = self._split.share(int(plan.new_tokens.sum()))
        batch = Batch(plan.parts, shared)
        self._last = batch, tokens
        return self.run(batch, tokens, scoring)

    @torch.no_grad()
    def run(
        self,
        batch: Batch,
        tokens: Mapping[int, Sequence[int]],
        scoring: Mapping[int, OnLogits] = MappingProxyType({}),
    ) -> NextLogits:
        """Runs a batch. Collective.

        Args:
            batch: what all ranks run.
            tokens: new tokens of each sequence.
            scoring: functions that are given the logits of all of a sequence's new tokens that are
                of this rank, not of the last alone.

        Returns:
            Logits of the token that follows each sequence whose last token is of this rank,
            float32 `[vocabulary]`, by sequence; of ranks that share layers the first has them.
        """
        decodes = not scoring and all(isinstance(part, DecodeBatch) for part in batch.parts)
        if isinstance(self._graphs, StepGraphs) and decodes and self.attention.watch is None:
            new = self.attention.new_rows(batch)
            logits = self._graphs.run(new, tokens)
            if logits is not None:
                return NextLogits(new.last(), logits)
        run = self.attention.begin(batch)
        if not len(run.slots):
            # Models do not run without tokens.
            for layer in range(len(self._served.windows)):
                self._serve(run, layer)
            return NO_LOGITS
        new = run.new
        last, scored = new.last(), {each: new.rows_of(each) for each in scoring}
        kept = np.concatenate([np.array([*last.values()], dtype=np.int64), *scored.values()])
        # In one copy.
        values = [torch.as_tensor(each) for each in (new.ids(tokens), new.positions, kept)]
        placed = copy_to(torch.cat(values), self.device)
        ids, positions, rows = torch.split(placed, [*map(len, values)])
        logits = None
        if isinstance(self._graphs, DecodeGraphs) and decodes:
            # Each row is the last of its sequence.
            logits = self._graphs.run(ids, positions, run)
        if logits is None:
            logits = self._logits(batch, ids, positions, rows, run)
        assert run.layers_run == len(self._served.windows), "a layer did not ask for its attention"
        if not self._returns_logits:
            return NO_LOGITS
        counts = [len(last), *map(len, scored.values())]
        first, *others = torch.split(logits.float(), counts)
        for each, row_logits in zip(scored, others, strict=True):
            scoring[each](new.positions[scored[each]], row_logits)
        return NextLogits(last, first)

    def _logits(
        self,
        batch: Batch,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        run: ForwardContext,
    ) -> torch.Tensor:
        """Logits of the rows that are given, `[rows, vocabulary]`."""
        attends: LayerAttention = run
        with contextlib.ExitStack() as stack:
            if batch.shared is not None:
                assert self._sharing is not None, "ranks that share no rows"
                own = stack.enter_context(self._sharing.share(batch.shared, rows))
                rows = torch.arange(own.stop - own.start, device=rows.device)
                if batch.shared.layout == "sp-ntp":
                    attends, positions = self._sharing.scattered(run), positions[own]
            return self._model.logits(ids, positions, rows, attends)

    def bytes_by_sequence(self) -> dict[int, int]:
        """Returns the bytes that the last iteration moved for each sequence, by its plans."""
        assert self._last is not None, "no iteration has run"
        batch, _ = self._last
        model = self._served
        size = model.tensor_parallel_size
        moved = batch.bytes_by_sequence(model.windows, model.shape, size)
        return dict(zip(batch.sequences, moved, strict=True))

    def where_not_finite(self, ran: bool) -> str:
        """Says where the model stops being finite in the last iteration. Collective.

        It runs again, without graphs, and the outputs of the modules are checked. All weights are
        finite: loading refuses others.

        Args:
            ran: whether this rank had a part in it.

        Returns:
            End of a sentence; empty if nothing is found.
        """
        dtype = str(self._served.dtype).removeprefix("torch.")
        outputs, graphs, self._graphs = Outputs(), self._graphs, None
        if ran:
            assert self._last is not None, "no iteration has run"
            batch, tokens = self._last
            with outputs.watched(self._model.module):
                self.run(batch, tokens)
        self._graphs = graphs
        first = first_of_all_ranks(outputs.first)
        return "" if first is None else f": the output of {first[1]} is not finite in {dtype}"

    def _serve(self, run: ForwardContext, layer: int) -> None:
        """Takes part in a layer's attention as a server alone."""
        shape, dtype = self._served.shape, self._served.dtype
        q, kv = (
            torch.empty((0, heads, shape.head_dim), dtype=dtype, device=self.device)
            for heads in (shape.heads, shape.kv_heads)
        )
        run.attend(layer, q, kv, kv, self._model.scales[layer])
