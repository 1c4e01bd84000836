"""A prefill's or a decode step's time on a described cluster, by the plans that the ranks run.

from distca.simulate.serving import InferenceCosts, simulate_step
costs = InferenceCosts(MODELS["llama-405b"], CLUSTERS["dgx-h100"], tensor_parallel=8)
outcome = simulate_step([plan] * costs.model.layers, costs)
"""

from distca.simulate.serving.block_moves import simulate_block_moves
from distca.simulate.serving.chains import chain_costs, searched_shares, searched_table
from distca.simulate.serving.costs import InferenceCosts
from distca.simulate.serving.growth import Growth, simulate_growth
from distca.simulate.serving.layouts import described_split, gpu_links, simulate_shared
from distca.simulate.serving.overheads import (
    DECODE_OVERHEADS,
    EAGER_DECODE_OVERHEADS,
    MOST_GRAPH_ROWS,
    NO_OVERHEADS,
    PREFILL_OVERHEADS,
    SHARED_DECODE_OVERHEADS,
    Captured,
    Graphs,
    Overheads,
    captured_by_engine,
    decode_overheads,
)
from distca.simulate.serving.selector import SimulatedSelector
from distca.simulate.serving.spent import PARTS
from distca.simulate.serving.steps import (
    PlanStepCosts,
    SteppedCosts,
    attend,
    memory_bytes,
    simulate_step,
)

__all__ = [
    "DECODE_OVERHEADS",
    "EAGER_DECODE_OVERHEADS",
    "MOST_GRAPH_ROWS",
    "NO_OVERHEADS",
    "PARTS",
    "PREFILL_OVERHEADS",
    "SHARED_DECODE_OVERHEADS",
    "Captured",
    "Graphs",
    "Growth",
    "InferenceCosts",
    "Overheads",
    "PlanStepCosts",
    "SimulatedSelector",
    "SteppedCosts",
    "attend",
    "captured_by_engine",
    "chain_costs",
    "decode_overheads",
    "described_split",
    "gpu_links",
    "memory_bytes",
    "searched_shares",
    "searched_table",
    "simulate_block_moves",
    "simulate_growth",
    "simulate_shared",
    "simulate_step",
]
