"""A discrete-event run of plans on a described cluster: seconds, bytes and memory of an iteration.

    from distca.simulate import CLUSTERS, ModelCosts, Way, plan_batch, simulate_ticks
    costs = ModelCosts(MODELS["llama-8b"], CLUSTERS["dgx-h200"], tensor_parallel=8)
    planned = plan_batch(windows, stages=4, data_parallel=16, config=config, way=Way("tiles"))
    outcome = simulate_ticks(planned, costs)

With `--distca` it runs the very plans and ticks that the runtime executes; the baselines are 1F1B
pipelines of context-parallel groups. It is deterministic, and needs neither processes nor devices.
"""

from distca.simulate.advice import TITLES, Choice, advise
from distca.simulate.baselines import BASELINES, simulate_baseline
from distca.simulate.batches import PlannedBatch, Way, plan_batch, server_table
from distca.simulate.bins import BaselineLayout
from distca.simulate.cluster import CLUSTERS, Cluster
from distca.simulate.costs import ModelCosts
from distca.simulate.flags import best_of_distca, how_to_train, training_flags
from distca.simulate.outcome import Outcome, save_trace
from distca.simulate.resources import Resources, Transfer
from distca.simulate.search import (
    SYSTEMS,
    WAYS,
    Candidate,
    Job,
    candidates,
    divisions,
    pack_sequences,
    simulate,
)
from distca.simulate.ticks import Ablation, simulate_ticks

__all__ = [
    "BASELINES",
    "CLUSTERS",
    "SYSTEMS",
    "TITLES",
    "WAYS",
    "Ablation",
    "BaselineLayout",
    "Candidate",
    "Choice",
    "Cluster",
    "Job",
    "ModelCosts",
    "Outcome",
    "PlannedBatch",
    "Resources",
    "Transfer",
    "Way",
    "advise",
    "best_of_distca",
    "candidates",
    "divisions",
    "how_to_train",
    "pack_sequences",
    "plan_batch",
    "save_trace",
    "server_table",
    "simulate",
    "simulate_baseline",
    "simulate_ticks",
    "training_flags",
]
