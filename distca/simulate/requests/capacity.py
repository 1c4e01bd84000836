"""Capacity: the highest rate of arrivals at which few requests wait long, and how it is got.

A request is late if its first token takes more than `PATIENCE` times the mean of the trace's
requests when each is alone on the cluster, in its best group: one limit for all strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from distca.schedule.serving.cdsp import ImprovementRates, least_by_rate
from distca.schedule.serving.cdsp.load import IMPROVEMENT_RATES
from distca.simulate.requests.cluster import ServingCluster
from distca.simulate.requests.prefills import EAGER, prefill_seconds
from distca.simulate.requests.traces import Trace

PATIENCE = 25.0
"""Times of the light load's mean that a first token may take, as the paper normalizes to."""

LATE = 1.0
"""Percent of requests that may be late."""


@dataclass(frozen=True)
class Capacity:
    """The highest rate, and what it was judged by.

    Attributes:
        per_second: requests a second.
        limit: seconds to the first token within which all but one in a hundred are.
    """

    per_second: float
    limit: float


def light_load(trace: Trace, cluster: ServingCluster) -> float:
    """Mean of seconds to the first token of requests that are alone, each in its best group."""
    degrees = [s for s in cluster.times.degrees if s <= cluster.prefill_ranks]
    alone = [
        min(cluster.times.seconds(degree, 0, request.prompt) for degree in degrees)
        for request in trace.requests
    ]
    return float(np.mean(alone))


def profile_rates(
    trace: Trace,
    cluster: ServingCluster,
    strategy: str,
    step: float = 0.5,
    loads: int = 20,
    improvement_rates: Sequence[float] = IMPROVEMENT_RATES,
    judge: Callable[[Sequence[float]], float] | None = None,
) -> ImprovementRates:
    """Finds by simulation the improvement rate of least time to the first token for each load.

    Up to the highest load at which one of them keeps within the limit. Beyond that, lines grow for
    as long as the trace does, and what is best there, one rank for each prompt, is no answer to a
    burst: the rate of the highest load stays.

    Args:
        trace: requests like those that will come, not the same ones.
        cluster: where they run.
        strategy: how.
        step: requests a second between two loads.
        loads: most loads to find it for.
        improvement_rates: those to try.
        judge: makes one figure of all times; None: the percentile that capacity goes by.
    """
    judge = latest_but_few if judge is None else judge
    limit = PATIENCE * light_load(trace, cluster)
    found: list[tuple[float, float, float]] = []
    for number in range(1, loads + 1):
        load = number * step
        loaded, within = trace.at_rate(load), False
        of_load = []
        for rate in improvement_rates:
            seconds = prefill_seconds(loaded, cluster, strategy, ImprovementRates({0.0: rate}))
            of_load.append((load, rate, judge(seconds)))
            within |= latest_but_few(seconds) <= limit
        if within or not found:
            found += of_load
        if not within:
            break
    return least_by_rate(found)


def latest_but_few(seconds: Sequence[float]) -> float:
    """Seconds within which all but the late ones are."""
    return float(np.percentile(seconds, 100 - LATE))


def find_capacity(
    trace: Trace,
    cluster: ServingCluster,
    strategy: str,
    rates: ImprovementRates = EAGER,
    limit: float | None = None,
    precision: float = 0.005,
) -> Capacity:
    """Finds the highest rate by bisection: the same requests arrive faster or slower.

    Args:
        trace: requests.
        cluster: where they run.
        strategy: how.
        rates: improvement rates by load.
        limit: seconds to the first token; None: `PATIENCE` times `light_load`.
        precision: relative error of the rate.

    Raises:
        ValueError: all of the trace may arrive at once.
    """
    if limit is None:
        limit = PATIENCE * light_load(trace, cluster)

    def holds(per_second: float) -> bool:
        seconds = prefill_seconds(trace.at_rate(per_second), cluster, strategy, rates)
        return latest_but_few(seconds) <= limit

    if holds(1e9):
        raise ValueError(
            f"{len(trace.requests)} requests are too few to tell a capacity: if all arrived at "
            "once, their first tokens would still be early enough; give more"
        )
    low, high = 0.0, 1.0 / limit
    while holds(high):
        low, high = high, 2 * high
    # What is late even alone has no capacity.
    while high - low > precision * high and high * limit > 1e-3:
        middle = (low + high) / 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return Capacity(low, limit)
