"""A discrete-event run of plans on a described cluster: seconds, bytes and memory of an iteration.

    from distca.simulate import CLUSTERS, ModelCosts, plan_global_batch, simulate_ticks
    costs = ModelCosts(MODELS["llama-8b"], CLUSTERS["dgx-h200"], tensor_parallel=8)
    planned = plan_global_batch(windows, 4, 16, config, ExecutionOptions("tiles"))
    outcome = simulate_ticks(planned, costs)

Iterations with `--distca` run the very plans and ticks that the runtime executes; baselines are
1F1B pipelines of context-parallel groups. The simulator is deterministic, and needs neither
processes nor devices.
"""

from distca.schedule.program import Ablation
from distca.simulate.advice import advise
from distca.simulate.baselines import BASELINES, MEGATRON, simulate_baseline
from distca.simulate.bins import BaselineLayout
from distca.simulate.breakdown import Breakdown, break_down
from distca.simulate.charges import PUBLISHED, UNCHARGED, Charges
from distca.simulate.choice import Choice
from distca.simulate.cluster import CLUSTERS, Cluster, peak_tflops
from distca.simulate.costs import ModelCosts
from distca.simulate.disaggregated import simulate_ticks
from distca.simulate.flags import training_flags
from distca.simulate.outcome import Outcome, save_trace
from distca.simulate.resources import Resources, Transfer
from distca.simulate.space import candidates, divisions
from distca.simulate.workload import (
    DISTCA_SYSTEMS,
    SYSTEMS,
    Candidate,
    Workload,
    pack_sequences,
    plan_global_batch,
    simulate,
)

__all__ = [
    "BASELINES",
    "CLUSTERS",
    "DISTCA_SYSTEMS",
    "MEGATRON",
    "PUBLISHED",
    "SYSTEMS",
    "UNCHARGED",
    "Ablation",
    "BaselineLayout",
    "Breakdown",
    "Candidate",
    "Charges",
    "Choice",
    "Cluster",
    "ModelCosts",
    "Outcome",
    "Resources",
    "Transfer",
    "Workload",
    "advise",
    "break_down",
    "candidates",
    "divisions",
    "pack_sequences",
    "peak_tflops",
    "plan_global_batch",
    "save_trace",
    "simulate",
    "simulate_baseline",
    "simulate_ticks",
    "training_flags",
]
