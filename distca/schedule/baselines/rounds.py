"""Baselines that train in rounds: in each, groups of ranks have documents of their own.

Megatron's hybrid and dynamic context parallelism (`hybrid_cp.py`, `dynamic_cp.py`) say which ranks
train on which documents in which round. This module makes plans of that. A plan has all rounds: a
rank's rows are its documents in the order in which it runs them. A document is cut into two chunks
for each rank of its group, head and tail, and its keys and values travel among them, in a ring or
gathered: the rows are the same. Megatron needs padded documents for that, which the plan does
without.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import numpy as np

from distca.plan import Mask, Placement, Plan
from distca.plan.span import Floats, Int64s
from distca.schedule.base import ScheduleConfig, plan_at_home, task_loads
from distca.schedule.baselines.context_parallel import shard_documents

Round: TypeAlias = list[list[int]]
"""The documents of each rank in a round, in the order in which it runs them."""


@dataclass(frozen=True)
class RoundsPlan:
    """A plan with its rounds.

    Attributes:
        plan: all rounds as one plan.
        round_of_document: round in which each document is trained on, int64 `[documents]`.
        groups: first rank of each rank's group, int64 `[rounds, ranks]`.
        waits_for_all: whether all ranks wait for each other after a round; if not, a rank waits for
            those of its group before the next one.
    """

    plan: Plan
    round_of_document: Int64s
    groups: Int64s
    waits_for_all: bool

    @property
    def rounds(self) -> int:
        return int(self.round_of_document.max(initial=-1)) + 1

    def by_round(self, of_task: Floats | Int64s) -> Floats:
        """Sums a quantity of each task over the tasks of a round and rank, `[rounds, ranks]`."""
        ranks, tasks = self.plan.world_size, self.plan.tasks
        slot = self.round_of_document[tasks.document] * ranks + tasks.server
        sums = np.bincount(slot, weights=of_task, minlength=self.rounds * ranks)
        return sums.astype(np.float64).reshape(self.rounds, ranks)

    def end(self, seconds: Floats) -> float:
        """Returns when the last rank has run all rounds.

        Args:
            seconds: what each rank's rounds take, `[rounds, ranks]`.
        """
        return end_of_rounds(seconds, None if self.waits_for_all else self.groups)


def end_of_rounds(seconds: Floats, groups: Int64s | None) -> float:
    """Returns when the last rank has run all rounds.

    Args:
        seconds: what each rank's rounds take, `[rounds, ranks]`.
        groups: first rank of each rank's group, whose ranks wait for each other before a round,
            int64 `[rounds, ranks]`; None: all ranks do.
    """
    if groups is None:
        return float(seconds.max(axis=1).sum())
    clocks = np.zeros(seconds.shape[1])
    for of_round, each in zip(groups, seconds, strict=True):
        starts = np.zeros_like(clocks)
        np.maximum.at(starts, of_round, clocks)
        clocks = starts[of_round] + each
    return float(clocks.max())


class RoundScheduler(ABC):
    """A scheduler of rounds.

    The most tokens of a document on a rank (`--max-seqlen-per-dp-cp-rank`) are the tokens that a
    rank owns, or, as Megatron advises, the longest document's divided by `context_parallel_size`,
    if that is configured.
    """

    name: ClassVar[str]
    waits_for_all: ClassVar[bool] = True

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config

    @abstractmethod
    def rounds(self, lengths: Int64s, ranks: int, most_tokens: int) -> list[Round]:
        """Says which ranks train on which documents, each in one round.

        Args:
            lengths: tokens of each document, int64 `[documents]`.
            ranks: data- and context-parallel ranks, all in one pool.
            most_tokens: most tokens on a rank (`--max-seqlen-per-dp-cp-rank`).

        Raises:
            ValueError: Megatron cannot divide the ranks, or makes no plan.
        """

    def plan(self, lengths: Int64s, capacities: Int64s, mask: Mask) -> Plan:
        """Makes a plan as `Scheduler.plan` says, with all rounds.

        Raises:
            ValueError: as of `rounds`.
        """
        found = self.plan_rounds(lengths, capacities, mask)
        if found.rounds == 1:
            return found.plan
        loads = found.by_round(task_loads(found.plan.tasks, mask, self._config.cost_model))
        waiting = found.end(loads) / float(loads.sum(axis=0).mean())
        note = (
            f"{found.rounds} rounds, and all ranks wait after each: together the rounds' busiest "
            f"ranks have {waiting:.3f} times the mean load"
            if self.waits_for_all
            else f"{found.rounds} micro-batches; in each, the ranks of a group wait for each "
            f"other: the last rank ends after {waiting:.3f} times the mean load"
        )
        return replace(found.plan, notes=(note,))

    def plan_rounds(self, lengths: Int64s, capacities: Int64s, mask: Mask) -> RoundsPlan:
        """Makes the plan, and says in which round each document is.

        Args:
            lengths: tokens of each document, int64 `[documents]`.
            capacities: tokens that each rank would own, int64 `[ranks]`.
            mask: attention mask of all documents.

        Raises:
            ValueError: as of `rounds`.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        size = self._config.context_parallel_size
        most = int(capacities.min()) if size is None else -(-int(lengths.max(initial=1)) // size)
        rounds = self.rounds(lengths, len(capacities), max(most, 1))
        round_of_document = np.full(len(lengths), -1, dtype=np.int64)
        groups = np.tile(np.arange(len(capacities)), (len(rounds), 1))
        pieces = []
        for number, each in enumerate(rounds):
            for ranks, documents in _groups(each):
                groups[number, ranks] = ranks[0]
                # A document must not be in two rounds.
                assert (round_of_document[documents] == -1).all(), documents
                round_of_document[documents] = number
                pieces.append(_shard(documents, lengths, ranks, len(capacities)))
        assert (round_of_document >= 0).all(), "a document was left out"
        placement = Placement.concatenate(pieces)
        plan = self.schedule(lengths, placement, mask)
        return RoundsPlan(plan, round_of_document, groups, self.waits_for_all)

    def schedule(self, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        """Makes a plan as `Scheduler.schedule` says."""
        return plan_at_home(self.name, self._config, lengths, placement, mask)


def _groups(each: Round) -> list[tuple[list[int], Int64s]]:
    """Returns the ranks and documents of each group: ranks of one group have the same
    documents."""
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, documents in enumerate(each):
        members.setdefault(tuple(documents), []).append(rank)
    return [(ranks, np.array(own, dtype=np.int64)) for own, ranks in members.items() if own]


def _shard(documents: Int64s, lengths: Int64s, ranks: list[int], world_size: int) -> Placement:
    """Shards each document of a group over its ranks, head and tail."""
    numbers = np.arange(len(documents))
    whole = Placement(numbers, 0 * numbers, lengths[documents], 0 * numbers, 1)
    pieces = shard_documents(whole, len(ranks))
    return Placement(
        documents[pieces.document],
        pieces.start,
        pieces.end,
        np.array(ranks, dtype=np.int64)[pieces.rank],
        world_size,
    )
