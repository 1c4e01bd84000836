"""What the simulator predicts for this machine, by the rates that were measured on it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.commands.verify.stage import Context, Figures
from distca.cost.model_sizes import ModelSize
from distca.plan import Mask
from distca.plan.span import Int64s
from distca.schedule.serving import nobody_holds, shard_evenly, step_plan
from distca.schedule.serving.csps.head_scatter import head_groups
from distca.simulate import Candidate, Cluster, Workload, simulate
from distca.simulate.serving import InferenceCosts, simulate_step

COSTS = "costs"
"""Name of the stage whose figures a cluster is made of."""

_LINKS = "node_gb_per_s", "network_gb_per_s", "copy_gb_per_s"
NO_PREDICTION = "not comparable with the simulator, since so small a job waits for the host"
"""What lines say in place of a prediction that has the rates of kernels alone."""


def described_cluster(
    context: Context, costs: Figures, source: str = "", older: Cluster | None = None
) -> Cluster:
    """Returns the machine as the simulator takes it.

    Args:
        context: process of this machine, which has the figures of links.
        costs: figures of the stage `COSTS`.
        source: origin of the figures.
        older: an earlier description, whose links count if they were not measured again.
    """
    links = context.found.get("links", {})
    if not links and older is not None:
        links = {name: getattr(older, name) for name in _LINKS}
    node = links.get("node_gb_per_s", 1.0)
    return Cluster(
        "this machine",
        gpus_per_node=context.local_size,
        memory_gb=costs["memory_gb"],
        peak_tflops=costs["peak_tflops"],
        linear_mfu=min(costs["product_tflops"] / costs["peak_tflops"], 1.0),
        attention_tflops=costs["attention_tflops"],
        backward_over_forward=costs["backward_over_forward"],
        node_gb_per_s=node,
        network_gb_per_s=links.get("network_gb_per_s", node),
        copy_gb_per_s=links.get("copy_gb_per_s", 10.0),
        reserved_gb=0.0,
        multiprocessors=int(costs.get("multiprocessors", Cluster.multiprocessors)),
        source=source,
    )


def measured_cluster(context: Context) -> Cluster | None:
    """Returns this machine as it was measured; None: the stage of costs did not run."""
    costs = context.found.get(COSTS)
    return None if costs is None else described_cluster(context, costs)


def prefill_seconds(model: ModelSize, cluster: Cluster, tokens: int, ranks: int) -> float:
    """Predicts the seconds of a prompt that ranks share, one after the other in zigzag."""
    costs = InferenceCosts(model, cluster)
    end = np.array([tokens], dtype=np.int64)
    new = shard_evenly(np.zeros_like(end), end, ranks)
    groups = head_groups(costs.shape.heads, costs.shape.kv_heads, ranks)
    plan = step_plan(nobody_holds(ranks), new, "pass-kv", Mask(), in_steps=True, head_groups=groups)
    return simulate_step([plan] * model.layers, costs).seconds


def training_seconds(
    model: ModelSize, cluster: Cluster, sequences: Sequence[Int64s], ranks: int
) -> float:
    """Predicts the seconds of a step of data-parallel ranks with `--distca`.

    Args:
        model: sizes of the model.
        cluster: machine.
        sequences: lengths of the documents of each sequence, all of as many tokens.
        ranks: data-parallel ranks. All share each sequence, which is a micro-batch.
    """
    context = int(sequences[0].sum())
    workload = Workload(model, cluster, ranks, context, len(sequences))
    candidate = Candidate("tiles", 1, 1, ranks, 1, len(sequences))
    return simulate(candidate, workload, sequences).seconds
