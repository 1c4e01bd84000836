"""Prefills alone: seconds to the first token, of an engine and as Tetris plans them."""

from __future__ import annotations

from distca.schedule.serving.cdsp import LOAD_AWARE, ImprovementRates, Search
from distca.schedule.serving.cdsp.chunks import NOBODY
from distca.schedule.serving.cdsp.growing import GrowingGroups
from distca.schedule.serving.limits import SchedulerConfig
from distca.simulate.requests.cluster import ServingCluster
from distca.simulate.requests.costs import FittedCosts
from distca.simulate.requests.engine import SimulatedEngine
from distca.simulate.requests.traces import RequestTrace

EAGER = ImprovementRates({0.0: 0.0})
"""Any improvement is enough, at every load."""


def make_engine(
    cluster: ServingCluster, strategy: str, rates: ImprovementRates = EAGER
) -> SimulatedEngine:
    """Makes the engine of a cluster's prefill ranks.

    Args:
        cluster: ranks, and how long they take.
        strategy: what gives a prompt its ranks; see `cdsp.strategies`.
        rates: improvement rates by load; strategies that do not depend on load ignore them.

    Raises:
        ValueError: there is no such strategy.
    """
    ranks, size = cluster.prefill_ranks, cluster.block_size
    growing = _groups(cluster, strategy, rates)
    limits = SchedulerConfig(
        cluster.max_num_seqs,
        cluster.max_num_batched_tokens,
        size,
        threshold=0,
        growing=growing,
        prefix_caching=False,
    )
    costs = FittedCosts(cluster.times, cluster.decode_times, ranks, size)
    return SimulatedEngine(limits, costs, ranks, max(cluster.prefill_tokens // size, 1), size)


def _groups(cluster: ServingCluster, strategy: str, rates: ImprovementRates) -> GrowingGroups:
    by_load = rates if strategy in LOAD_AWARE else None
    groups = GrowingGroups(Search(cluster.times), strategy, cluster.ranks_per_node, by_load)
    groups.check(cluster.prefill_ranks)
    return groups


def prefill_seconds(
    trace: RequestTrace, cluster: ServingCluster, strategy: str, rates: ImprovementRates = EAGER
) -> list[float]:
    """Returns the seconds to the first token of each request, where decode ranks never bind.

    Raises:
        ValueError: a prompt is too long for the prefill ranks.
    """
    engine, requests = make_engine(cluster, strategy, rates), trace.requests
    seconds, now, arrived = [0.0] * len(requests), 0.0, 0
    while True:
        while arrived < len(requests) and requests[arrived].arrival <= now:
            request = requests[arrived]
            # A first token is chosen, and its blocks are given back.
            engine.add(arrived, [0] * request.prompt, 1, request.arrival)
            arrived += 1
        begun = engine.begin()
        if begun is not None:
            now += begun.seconds
            for update in engine.end():
                seconds[update.sequence] = now - requests[update.sequence].arrival
        elif arrived < len(requests):
            now = requests[arrived].arrival
        else:
            return seconds


def planned_seconds(
    trace: RequestTrace, cluster: ServingCluster, strategy: str, rates: ImprovementRates = EAGER
) -> list[float]:
    """Returns the seconds to the first token of each request as Tetris plans them on arrival.

    Groups that share no ranks never wait for each other here, as in the paper. Our ranks have their
    iterations in common, so the engine's scheduler cannot stand for this. It is quick enough to
    search for improvement rates, and bounds what the engine could sustain.

    Args:
        trace, cluster, strategy, rates: as for `prefill_seconds`.
    """
    groups = _groups(cluster, strategy, rates)
    load, free, found = groups.load(), [0.0] * cluster.prefill_ranks, []
    for request in trace.requests:
        now, growth = request.arrival, None
        if load is not None:
            load.arrived(now)
            growth = load.growth(now)
        queued = [max(0.0, each - now) for each in free]
        plan = groups.plan(queued, request.prompt, 0, NOBODY, growth)
        assert plan is not None, "nobody holds its beginning"
        for rank in plan.chunks[-1].ranks:
            free[rank] = now + plan.ttft
        found.append(plan.ttft)
    return found
