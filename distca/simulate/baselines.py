"""An iteration without `--distca`: 1F1B pipelines of context-parallel groups.

Documents are packed into *bins*: one for each micro-batch of each data-parallel replica, over the
ranks of its context-parallel group. In every layer the group gathers all keys and values of its bin
(all of them, whether seen or not), which nothing hides, and reduces their gradients in the backward
pass: so its ranks wait for the slowest in every layer. (Megatron's ring of point-to-point
messages, which overlaps with the kernels, is not modelled.) Replicas wait for each other only for
the gradients, pipeline stages for activations. Gathered keys and values are kept for the backward
pass (paper, Section 3.2, Figure 3b).

* **packed**: plain Megatron; documents one after the other, no context parallelism.
* **per-document-cp**: the same with a group for each bin; documents are sharded head-tail.
* **wlb-llm**: WLB-LLM in its ideal form: variable-length bins of equal work over all micro-batches
  and replicas, as large as memory allows. Work means forward and backward seconds of attention,
  linear layers, collectives and the output layer, since the last stage is the slowest.
  Each group shards documents or the sequence, whichever is faster. Bins go to replicas so that
  replicas have equal work, and through a replica's pipeline in the fastest of a few orders.
"""

from __future__ import annotations

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.plan import Mask
from distca.plan.span import Floats, Int64s
from distca.schedule import most_in_flight_of_1f1b
from distca.simulate.bins import BaselineLayout, Bins
from distca.simulate.costs import ModelCosts
from distca.simulate.one_f_one_b import Passes, in_best_order, one_f_one_b
from distca.simulate.outcome import Outcome

BASELINES = ("packed", "per-document-cp", "wlb-llm")


def simulate_baseline(
    name: str,
    lengths: Int64s,
    layout: BaselineLayout,
    costs: ModelCosts,
    *,
    cost_model: CostModel | None = None,
    mask: Mask | None = None,
    recording: bool = False,
) -> Outcome:
    """Simulates a global batch.

    Args:
        name: one of `BASELINES`.
        lengths: tokens of each document, int64.
        layout: division of the servers into stages, replicas and groups.
        costs: costs of the model on the cluster.
        cost_model: forward seconds of tasks; None: the cluster's kernel.
        mask: tokens that a query sees; None: all earlier tokens of its document.
        recording: keep spans of each stage of each replica for a trace.

    Raises:
        ValueError: there is no such baseline, or sizes don't divide.
    """
    if name not in BASELINES:
        raise ValueError(f"no baseline {name!r}: choose from {', '.join(BASELINES)}")
    if costs.model.layers % layout.stages:
        raise ValueError(f"{layout.stages} stages do not divide {costs.model.layers} layers")
    if name == "packed" and layout.context_parallel > 1:
        raise ValueError("packed has no context parallelism: use per-document-cp")
    attention = cost_model or costs.cluster.attention_cost(costs.shape)
    bins = Bins.of(name, lengths, layout, costs, attention, mask or Mask())
    if name == "wlb-llm":
        bins = in_best_order(bins, layout, costs)
    stages = [Passes.of(bins, layout, costs, stage) for stage in range(layout.stages)]
    ends, spans = one_f_one_b(stages, bins, layout, costs, recording)
    replicas = layout.data_parallel * layout.context_parallel
    seconds = 0.0
    for stage, (end, each) in enumerate(zip(ends, stages, strict=True)):
        # The part of the reduction that the last backward pass hides costs nothing.
        hidden = float(np.max(end - each.backward[:, -1]))
        needed = costs.gradient_seconds(stage, layout.stages, replicas)
        seconds = max(seconds, float(end.max()), hidden + needed)
    gathering = np.repeat(bins.gather_seconds.sum(axis=1), layout.context_parallel)
    gathering = np.tile(gathering, layout.stages) * (2 * costs.model.layers // layout.stages)
    gathered = np.repeat(bins.gathered_bytes.sum(axis=1), layout.context_parallel)
    return Outcome(
        seconds,
        int(lengths.sum()),
        layout.stages * replicas * costs.tensor_parallel,
        _memory(bins, layout, costs),
        costs.cluster.usable_bytes,
        np.concatenate([stage.computed for stage in stages]),
        gathering + np.concatenate([stage.waited for stage in stages]),
        gathering,
        {
            "all-gather": np.tile(gathered, layout.stages) * (costs.model.layers // layout.stages),
            "reduce-scatter": np.tile(gathered, layout.stages)
            * (costs.model.layers // layout.stages),
        },
        tuple(spans),
    )


def _memory(bins: Bins, layout: BaselineLayout, costs: ModelCosts) -> Floats:
    """Peak bytes of each rank's GPUs, `[stages * ranks]`."""
    layers = costs.model.layers // layout.stages
    replicas = layout.data_parallel * layout.context_parallel
    in_flight = most_in_flight_of_1f1b(layout.micro_batches, layout.stages)
    size = layout.context_parallel
    others = bins.tokens.sum(axis=2, keepdims=True) - bins.tokens if size > 1 else 0 * bins.tokens
    kept = layers * (
        bins.tokens * costs.activation_bytes() + others * float(costs.shape.kv_row_bytes)
    )
    found = []
    for stage, most in enumerate(in_flight):
        # 1F1B keeps consecutive micro-batches.
        together = np.stack(
            [kept[:, n : n + most].sum(axis=1) for n in range(layout.micro_batches - most + 1)]
        ).max(axis=0)
        peak = together.ravel() + costs.state_bytes(stage, layout.stages, replicas)
        more = costs.backward_bytes(stage == layout.stages - 1, size)
        found.append(peak + more * bins.tokens.max(axis=1).ravel())
    return np.concatenate(found)
