"""Prefills alone: seconds to the first token, fast enough to search for rates."""

from __future__ import annotations

from distca.schedule.serving.cdsp import (
    LOAD_AWARE,
    ImprovementRates,
    Load,
)
from distca.schedule.serving.cdsp.strategies import strategy_of
from distca.simulate.requests.cluster import ServingCluster
from distca.simulate.requests.prefill_queue import PrefillQueue
from distca.simulate.requests.traces import RequestTrace

EAGER = ImprovementRates({0.0: 0.0})
"""Any improvement is enough, at every load."""


def make_queue(
    cluster: ServingCluster, strategy: str, rates: ImprovementRates = EAGER
) -> PrefillQueue:
    """Makes the queue of a strategy; those that go by no load ignore the rates.

    Raises:
        ValueError: there is no such strategy.
    """
    load = Load(rates) if strategy in LOAD_AWARE else None
    return PrefillQueue(
        cluster.prefill_ranks,
        cluster.ranks_per_node,
        cluster.search,
        strategy_of(strategy),
        load,
    )


def prefill_seconds(
    trace: RequestTrace, cluster: ServingCluster, strategy: str, rates: ImprovementRates = EAGER
) -> list[float]:
    """Returns the seconds to the first token of each request, where memory and decode ranks never
    bind.

    Raises:
        ValueError: a prompt is too long for the prefill ranks.
    """
    queue = make_queue(cluster, strategy, rates)
    return [queue.place(request.arrival, request.prompt).ttft for request in trace.requests]
