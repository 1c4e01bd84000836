"""The baseline that Megatron's users have: hybrid context parallelism of megatron-core itself.

With `--hybrid-context-parallel --max-seqlen-per-dp-cp-rank N` Megatron trains on whole samples,
here documents, one after the other: each on the smallest power of two of ranks on which none has
more than N of its tokens. All data- and context-parallel ranks are one pool; there is no pipeline.

Who trains on what is decided by megatron-core's own `BalancedCPScheduler`, which this module calls
(it is the same in 0.17.1 to 0.19.2). It fills *rounds*: in a round the ranks are divided into
subgroups, each with samples of its own, and all ranks wait for each other at its end. Without
enough samples for all ranks, subgroups are made larger.

The plan has all rounds: a rank's rows are its samples in the order in which it runs them. A sample
is cut into two chunks for each rank of its subgroup, head and tail, and its keys and values travel
among them, in a ring or gathered: the rows are the same. Megatron needs padded samples for that,
which the plan does without.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from distca.plan import Mask, Placement, Plan
from distca.plan.span import Floats, Int64s
from distca.quiet import ignore_missing_cuda
from distca.schedule.base import ScheduleConfig, plan_at_home, task_loads
from distca.schedule.baselines.context_parallel import shard_documents
from distca.wording import install

_NEEDED = "hybrid-cp asks megatron-core's own scheduler: {} (0.17.1 to 0.19.2 have it; {})"
Round = list[list[int]]
"""The documents of each rank in a round, in the order in which it runs them."""


@dataclass(frozen=True)
class HybridPlan:
    """A plan with its rounds.

    Attributes:
        plan: all rounds as one plan.
        round_of_document: round in which each document is trained on, int64 `[documents]`.
    """

    plan: Plan
    round_of_document: Int64s

    @property
    def rounds(self) -> int:
        return int(self.round_of_document.max(initial=-1)) + 1

    def by_round(self, of_task: Floats | Int64s) -> Floats:
        """Sums a quantity of each task over the tasks of a round and rank, `[rounds, ranks]`."""
        ranks, tasks = self.plan.world_size, self.plan.tasks
        slot = self.round_of_document[tasks.document] * ranks + tasks.server
        sums = np.bincount(slot, weights=of_task, minlength=self.rounds * ranks)
        return sums.astype(np.float64).reshape(self.rounds, ranks)


class HybridContextParallel:
    """Megatron's hybrid context parallelism, as the module describes it.

    The most tokens of a sample on a rank are the tokens that a rank owns, or, as Megatron advises,
    the longest document's divided by `context_parallel_size`, if that is configured.

    Raises:
        ImportError: megatron-core is not installed.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config
        # Imported here, as it takes seconds, which are not planning's.
        self._scheduler = balanced_scheduler()

    def plan(self, lengths: Int64s, capacities: Int64s, mask: Mask) -> Plan:
        """Makes a plan as `Scheduler.plan` says, with all rounds.

        Raises:
            ValueError: Megatron cannot divide the ranks, or its scheduler makes no plan.
        """
        found = self.plan_rounds(lengths, capacities, mask)
        if found.rounds == 1:
            return found.plan
        loads = found.by_round(task_loads(found.plan.tasks, mask, self._config.cost_model))
        waiting = float(loads.max(axis=1).sum() / loads.sum(axis=0).mean())
        note = (
            f"{found.rounds} rounds, and all ranks wait after each: together the rounds' busiest "
            f"ranks have {waiting:.3f} times the mean load"
        )
        return replace(found.plan, notes=(note,))

    def plan_rounds(self, lengths: Int64s, capacities: Int64s, mask: Mask) -> HybridPlan:
        """Makes the plan, and says in which round each document is.

        Args:
            lengths: tokens of each document, int64 `[documents]`.
            capacities: tokens that each rank would own, int64 `[ranks]`.
            mask: attention mask of all documents.

        Raises:
            ValueError: Megatron cannot divide the ranks, or its scheduler makes no plan.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        size = self._config.context_parallel_size
        most = int(capacities.min()) if size is None else -(-int(lengths.max(initial=1)) // size)
        rounds = _schedule_rounds(self._scheduler, lengths, len(capacities), max(most, 1))
        round_of_document = np.full(len(lengths), -1, dtype=np.int64)
        pieces = []
        for number, each in enumerate(rounds):
            for ranks, documents in _subgroups(each):
                # A document must not be in two rounds.
                assert (round_of_document[documents] == -1).all(), documents
                round_of_document[documents] = number
                pieces.append(_shard(documents, lengths, ranks, len(capacities)))
        assert (round_of_document >= 0).all(), "megatron-core left out a document"
        placement = Placement.concatenate(pieces)
        return HybridPlan(self.schedule(lengths, placement, mask), round_of_document)

    def schedule(self, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        """Makes a plan as `Scheduler.schedule` says."""
        return plan_at_home("hybrid-cp", self._config, lengths, placement, mask)


class _BalancedScheduler(Protocol):
    """What is used of megatron-core's scheduler."""

    def gpus_needed(self, tokens: int, /) -> int:
        """Ranks that a document of that many tokens needs."""
        ...

    def get_groups_and_subsamples(
        self, numbers_and_tokens: list[tuple[int, int]], config: None, /
    ) -> tuple[object, list[Round]]:
        """Rounds of all documents, each with the documents of every rank."""
        ...


