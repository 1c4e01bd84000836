"""A discrete-event run of requests: seconds to the first token and later ones.

    from distca.simulate.requests import PRESETS, draw_trace, prefill_seconds
    trace = draw_trace(PRESETS["short"], count=1000, seed=0).at_rate(4.0)
    ttft = prefill_seconds(trace, cluster, "cdsp", rates)

* `engine.py`: an engine's own scheduler, with iterations that take predicted seconds (`costs.py`);
* `traces.py`: requests and their arrivals;
* `cluster.py`, `prefills.py`, `serving.py`, `decode_ranks.py`: Tetris' cluster, whose prefill ranks
  are such an engine; `capacity.py`: the load that it sustains;
* `vllm.py`: servers of vLLM, alone or with prefill ranks, which are such an engine.
"""

from distca.simulate.requests.capacity import (
    PATIENCE,
    Capacity,
    find_capacity,
    light_load,
    profile_rates,
)
from distca.simulate.requests.cluster import ServingCluster, describe_cluster
from distca.simulate.requests.costs import (
    DecodeTimes,
    FittedCosts,
    IterationCosts,
    PlannedCosts,
)
from distca.simulate.requests.engine import SimulatedEngine, SimulatedIteration
from distca.simulate.requests.prefills import make_engine, planned_seconds, prefill_seconds
from distca.simulate.requests.serving import Served, serve
from distca.simulate.requests.traces import PRESETS, Request, RequestTrace, draw_trace, read_trace

__all__ = [
    "PATIENCE",
    "PRESETS",
    "Capacity",
    "DecodeTimes",
    "FittedCosts",
    "IterationCosts",
    "PlannedCosts",
    "Request",
    "RequestTrace",
    "Served",
    "ServingCluster",
    "SimulatedEngine",
    "SimulatedIteration",
    "describe_cluster",
    "draw_trace",
    "find_capacity",
    "light_load",
    "make_engine",
    "planned_seconds",
    "prefill_seconds",
    "profile_rates",
    "read_trace",
    "serve",
]
