"""The warning of a baseline whose context-parallel groups have one rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch

from distca.plan import Mask, Placement, Tasks
from distca.schedule import ScheduleConfig, even_capacities, make_scheduler
from megatron_patches.flags.config import DistcaConfig
from support.models import memory_stream, parse
from support.ranks import forget_megatron

SHORT, LONG = [100, 28] * 40, [500, *[12, 100, 28] * 40]


def warnings_of(runs: Sequence[str], lengths: Sequence[int]) -> list[list[str]]:
    """What each run's first plan is warned of on this rank; collective."""

    from megatron_patches.batches import plan_log
    from megatron_patches.loop.data import window_layout
    from megatron_patches.pipeline.planned_data import PlannedData
    from support import training

    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    found = []
    for run in runs:
        args = parse(f"--seq-length 256 --global-batch-size 8 --distca {run}".split())
        training.initialize(args)
        planned = PlannedData.start(
            DistcaConfig.from_args(args), args, window_layout(args), torch.device("cpu")
        )
        reader = planned.reader(memory_stream(lengths), forward_only=False)
        plan_log.logger.addHandler(handler)
        try:
            plan_log.log_first_plan(reader, "resend", 0, planned.micro_batches_at(0))
        finally:
            plan_log.logger.removeHandler(handler)
        planned.close()
        found.append(list(said))
        said.clear()
        forget_megatron()
    return found


def test_groups_of_one_are_warned_of(ranks) -> None:
    cases = {
        "per-document-cp": "is the same as packed: ",
        "ring-zigzag --no-distca-ping-pong": "has the placement of packed: ",
        "wlb-llm --distca-context-parallel-size 1": "packs whole documents and shards none",
        "per-document-cp --distca-placement sequential": "remove one of the two",
        "per-document-cp --distca-context-parallel-size 2": None,
        "wlb-llm --tensor-model-parallel-size 2": None,
        "packed": None,
        "tiles": None,
        "tiles --distca-context-parallel-size 2": None,
    }
    runs = [f"--distca-scheduler {case}" for case in cases]
    first, second = ranks.run(warnings_of, runs, SHORT, world_size=2)
    assert second == [[]] * len(runs), "rank 0 speaks for all"
    (size,) = first.pop()
    del cases["tiles --distca-context-parallel-size 2"]
    for said, (case, wanted) in zip(first, cases.items(), strict=True):
        assert len(said) == (wanted is not None), case
        assert wanted is None or wanted in said[0], case
        assert wanted is None or said[0].startswith(f"--distca-scheduler {case.split()[0]} ")
    assert "the 2 data-parallel ranks set --distca-context-parallel-size" in first[0][0]
    # The last one names the size, which nothing uses.
    assert "--distca-context-parallel-size 2 has no effect with --distca-scheduler tiles" in size
    # Documents that need a group have one.
    runs = ["--distca-scheduler per-document-cp"]
    assert ranks.run(warnings_of, runs, LONG, world_size=2) == [[[]]] * 2


def test_with_one_rank_in_a_group_nothing_is_shared() -> None:
    """What the warning says: the plans are those of `packed`."""
    # Some documents cross the end of a rank.
    lengths = np.array([300, 300, 424] * 2)
    packed, per_document, ring = (
        make_scheduler(name, ScheduleConfig(tolerance=0.1)).plan(
            lengths, even_capacities(int(lengths.sum()), 4), Mask()
        )
        for name in ("packed", "per-document-cp", "ring-zigzag")
    )
    assert len(packed.placement.rank) > len(lengths)
    for plan in (per_document, ring):
        assert columns(plan.placement) == columns(packed.placement)
    assert columns(per_document.tasks) == columns(packed.tasks)
    # Keys of another rank are a task of their own.
    assert len(ring.tasks) > len(packed.tasks)


def columns(table: Placement | Tasks) -> list[list[int]]:
    arrays = (getattr(table, field.name) for field in fields(table))
    return [array.tolist() for array in arrays if isinstance(array, np.ndarray)]