def balanced_scheduler() -> Callable[[int, _Pool], _BalancedScheduler]:
    """Returns megatron-core's class `BalancedCPScheduler`.

    Raises:
        ImportError: megatron-core is not installed, or has no such class.
    """
    try:
        with warnings.catch_warnings():
            # It warns of every GPU package that is not there.
            warnings.simplefilter("ignore")
            ignore_missing_cuda()
            from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
    except ImportError as error:
        raise ImportError(_NEEDED.format(install("megatron"), error)) from error
    return BalancedCPScheduler


def find_balanced_scheduler() -> None:
    """Looks for what `balanced_scheduler` imports, which takes seconds and much memory.

    Raises:
        ImportError: megatron-core or torch is not installed, or has no such module.
    """
    found = importlib.util.find_spec("megatron")
    places = [] if found is None else found.submodule_search_locations or []
    module = Path("core", "pipeline_parallel", "hybrid_cp_schedule.py")
    if not any(Path(place, module).is_file() for place in places):
        raise ImportError(_NEEDED.format(install("megatron"), f"there is no megatron/{module}"))
    if importlib.util.find_spec("torch") is None:
        raise ImportError(_NEEDED.format(install("megatron"), "there is no torch"))


@dataclass(frozen=True)
class _Pool:
    """All that megatron-core's scheduler asks of a process group."""

    ranks: int

    def size(self) -> int:
        return self.ranks


def _schedule_rounds(
    make_scheduler: Callable[[int, _Pool], _BalancedScheduler],
    lengths: Int64s,
    ranks: int,
    most_tokens: int,
) -> list[Round]:
    """Asks megatron-core which ranks train on which documents.

    Args:
        make_scheduler: `balanced_scheduler`'s class.
        lengths: tokens of each document, int64 `[documents]`.
        ranks: data- and context-parallel ranks, all in one pool.
        most_tokens: most tokens of a document on a rank (`--max-seqlen-per-dp-cp-rank`).

    Raises:
        ValueError: Megatron cannot divide the ranks, or its scheduler makes no plan.
    """
    if ranks % 2:
        raise ValueError(
            f"Megatron's hybrid context parallelism needs an even number of ranks, not {ranks}"
        )
    scheduler = make_scheduler(most_tokens, _Pool(ranks))
    needed = scheduler.gpus_needed(int(lengths.max(initial=1)))
    if needed > ranks:
        raise ValueError(
            f"hybrid-cp: a document of {int(lengths.max()):,} tokens needs {needed} ranks with at "
            f"most {most_tokens:,} each, but there are {ranks}"
        )
    try:
        _, rounds = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
    except (AssertionError, LookupError) as error:
        raise ValueError(
            f"hybrid-cp: megatron-core's scheduler fails for {ranks} ranks with at most "
            f"{most_tokens:,} tokens of a document each: {error}"
        ) from error
    return rounds


def _subgroups(each: Round) -> list[tuple[list[int], Int64s]]:
    """Returns the ranks and documents of each subgroup: ranks of one subgroup have the same
    documents."""
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, documents in enumerate(each):
        members.setdefault(tuple(documents), []).append(rank)
    return [(ranks, np.array(own, dtype=np.int64)) for own, ranks in members.items() if own]


def _shard(documents: Int64s, lengths: Int64s, ranks: list[int], world_size: int) -> Placement:
    """Shards each document of a subgroup over its ranks, head and tail."""
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
