"""A planned global batch: documents, plans of its micro-batches and ticks, and their figures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from distca.cost.memory import CoreAttentionMemory, plan_memory
from distca.cost.volume import (
    BACKWARD_PHASES,
    FORWARD_PHASES,
    SHARED_HEADS,
    AttentionShape,
    BackwardInputs,
    plan_bytes,
)
from distca.plan import LayerMasks, Plan
from distca.plan.span import Floats, Int64s
from distca.schedule.program import Pass
from distca.schedule.training.nano_batches import NanoPlan
from distca.schedule.training.tick_schedule import Tick, TickSchedule
from distca.schedule.training.trees import DocumentTrees

PADDING = -2
"""Start of a document that is padding, which is nowhere in the stream and has no loss. No token of
the stream follows this position."""


@dataclass(frozen=True)
class Documents:
    """The documents of a micro-batch, in the order in which its plan numbers them.

    Also those of a nano-batch, or of a chain of micro-batches.

    Attributes:
        lengths: tokens of each document, int64 `[documents]`.
        starts: first token of each document in the stream of tokens, or `PADDING`, int64
            `[documents]`.
        window_sizes: number of documents of each window, if they are in the order of the stream.
        micro_batches: number of micro-batches that share the documents.
        trees: nodes of the documents; None: all have one node.
    """

    lengths: Int64s
    starts: Int64s
    window_sizes: tuple[int, ...] = ()
    micro_batches: int = 1
    trees: DocumentTrees | None = None

    def select(self, documents: Int64s) -> Documents:
        """Returns some of the documents, by their numbers, which need not be in their windows."""
        trees = None if self.trees is None else self.trees.select(documents)
        return replace(
            self,
            lengths=self.lengths[documents],
            starts=self.starts[documents],
            window_sizes=(),
            trees=trees,
        )

    def in_parts(self, number: int) -> list[Documents]:
        """Divides the documents, in turn, into parts of about as many documents each."""
        return [self.select(each) for each in np.array_split(np.arange(len(self.lengths)), number)]

    def paths(self) -> Documents:
        """Returns the documents of a plan of the trees, with the tokens of their paths.

        The first own token of each has the place of its prefix's length, so that `stream_positions`
        finds own tokens alone.
        """
        trees = self.trees
        assert trees is not None
        paths = trees.paths
        offset = (self.starts[trees.document] + trees.offsets)[paths.first_node]
        return Documents(paths.lengths, offset - paths.prefix)

    def stream_positions(self, document: Int64s, place: Int64s) -> Int64s:
        """Returns where tokens of documents are in the stream, `PADDING` for those of padding.

        Args:
            document: number of each token's document, int64 `[tokens]`.
            place: place of each token in its document, int64 `[tokens]`.
        """
        first = self.starts[document]
        return np.where(first == PADDING, PADDING, first + place)


def documents_in_turn(windows: Sequence[Int64s], chain: int = 1) -> list[Documents]:
    """Makes micro-batches of one window each, whose documents follow each other in a stream.

    Args:
        windows: document lengths of each micro-batch, or of each chain of them, int64.
        chain: micro-batches that each window makes.
    """
    firsts = itertools.accumulate((int(lengths.sum()) for lengths in windows), initial=0)
    return [
        Documents(lengths, first + np.cumsum(lengths) - lengths, (len(lengths),), chain)
        for lengths, first in zip(windows, firsts, strict=False)
    ]


@dataclass(frozen=True)
class PlannedMicroBatch:
    """Documents and plans of a micro-batch's nano-batches: of one, or of ping and pong.

    Attributes:
        documents: documents of each nano-batch; a split document is there from the cut on.
        plans: plan of each nano-batch over the data-parallel ranks of a stage, with the mask that
            sees most.
        chain: numbers of the micro-batches with which it may share documents, its own among them.
        others: plans of the nano-batches with each of the other masks.
        pools: micro-batch of each server pool, over its own ranks; empty: all ranks share it.
    """

    documents: tuple[Documents, ...]
    plans: tuple[NanoPlan, ...]
    chain: range
    others: tuple[tuple[NanoPlan, ...], ...] = ()
    pools: tuple[PlannedMicroBatch, ...] = ()

    def of_pool(self, rank: int) -> tuple[PlannedMicroBatch, int]:
        """Returns the micro-batch of a data-parallel rank's pool, and the rank's number in it."""
        if not self.pools:
            return self, rank
        size = self.plans[0].plan.world_size // len(self.pools)
        return self.pools[rank // size], rank % size


class PlannedTick(NamedTuple):
    """A tick and its plans.

    Attributes:
        tick: work of all stages.
        plans: plan of each nano-batch with each mask, over all servers: mask by mask, each ping
            then pong.
        number: number of these plans among the different ones of the global batch: ticks that run
            the same micro-batches share theirs.
    """

    tick: Tick
    plans: tuple[Plan, ...]
    number: int

    def bytes_sent(
        self,
        calls: Sequence[Mapping[Pass, int]],
        shape: AttentionShape,
        backward: BackwardInputs = "resend",
        head_parallel: int = 1,
    ) -> dict[str, Int64s]:
        """Counts the bytes that each server sends in the tick, `[servers]`, by phase.

        Args:
            calls: calls of core attention in the tick with each mask, by pass; recomputed ones are
                forward.
            shape: attention heads of one rank.
            backward: how the backward pass gets its inputs.
            head_parallel: ranks of a server, which share heads: bytes are those of each.
        """
        passes: tuple[tuple[Pass, tuple[str, ...]], ...]
        passes = (("forward", FORWARD_PHASES), ("backward", BACKWARD_PHASES))
        sent: dict[str, Int64s] = {}
        nano_batches = len(self.plans) // len(calls)
        for number, plan in enumerate(self.plans):
            each = plan_bytes(plan, shape, backward).messages
            for what, names in passes:
                times = calls[number // nano_batches][what]
                for name in names if times else ():
                    sent[name] = sent.get(name, 0) + times * each[name].sent()
                if times and head_parallel > 1:
                    rows = plan.own_tokens_per_rank() // head_parallel * (head_parallel - 1)
                    phase = SHARED_HEADS[what]
                    sent[phase] = sent.get(phase, 0) + times * rows * shape.token_bytes
        return sent


def servers_of_pools(servers: Int64s, pools: int, world_size: int) -> Int64s:
    """Returns the servers of each pool, in the order in which the pool numbers them.

    Those of its ranks come first, stage by stage, then its share of the dedicated servers.

    Args:
        servers: number of each data-parallel rank of each stage among the servers, int64
            `[stages, data-parallel ranks]`.
        pools: number of pools.
        world_size: number of all servers; those that no stage owns are numbered last.

    Returns:
        int64 `[pools, servers of a pool]`.
    """
    by_pool = servers.reshape(len(servers), pools, -1).transpose(1, 0, 2).reshape(pools, -1)
    dedicated = np.arange(servers.size, world_size, dtype=np.int64).reshape(pools, -1)
    return np.concatenate([by_pool, dedicated], axis=1)


@dataclass(frozen=True)
class PlannedGlobalBatch:
    """Micro-batches and ticks of a global batch, with the plans of both.

    Attributes:
        schedule: tick schedule, which says when a stage works on which micro-batch.
        servers: number of each data-parallel rank of each stage among the servers, int64
            `[stages, data-parallel ranks]`.
        micro_batches: micro-batches, each planned on its own over the ranks of a stage.
        ticks: ticks in order, with their plans over all servers.
        masks: masks of a model chunk's layers.
        pool_size: ranks of a server pool, between which no task travels but in wide micro-batches;
            None: there are no pools.
    """

    schedule: TickSchedule
    servers: Int64s
    micro_batches: tuple[PlannedMicroBatch, ...]
    ticks: tuple[PlannedTick, ...]
    masks: LayerMasks = field(default_factory=LayerMasks)
    pool_size: int | None = None

    @property
    def pools(self) -> Int64s | slice:
        """Servers of each pool, `[pools, servers of a pool]`; a slice of all where they are one."""
        if self.pool_size is None:
            return slice(None)
        plans = itertools.chain.from_iterable(tick.plans for tick in self.ticks)
        world_size = next((plan.world_size for plan in plans), int(self.servers.size))
        return servers_of_pools(self.servers, self.servers.shape[1] // self.pool_size, world_size)

    def largest_memory(
        self, shape: AttentionShape, backward: BackwardInputs = "resend"
    ) -> CoreAttentionMemory:
        """Returns the memory in which each of the plans can run, as `plan_memory` counts it.

        The row indices are there for all masks at once.
        """
        largest = CoreAttentionMemory()
        different = {planned.number: planned.plans for planned in self.ticks}
        for plan in itertools.chain.from_iterable(different.values()):
            largest = largest.union(plan_memory(plan, shape, backward))
        return replace(largest, indices=len(self.masks.masks) * largest.indices)


@dataclass(frozen=True)
class CountedGlobalBatch:
    """A planned global batch, with figures of its plans that are the same on every rank.

    Attributes:
        batch: plans of the micro-batches and ticks.
        bytes_sent: bytes that each server sends in each tick, int64 `[servers]` by phase.
        memory: memory in which each of the plans can run.
        forward_loads: loads of the servers in each nano-batch of the forward ticks, `[servers]`,
            over the layers of the masks' pattern.
        speeds: relative speed of each server, `[servers]`.
        asked: number of micro-batches that were asked for; there are more if memory bounds them.
        peak: peak bytes of the GPU that needs most; None: nothing bounds them.
    """

    batch: PlannedGlobalBatch
    bytes_sent: tuple[dict[str, Int64s], ...]
    memory: CoreAttentionMemory
    forward_loads: tuple[Int64s | Floats, ...]
    speeds: Floats
    asked: int
    peak: float | None = None
