"""The baseline that Megatron's users have: hybrid context parallelism of megatron-core itself.

With `--hybrid-context-parallel --max-seqlen-per-dp-cp-rank N` Megatron trains on whole samples,
here documents, one after the other: each on the smallest power of two of ranks on which none has
more than N of its tokens. All data- and context-parallel ranks are one pool; there is no pipeline.

Who trains on what is decided by megatron-core's own `BalancedCPScheduler`, which this module calls
(it is the same in 0.17.1 to 0.19.2). It fills *rounds*: in a round the ranks are divided into
subgroups, each with samples of its own, and all ranks wait for each other at its end. Without
enough samples for all ranks, subgroups are made larger.

`rounds.py` makes a plan of that.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from distca.plan.span import Int64s
from distca.quiet import ignore_missing_cuda
from distca.schedule.base import ScheduleConfig
from distca.schedule.baselines.rounds import Round, RoundScheduler
from distca.wording import install

_NEEDED = "hybrid-cp asks megatron-core's own scheduler: {} (0.17.1 to 0.19.2 have it; {})"


class HybridContextParallel(RoundScheduler):
    """Megatron's hybrid context parallelism, as the module describes it.

    Raises:
        ImportError: megatron-core is not installed.
    """

    name = "hybrid-cp"

    def __init__(self, config: ScheduleConfig) -> None:
        super().__init__(config)
        # Imported here, as it takes seconds, which are not planning's.
        self._scheduler = balanced_scheduler()

    def rounds(self, lengths: Int64s, ranks: int, most_tokens: int) -> list[Round]:
        """Asks megatron-core, as `RoundScheduler.rounds` says."""
        return _schedule_rounds(self._scheduler, lengths, ranks, most_tokens)


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
