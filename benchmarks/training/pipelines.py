"""Replayed and ideal times of a pipeline's steps, which `throughput.py` describes."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from benchmarks.training.replay import TimedPass, fit, replay, ticks_seconds
from benchmarks.training.setting import APART, PLAIN, Setting
from benchmarks.training.step import Ranks
from distca.plan.span import Floats, Int64s
from distca.schedule import tick_schedule


def add_replayed(
    setting: Setting, pairs: Int64s, ranks: Ranks, ways: dict[str, dict[str, Any]]
) -> None:
    """Adds replayed seconds, their ratio and the ideal ratio to each way.

    Args:
        setting: sizes and ways of the measurement.
        pairs: visible pairs in the order drawn, `[batches, micro-batches, data-parallel ranks]`.
        ranks: steps of one process of each tensor-parallel group.
        ways: figures of each way, to which the new ones are added.
    """

    def column(data_rank: int) -> Ranks:
        return ranks[data_rank :: setting.data_parallel_size]

    def plain(batch: int, passes_of: Any) -> float:
        return max(
            replay([passes_of(stage, own, data, batch) for stage, own in enumerate(column(data))])
            for data in range(setting.data_parallel_size)
        )

    def measured(stage: int, own: Any, data: int, batch: int) -> list[TimedPass]:
        rounds = [step.passes for step in own[PLAIN][batch]]
        return [
            first._replace(seconds=statistics.median(each.seconds for each in (first, *others)))
            for first, *others in zip(*rounds, strict=True)
        ]

    models = {}
    for stage in range(setting.stages):
        for direction in ("forward", "backward"):
            found = [
                (pairs[batch, each.micro_batch, data], each.seconds)
                for data in range(setting.data_parallel_size)
                for batch in range(setting.batches)
                for each in measured(stage, column(data)[stage], data, batch)
                if each.direction == direction
            ]
            models[stage, direction] = fit(*zip(*found, strict=True))

    def modelled(stage: int, own: Any, data: int, batch: int) -> list[TimedPass]:
        fitted = []
        for each in measured(stage, own, data, batch):
            rest, per_pair = models[stage, each.direction]
            seconds = rest + per_pair * float(pairs[batch, each.micro_batch, data])
            fitted.append(each._replace(seconds=seconds))
        return fitted

    batches = range(setting.batches)
    plain_seconds = sum(plain(batch, measured) for batch in batches)
    plain_modelled = sum(plain(batch, modelled) for batch in batches)
    for name, way in ways.items():
        if name == PLAIN:
            seconds, ideal = plain_seconds, plain_modelled
        else:
            seconds = 0.0
            for batch in batches:
                rounds = [[step.ticks for step in own[name][batch]] for own in ranks]
                table: Floats = np.median(np.array(rounds), axis=1)
                seconds += ticks_seconds(list(table.T))
            ideal = sum(
                _ideal_ticks(setting, float(pairs[batch].sum()), models, APART not in name)
                for batch in batches
            )
        way["replayed_seconds"] = seconds
        way["replayed_ratio"] = plain_seconds / seconds
        way["ideal_ratio"] = plain_modelled / ideal


def _ideal_ticks(
    setting: Setting, pairs: float, models: dict[tuple[int, str], tuple[float, float]], pooled: bool
) -> float:
    """Seconds of a batch's ticks if pairs were perfectly shared out, over stages or within them."""
    each = pairs / setting.micro_batches / setting.data_parallel_size
    total = 0.0
    for tick in tick_schedule(setting.micro_batches, setting.stages).ticks:
        working = [
            models[n, tick.direction] for n, work in enumerate(tick.work) if work is not None
        ]
        shared = each * (len(working) / setting.stages if pooled else 1.0)
        total += max(rest for rest, _ in working)
        total += shared * statistics.mean(per_pair for _, per_pair in working)
    return total
