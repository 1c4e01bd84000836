"""A discrete-event run of requests through a serving cluster: seconds to the first token and later.

    from distca.simulate.requests import PRESETS, draw_trace, prefill_seconds
    trace = draw_trace(PRESETS["short"], count=1000, seed=0).at_rate(4.0)
    ttft = prefill_seconds(trace, cluster, "cdsp", rates)

What plans, accounts for blocks and hands over is the very code that a server runs
(`distca.schedule.serving`); times are those of Eq. 1 and of a described cluster.
"""

from distca.simulate.requests.capacity import (
    PATIENCE,
    Capacity,
    find_capacity,
    light_load,
    profile_rates,
)
from distca.simulate.requests.cluster import DecodeTimes, ServingCluster, describe_cluster
from distca.simulate.requests.prefills import prefill_seconds
from distca.simulate.requests.serving import Served, serve
from distca.simulate.requests.traces import PRESETS, Request, RequestTrace, draw_trace, read_trace

__all__ = [
    "PATIENCE",
    "PRESETS",
    "Capacity",
    "DecodeTimes",
    "Request",
    "RequestTrace",
    "Served",
    "ServingCluster",
    "describe_cluster",
    "draw_trace",
    "find_capacity",
    "light_load",
    "prefill_seconds",
    "profile_rates",
    "read_trace",
    "serve",
]
