"""Bins of Megatron's dynamic context parallelism: micro-batches, each of groups of its own sizes.

`distca.schedule.baselines.dynamic_cp` says which ranks share which documents. A group packs its
documents and shares core attention in a ring. Its ranks enter a micro-batch together; other ranks
do not wait for them. Groups are taken to lie in nodes as well as neighbouring groups of their size
do, which favours this baseline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.plan.span import Floats, Int64s
from distca.schedule import DynamicContextParallel, ScheduleConfig
from distca.simulate.bins import BaselineLayout, Bins
from distca.simulate.costs import ModelCosts
from distca.simulate.one_f_one_b import Passes
from distca.simulate.sharing import Group, Shared, ring

DYNAMIC = "dynamic-cp"
_OF_RANKS = ("attention", "copied", "kept", "transient")
_OF_GROUPS = ("exposed", "held", "sent", "calls")


@dataclass(frozen=True)
class DynamicBins:
    """What each rank runs.

    Attributes:
        bins: a bin for each rank and micro-batch, `[ranks, micro-batches, 1]`.
        layout: the ranks as replicas of their own, and the number of micro-batches.
        passes: seconds of each stage's passes, of a rank and micro-batch.
        groups: first rank of each rank's group, int64 `[ranks, micro-batches]`.
    """

    bins: Bins
    layout: BaselineLayout
    passes: list[Passes]
    groups: Int64s

    @staticmethod
    def of(
        lengths: Int64s, layout: BaselineLayout, costs: ModelCosts, attention: CostModel
    ) -> DynamicBins | None:
        """Packs a global batch; None: Megatron makes no plan.

        Args:
            lengths: tokens of each document, int64.
            layout: stages, and ranks of a stage; `context_parallel` is the number of ranks that the
                longest document is to have.
            costs: costs of the model on the cluster.
            attention: forward seconds of tasks.
        """
        ranks = layout.data_parallel * layout.context_parallel
        scheduler = DynamicContextParallel(ScheduleConfig(shape=costs.shape))
        most = -(-int(lengths.max()) // layout.context_parallel)
        try:
            rounds = scheduler.rounds(lengths, ranks, most)
        except ValueError:
            return None
        groups = np.zeros((ranks, len(rounds)), dtype=np.int64)
        by_size: dict[int, list[tuple[int, int, Int64s]]] = {}
        for number, each in enumerate(rounds):
            first = 0
            while first < ranks:
                own, size = each[first], 1
                while first + size < ranks and each[first + size] == own:
                    size += 1
                groups[first : first + size, number] = first
                by_size.setdefault(size, []).append((first, number, lengths[own]))
                first += size
        own_layout = BaselineLayout(layout.stages, ranks, 1, len(rounds))
        found = _Scattered.empty(own_layout)
        for size, some in by_size.items():
            found.add(size, some, own_layout, costs, attention)
        passes = [each.with_experts(own_layout, costs) for each in found.passes]
        return DynamicBins(Bins(found.tokens, found.shared), own_layout, passes, groups)


@dataclass(frozen=True)
class _Scattered:
    """Figures of groups at their ranks and micro-batches, as in `DynamicBins`."""

    tokens: Int64s
    shared: Shared
    passes: list[Passes]

    @staticmethod
    def empty(layout: BaselineLayout) -> _Scattered:
        shape = layout.data_parallel, layout.micro_batches

        def zeros(*more: int) -> Floats:
            return np.zeros((*shape, *more))

        whole = zeros().astype(np.int64)
        shared = Shared(
            *(zeros(1), zeros(2), zeros(2), zeros(2).astype(np.int64)),
            *(zeros(1, 2), zeros(1), zeros(1, 2), whole),
        )
        ranks = np.zeros(layout.data_parallel)
        passes = [
            Passes(zeros(), zeros(), ranks.copy(), ranks.copy()) for _ in range(layout.stages)
        ]
        return _Scattered(zeros(1).astype(np.int64), shared, passes)

    def add(
        self,
        size: int,
        some: list[tuple[int, int, Int64s]],
        layout: BaselineLayout,
        costs: ModelCosts,
        attention: CostModel,
    ) -> None:
        """Adds groups of one size.

        Args:
            size: ranks of a group.
            some: of each group its first rank, its micro-batch and the lengths of its documents.
            layout: the ranks as replicas of their own.
            costs: costs of the model on the cluster.
            attention: forward seconds of tasks.
        """
        documents = [lengths for *_, lengths in some]
        own = np.array([int((-(-each // size)).sum()) for each in documents])
        tokens = np.repeat(own[:, None], size, axis=1)
        group = Group(size, 1, layout.stages * layout.data_parallel)
        shared = ring(documents, tokens, attention, group, costs)
        bins = Bins(tokens, shared).select(np.arange(len(some))[:, None])
        at = np.array([first for first, *_ in some])[:, None] + np.arange(size)
        number = np.array([number for _, number, _ in some])[:, None]
        self.tokens[at, number, 0] = tokens
        for name in _OF_RANKS:
            getattr(self.shared, name)[at, number, 0] = getattr(bins.shared, name)[:, 0]
        for name in _OF_GROUPS:
            getattr(self.shared, name)[at, number] = getattr(bins.shared, name)
        of_groups = BaselineLayout(layout.stages, 0, size, 1)
        for stage, mine in enumerate(self.passes):
            each = Passes.of(bins, of_groups, costs, stage)
            mine.forward[at, number] = each.forward
            mine.backward[at, number] = each.backward
            np.add.at(mine.computed, at.ravel(), each.computed)
            np.add.at(mine.waited, at.ravel(), each.waited)
