"""Micro-batches with `--distca`: the documents of a global batch, and a rank's tokens of each plan.

The planner (`distca.schedule.GlobalBatchPlanner`) shares the documents out over micro-batches, and
says which tokens a rank owns. A micro-batch runs as two nano-batches with a plan each, or whole.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from distca.cost.kernel_time import CostModel
from distca.plan import Mask, Plan
from distca.plan.span import Floats, Int64s, expand_ranges
from distca.schedule import (
    Documents,
    DocumentTrees,
    GlobalBatchPlanner,
    MemoryBound,
    PlannedMicroBatch,
    chain_sizes,
    plain_loads,
)
from distca.schedule.base import document_loads
from distca.schedule.program import NANO_BATCHES
from distca.schedule.training.planned_batch import PADDING
from distca.schedule.training.tree_halves import borrowed_rows
from megatron_patches.batches.layouts import WindowLayout
from megatron_patches.batches.micro_batch import (
    MicroBatch,
    document_params,
    million_pairs,
    read_positions,
)
from megatron_patches.batches.stream import TokenStream
from megatron_patches.model.chained_keys import ChainedKeys, ChainPart
from megatron_patches.model.core_attention import DocumentParams, NanoBatch
from megatron_patches.model.next_tokens import NextTokens


@dataclass(frozen=True)
class PredictedTokens:
    """What layers of multi-token prediction predict in a global batch.

    Attributes:
        edges: stream positions that no document crosses, int64 `[windows + 1]`.
        all_targets: as for `NextTokens`.
    """

    edges: Int64s
    all_targets: tuple[float, ...]


@dataclass(frozen=True)
class PlannedReader:
    """Reads global batches for the planner, and this rank's tokens of planned micro-batches.

    Attributes:
        stream: token stream of the split.
        layout: windows and ranks.
        planner: planner of global batches.
        sequence_shards: number of tensor-parallel ranks that divide the tokens among them (sequence
            parallelism), or 1.
        head_parallel: data-parallel ranks of an attention server, which share heads: each has an
            equal part of the rows that a plan gives to the server.
        cuts_at_windows: whether documents end where the window of a micro-batch ends; otherwise
            they end with the global batch, and only server pools share them out.
        bound: bound of a training step's memory, with server pools, or None.
        prediction_layers: layers of multi-token prediction that this rank's stage has.
    """

    stream: TokenStream
    layout: WindowLayout
    planner: GlobalBatchPlanner
    sequence_shards: int
    head_parallel: int = 1
    cuts_at_windows: bool = True
    bound: MemoryBound | None = None
    prediction_layers: int = 0

    @property
    def _server(self) -> int:
        """Number of this rank's server among those of its stage."""
        return self.layout.data_parallel_rank // self.head_parallel

    def documents(self, first_sample: int, micro_batches: int) -> list[Documents]:
        """Reads the documents of micro-batches, or chains of them, in the order of the stream.

        Args:
            first_sample: sample at which the first one starts.
            micro_batches: number of micro-batches.
        """
        samples = self.layout.samples_per_micro_batch
        if not self.cuts_at_windows:
            start = first_sample * self.layout.seq_length
            tokens = micro_batches * samples * self.layout.seq_length
            lengths = self.stream.document_lengths(start, start + tokens)
            every = Documents(lengths, start + np.cumsum(lengths) - lengths)
            return every.in_parts(micro_batches)
        found = []
        for count in chain_sizes(micro_batches, self.planner.options.chain):
            found.append(self._read_windows(first_sample, count))
            first_sample += count * samples
        return found

    def predicted(self, first_sample: int, micro_batches: int) -> PredictedTokens | None:
        """Counts what layers of multi-token prediction predict; None: this rank has none.

        Args:
            first_sample: sample at which the global batch starts.
            micro_batches: its number of micro-batches.
        """
        if not self.prediction_layers:
            return None
        samples, length = self.layout.samples_per_micro_batch, self.layout.seq_length
        start = first_sample * length
        stop = start + micro_batches * samples * length
        edges = [start]
        for count in chain_sizes(micro_batches, self.planner.options.chain):
            if self.cuts_at_windows:
                edges += [end for _, end in self.layout.windows(first_sample, count)]
            first_sample += count * samples
        edges = [*edges, stop] if edges[-1] < stop else edges
        lengths = [self.stream.document_lengths(*each) for each in itertools.pairwise(edges)]
        mask = np.concatenate([self.stream.loss_mask(*each) for each in itertools.pairwise(edges)])
        ends = np.cumsum(np.concatenate(lengths))
        first = ends - np.concatenate(lengths)
        all_targets = [float(mask.sum(dtype=np.float64))]
        for shift in range(self.prediction_layers):
            # The labels of a document's first tokens are too near.
            near = first + shift
            lost = mask[near[near < ends]].sum(dtype=np.float64)
            all_targets.append(all_targets[-1] - float(lost))
        return PredictedTokens(np.array(edges, dtype=np.int64), tuple(all_targets))

    def million_pairs(self, documents: Sequence[Documents], micro_batches: int) -> float:
        """Returns the visible pairs of a layer, in the mean micro-batch of a rank, in millions."""
        masks = self.planner.masks
        pairs = sum(million_pairs(each.lengths, masks, each.trees) for each in documents)
        return pairs / (micro_batches * self.layout.data_parallel_size)

    def plain_loads(
        self,
        first_sample: int,
        micro_batches: int,
        layers: Mapping[Mask, int] | None = None,
        cost_model: CostModel | None = None,
    ) -> Floats:
        """Returns the loads of plain data-parallel ranks, `[micro_batches, ranks]`.

        Args:
            first_sample: sample at which the first micro-batch starts.
            micro_batches: number of micro-batches.
            layers: number of layers with each mask, over which loads add up; None: those of the
                pattern.
            cost_model: cost model of the loads; None: they are counts of pairs.
        """
        layout, masks = self.layout, self.planner.masks.of_all_stages
        if layers is None:
            layers = dict(zip(masks.masks, masks.counts(), strict=True))
        loads = np.zeros((micro_batches, layout.data_parallel_size))
        for n in range(micro_batches):
            for start, stop in layout.windows(first_sample + n * layout.samples_per_micro_batch):
                for mask, count in layers.items():
                    loads[n] += count * self._plain_loads(start, stop, mask, cost_model)
        return loads

    def _plain_loads(
        self, start: int, stop: int, mask: Mask, cost_model: CostModel | None
    ) -> Floats:
        """Returns the loads of the ranks that share a window, `[ranks]`.

        Trees are whole on the rank on which they begin.
        """
        ranks, tokens = self.layout.data_parallel_size, self.layout.seq_length
        lengths = self.stream.document_lengths(start, stop)
        if not self.stream.shares_tokens:
            capacities = np.full(ranks, tokens, dtype=np.int64)
            return plain_loads(lengths, capacities, mask, cost_model)
        trees = self.stream.trees(start, stop)
        loads = document_loads(trees.lengths, mask, cost_model, trees.prefix)
        rank = (np.cumsum(lengths) - lengths)[trees.document] // tokens
        return np.bincount(rank, weights=loads, minlength=ranks).astype(np.float64)

    def _read_windows(self, sample: int, chain: int) -> Documents:
        places = self.layout.windows(sample, chain)
        windows = [self.stream.document_lengths(*place) for place in places]
        trees = None
        if self.stream.shares_tokens:
            trees = DocumentTrees.joined([self.stream.trees(*place) for place in places])
        lengths = np.concatenate(windows)
        starts = sample * self.layout.seq_length + np.cumsum(lengths) - lengths
        return Documents(lengths, starts, tuple(len(each) for each in windows), chain, trees)

    def micro_batch(
        self,
        planned: PlannedMicroBatch,
        chain_parts: Sequence[ChainPart | None],
        predicted: PredictedTokens | None = None,
    ) -> MicroBatch:
        """Makes this rank's part of a micro-batch, without the state of its core attention.

        Args:
            planned: planned micro-batch.
            chain_parts: parts of each nano-batch, as `chain_parts` makes them.
            predicted: what layers of multi-token prediction predict in the global batch, or None.
        """
        in_stream, in_document, lengths = [], [], []
        of_pool, rank = planned.of_pool(self._server)
        for documents, nano in zip(of_pool.documents, of_pool.plans, strict=True):
            plan = nano.plan
            mine = plan.placement.select(plan.own_pieces).of_rank(rank)
            starts, sizes, pieces = self._own_part(mine.start, mine.end - mine.start)
            lengths.append(sizes)
            document_of = np.repeat(mine.document[pieces], sizes)
            place = expand_ranges(starts, sizes)
            in_stream.append(documents.stream_positions(document_of, place))
            in_document.append(nano.first_positions[document_of] + place)
        order = nano_order([len(rows) for rows in in_stream], self.sequence_shards)
        own, places = np.concatenate(in_stream), np.concatenate(in_document)
        tokens, labels, loss_mask = read_positions(self.stream, own)
        params = document_params(np.concatenate(lengths), as_one_sequence=True)
        if len(of_pool.plans) == 2:
            params = replace(params, nano_batches=self._nano_batches(of_pool, lengths, chain_parts))
        else:
            params = replace(params, chain_part=chain_parts[0])
        if predicted is not None:
            params = replace(
                params, next_tokens=self._next_tokens(own[order], places[order], predicted)
            )
        return MicroBatch(
            tokens[:, order],
            labels[:, order],
            loss_mask[:, order],
            torch.from_numpy(places)[None, order],
            packed_seq_params=params,
            targets=self.stream.targets(own) if self.stream.shares_tokens else None,
        )

    def _next_tokens(self, own: Int64s, places: Int64s, predicted: PredictedTokens) -> NextTokens:
        """Reads the columns of layers of multi-token prediction.

        A document goes on where the window of its micro-batch does, also on other ranks.

        Args:
            own: stream positions of this rank's tokens, or `PADDING`.
            places: positions of the tokens in their documents.
            predicted: what is predicted in the global batch.
        """
        edges, is_token = predicted.edges, own != PADDING
        inside = np.where(is_token, own, edges[0])
        window_ends = edges[np.searchsorted(edges, inside, side="right")]
        ends = np.minimum(self.stream.piece_ends(inside), window_ends)
        columns = []
        for depth in range(1, 1 + self.prediction_layers):
            there = is_token & (own + depth < ends)
            later = torch.from_numpy(np.where(there, places + depth, 0))[None]
            found = read_positions(self.stream, np.where(there, own + depth, PADDING))
            columns.append((found[0], later, *found[1:]))
        tokens, position_ids, labels, loss_mask = zip(*columns, strict=True)
        return NextTokens(tokens, position_ids, labels, loss_mask, predicted.all_targets)

    def _own_part(self, starts: Int64s, sizes: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Cuts this rank's part out of the pieces of documents that its server owns.

        Args:
            starts: first token of each piece in its document.
            sizes: tokens of each piece.

        Returns:
            First tokens and sizes of the part's pieces, and the numbers of the pieces that they are
            cut from.
        """
        rows = int(sizes.sum()) // self.head_parallel
        assert rows * self.head_parallel == sizes.sum(), "ranks that share heads have equal parts"
        first = self.layout.data_parallel_rank % self.head_parallel * rows
        begin = np.cumsum(sizes) - sizes
        low = np.clip(first - begin, 0, sizes)
        high = np.clip(first + rows - begin, 0, sizes)
        pieces = np.flatnonzero(high > low)
        return (starts + low)[pieces], (high - low)[pieces], pieces

    def chain_parts(
        self, number: int, micro_batches: Sequence[PlannedMicroBatch], keys: ChainedKeys
    ) -> list[ChainPart | None]:
        """Describes what each nano-batch of a micro-batch borrows and lends in its chain.

        Args:
            number: number of the micro-batch.
            micro_batches: all micro-batches of the global batch.
            keys: keys of the chain.
        """
        planned, _ = micro_batches[number].of_pool(self._server)
        borrowed = Counter(
            place
            for member in planned.chain
            for nano in micro_batches[member].plans
            for place in nano.borrows
        )
        parts: list[ChainPart | None] = []
        for nano_number, nano in enumerate(planned.plans):
            place = number - planned.chain[0], nano_number
            part = None
            if nano.borrows or nano.lends is not None:
                rows = None
                if nano.lends is not None:
                    rows = self._rows_of(nano.plan, nano.lends)
                part = ChainPart(keys, place, nano.borrows, borrowed[place], rows)
            parts.append(part)
        return parts

    def _rows_of(self, plan: Plan, document: int) -> torch.Tensor:
        """Returns this rank's server's rows of a document of a plan, int64."""
        # A server pool's plan numbers its own servers, which are neighbours.
        rank = self._server % plan.world_size
        spans = plan.placement
        mine = (spans.document == document) & (spans.rank == rank)
        return torch.from_numpy(
            expand_ranges(spans.first_rows()[mine], (spans.end - spans.start)[mine])
        )

    def _nano_batches(
        self,
        planned: PlannedMicroBatch,
        lengths: list[Int64s],
        chain_parts: Sequence[ChainPart | None],
    ) -> tuple[DocumentParams, DocumentParams]:
        """Describes ping and pong to Megatron's layers.

        Args:
            planned: planned micro-batch.
            lengths: lengths of this rank's pieces of ping, and of pong.
            chain_parts: what each of them borrows and lends in its chain.
        """
        borrowed, from_ping = None, planned.plans[1].from_ping
        if from_ping is not None:
            ping_plan = planned.plans[0].plan
            rank = self._server % ping_plan.world_size
            borrowed = torch.from_numpy(borrowed_rows(ping_plan, from_ping, rank))
        elif planned.plans[1].borrows_from_ping:
            # The crossing document is the last one of ping.
            borrowed = self._rows_of(planned.plans[0].plan, len(planned.documents[0].lengths) - 1)
        ping, pong = (
            replace(document_params(pieces, as_one_sequence=True), chain_part=part)
            for pieces, part in zip(lengths, chain_parts, strict=True)
        )
        return (
            replace(ping, nano_batch=NanoBatch(0, NANO_BATCHES[0], borrowed is not None)),
            replace(pong, nano_batch=NanoBatch(1, NANO_BATCHES[1], False, borrowed)),
        )


def nano_order(sizes: list[int], shards: int) -> Int64s:
    """Returns the order in which the model is given the rows of nano-batches.

    Sequence parallelism gives each tensor-parallel rank a contiguous shard of the rows: its shard
    of ping, then its shard of pong, so that each nano-batch gathers from all.

    Args:
        sizes: numbers of rows of the nano-batches, which lie one after the other.
        shards: number of shards, which divides all sizes.

    Returns:
        Row numbers in that order, int64 `[rows]`.
    """
    starts = np.cumsum(sizes) - sizes
    return np.concatenate(
        [
            np.arange(start + shard * size // shards, start + (shard + 1) * size // shards)
            for shard in range(shards)
            for start, size in zip(starts, sizes, strict=True)
        ]
    )
