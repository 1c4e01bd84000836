"""Capacity: the highest rate of arrivals at which few requests wait long, and how it is got.

A request is late if its first token takes more than `PATIENCE` times the mean of the trace's
requests when each is alone on the cluster, in its best group: one limit for all strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from distca.schedule.serving.cdsp import ImprovementRates, least_by_rate
from distca.schedule.serving.cdsp.load import IMPROVEMENT_RATES, Growth
from distca.simulate.requests.cluster import ServingCluster
from distca.simulate.requests.prefills import EAGER, planned_seconds, prefill_seconds
from distca.simulate.requests.traces import RequestTrace

PATIENCE = 25.0
"""Times of the light load's mean that a first token may take, as the paper normalizes to."""

LATE = 1.0
"""Percent of requests that may be late."""

_HALVINGS = 2
"""Times that the last step between two loads is halved, to come close to the highest one."""

PrefillSeconds = Callable[[RequestTrace, ServingCluster, str, ImprovementRates], Sequence[float]]
"""Function of a trace, a cluster, a strategy and improvement rates: seconds to the first tokens."""


@dataclass(frozen=True)
class Capacity:
    """The highest rate, and what it was judged by.

    Attributes:
        per_second: requests a second.
        limit: seconds to the first token within which all but one in a hundred are.
    """

    per_second: float
    limit: float


def light_load(trace: RequestTrace, cluster: ServingCluster) -> float:
    """Mean of seconds to the first token of requests that are alone, each in its best group."""
    degrees = [s for s in cluster.times.degrees if s <= cluster.prefill_ranks]
    alone = [
        min(cluster.times.seconds(degree, 0, request.prompt) for degree in degrees)
        for request in trace.requests
    ]
    return float(np.mean(alone))


def profile_rates(
    traces: Sequence[RequestTrace],
    cluster: ServingCluster,
    strategy: str,
    step: float | None = None,
    loads: int = 20,
    improvement_rates: Sequence[float] = IMPROVEMENT_RATES,
    judge: Callable[[Sequence[float]], float] | None = None,
) -> ImprovementRates:
    """Finds by simulation the improvement rate of least time to the first token for each load, and
    how many ranks groups should have there at most.

    Seconds are those that Tetris plans (`planned_seconds`), since many runs are needed.

    Up to the highest load at which one of them keeps within the limit. Beyond that, lines grow for
    as long as the trace does, and what is best there, one rank for each prompt, is no answer to a
    burst: the rate of the highest load stays.

    Args:
        traces: requests like those that will come, not the same ones; few decide a percentile, so
            means over several traces tell more.
        cluster: where they run.
        strategy: how.
        step: requests a second between two loads, less near the highest one; None: a tenth of what
            all ranks could do if each prompt had one group of the best size.
        loads: most loads to find it for.
        improvement_rates: those to try.
        judge: makes one figure of all times; None: the percentile that defines capacity.
    """
    judge = latest_but_few if judge is None else judge
    step = _ideal_load(traces[0], cluster) / 10 if step is None else step
    limit = PATIENCE * np.mean([light_load(trace, cluster) for trace in traces])
    found: list[tuple[float, Growth, float]] = []

    def bears(load: float) -> bool:
        """Tries all at a load, and keeps what was found if one of them keeps within the limit."""
        loaded, within = [trace.at_rate(load) for trace in traces], False
        of_load = []
        for growth in _growths(cluster, improvement_rates):
            rates = ImprovementRates({0.0: growth})
            seconds = [planned_seconds(each, cluster, strategy, rates) for each in loaded]
            of_load.append((load, growth, float(np.mean([judge(each) for each in seconds]))))
            within |= bool(np.mean([latest_but_few(each) for each in seconds]) <= limit)
        if within or not found:
            found.extend(of_load)
        return within

    number = next((n for n in range(1, loads + 1) if not bears(n * step)), None)
    if number is not None:
        # What suits the highest load decides how high it is.
        low, high = (number - 1) * step, number * step
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if bears(middle) else (low, middle)
    return least_by_rate(found)


def _ideal_load(trace: RequestTrace, cluster: ServingCluster) -> float:
    """Requests a second that all ranks could do if each prompt had one group of the best size."""
    times = cluster.times
    best = (
        min(degree * times.seconds(degree, 0, request.prompt) for degree in times.degrees)
        for request in trace.requests
    )
    return cluster.prefill_ranks * len(trace.requests) / sum(best)


def _growths(cluster: ServingCluster, rates: Sequence[float]) -> Iterator[Growth]:
    """Improvement rates for groups of any size, and then for smaller ones."""
    yield from rates
    smallest, *larger = (s for s in cluster.times.degrees if s <= cluster.prefill_ranks)
    yield from ((rate, most) for most in larger[-2::-1] for rate in rates)
    # Of one size there is nothing to choose.
    if larger:
        yield (rates[0], smallest)


def latest_but_few(seconds: Sequence[float]) -> float:
    """Returns the seconds within which all but the late ones are."""
    return float(np.percentile(seconds, 100 - LATE))


def find_capacity(
    trace: RequestTrace,
    cluster: ServingCluster,
    strategy: str,
    rates: ImprovementRates = EAGER,
    limit: float | None = None,
    precision: float = 0.005,
    seconds_of: PrefillSeconds = prefill_seconds,
) -> Capacity:
    """Finds the highest rate by bisection: the same requests arrive faster or slower.

    Args:
        trace: requests.
        cluster: where they run.
        strategy: how.
        rates: improvement rates by load.
        limit: seconds to the first token; None: `PATIENCE` times `light_load`.
        precision: relative error of the rate.
        seconds_of: says how long first tokens take: `prefill_seconds` of an engine, or
            `planned_seconds`.

    Raises:
        ValueError: all of the trace may arrive at once.
    """
    if limit is None:
        limit = PATIENCE * light_load(trace, cluster)

    def holds(per_second: float) -> bool:
        seconds = seconds_of(trace.at_rate(per_second), cluster, strategy, rates)
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
