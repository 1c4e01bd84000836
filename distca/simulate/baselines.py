"""An iteration without `--distca`: 1F1B pipelines of context-parallel groups.

Documents are packed into *bins*: one for each micro-batch of each data-parallel replica, over the
ranks of its context-parallel group, which share core attention as `distca.simulate.sharing` says:
so its ranks wait for the slowest in every layer. Replicas wait for each other only for the
gradients, pipeline stages for activations.

* **plain**: plain Megatron; documents one after the other, no context parallelism.
* **cp-p2p**, **cp-a2a**, **cp-a2a+p2p**: the same with a group for each bin, by the name that
  Megatron's `--cp-comm-type` gives its exchanges; documents are sharded head-tail.
* **per-document-cp**: the same with an all-gather (`all_gather`).
* **hybrid-cp**: Megatron's hybrid context parallelism, which has rounds instead of bins: see
  `distca.simulate.hybrid`.
* **dynamic-cp**: the dynamic context parallelism of Megatron's branch dev, which chooses groups for
  each micro-batch: see `distca.simulate.dynamic`.
* **wlb-llm**: WLB-LLM in its ideal form: variable-length bins of equal work over all micro-batches
  and replicas, as large as memory allows. Work means forward and backward seconds of attention,
  linear layers, collectives and the output layer, since the last stage is the slowest.
  Each group shards documents or the sequence, whichever is faster. Bins go to replicas so that
  replicas have equal work, and through a replica's pipeline in the fastest of a few orders.
* **wlb-llm-paper**: WLB-LLM as the DistCA paper ran it, by the authors' public experiments: packed
  by a fixed formula of forward work (`PaperWork`) without a bound of memory, bins in no order, and
  gathered keys kept twice. `distca.simulate.search` leaves it few configurations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distca.cost.kernel_time import CostModel
from distca.plan.span import Floats, Int64s
from distca.schedule import most_in_flight_of_1f1b
from distca.simulate.bins import PACKED_BY_WORK, RINGS, BaselineLayout, Bins
from distca.simulate.charges import exposed_reduction
from distca.simulate.costs import ModelCosts
from distca.simulate.dynamic import DYNAMIC, DynamicBins
from distca.simulate.hybrid import HYBRID, no_plan, plan_hybrid, simulate_hybrid
from distca.simulate.layer_mean import LayerMean
from distca.simulate.one_f_one_b import Passes, in_best_order, one_f_one_b
from distca.simulate.outcome import Outcome

MEGATRON = ("plain", *RINGS, "per-document-cp", HYBRID)
"""Baselines that every user of Megatron has; the last one asks megatron-core's own scheduler."""
WITHOUT_WINDOWS = (*RINGS, HYBRID, DYNAMIC)
"""Baselines that have no sliding windows."""
BASELINES = (*MEGATRON, DYNAMIC, "wlb-llm", "wlb-llm-paper")


def simulate_baseline(
    name: str,
    lengths: Int64s,
    layout: BaselineLayout,
    costs: ModelCosts,
    *,
    cost_model: CostModel | None = None,
) -> Outcome:
    """Simulates a global batch.

    Args:
        name: one of `BASELINES`.
        lengths: tokens of each document, int64.
        layout: division of the servers into stages, replicas and groups.
        costs: costs of the model on the cluster.
        cost_model: forward seconds of tasks; None: the cluster's kernel.

    Raises:
        ValueError: there is no such baseline, or sizes don't divide.
    """
    if name not in BASELINES:
        raise ValueError(f"no baseline {name!r}: choose from {', '.join(BASELINES)}")
    if name in WITHOUT_WINDOWS and not costs.model.sees_all:
        raise ValueError(f"{name} has no sliding windows or chunks: use per-document-cp")
    if costs.model.layers % layout.stages:
        raise ValueError(f"{layout.stages} stages do not divide {costs.model.layers} layers")
    check_layout(name, layout, costs)
    attention = cost_model or costs.cluster.attention_cost(costs.shape)
    attention = LayerMean.of(attention, costs.model)
    if name == HYBRID:
        if layout.stages > 1 or layout.micro_batches > 1:
            raise ValueError(f"{HYBRID} has no pipeline and no micro-batches here")
        ranks = layout.data_parallel * layout.context_parallel
        rounds = plan_hybrid(lengths, ranks, layout.context_parallel, costs.shape)
        return simulate_hybrid(lengths, ranks, rounds, costs, attention)
    if name == DYNAMIC:
        if layout.micro_batches > 1:
            raise ValueError(f"{DYNAMIC} chooses its number of micro-batches itself")
        packed = DynamicBins.of(lengths, layout, costs, attention)
        if packed is None:
            servers = layout.stages * layout.data_parallel * layout.context_parallel
            return no_plan(int(lengths.sum()), servers, costs)
        bins, layout, stages = packed.bins, packed.layout, packed.passes
        ends = one_f_one_b(stages, bins, layout, costs, packed.groups)
    else:
        bins = Bins.of(name, lengths, layout, costs, attention)
        if name in PACKED_BY_WORK:
            bins = in_best_order(bins, layout, costs)
        stages = [Passes.of(bins, layout, costs, stage) for stage in range(layout.stages)]
        ends = one_f_one_b(stages, bins, layout, costs)
    replicas = layout.data_parallel * layout.context_parallel
    seconds = 0.0
    layers, shared = costs.model.layers // layout.stages, bins.shared
    for stage, (end, each) in enumerate(zip(ends, stages, strict=True)):
        # The part of the reduction that the last backward pass hides costs nothing.
        began, ended = float(np.max(end - each.backward[:, -1])), float(end.max())
        needed = costs.gradient_seconds(stage, layout.stages, replicas)
        others = layers * float(shared.held[:, -1, 1].max())
        exposed = exposed_reduction(ended - began, needed, others, costs.cluster.charges)
        seconds = max(seconds, ended + exposed)

    def of_ranks(each: NDArray) -> NDArray:
        """Sums over the layers of each rank's stage."""
        return np.tile(np.repeat(layers * each, layout.context_parallel), layout.stages)

    times = costs.passes
    gathering = of_ranks((times * shared.exposed).sum(axis=(1, 2)))
    sent = times * shared.sent.sum(axis=1)
    return Outcome(
        seconds,
        int(lengths.sum()),
        layout.stages * replicas * costs.tensor_parallel,
        _memory(bins, layout, costs),
        costs.cluster.usable_bytes,
        np.concatenate([stage.computed for stage in stages]),
        gathering + np.concatenate([stage.waited for stage in stages]),
        gathering,
        {"shared forward": of_ranks(sent[:, 0]), "shared backward": of_ranks(sent[:, 1])},
    )


def check_layout(name: str, layout: BaselineLayout, costs: ModelCosts) -> None:
    """Refuses groups that a baseline cannot have.

    Raises:
        ValueError: the group has the wrong size, or too few heads for an all-to-all.
    """
    size, apart = layout.context_parallel, layout.all_to_all
    if name == "plain" and size > 1:
        raise ValueError("plain has no context parallelism: use per-document-cp")
    if apart < 1 or size % apart or costs.shape.kv_heads % apart:
        raise ValueError(
            f"{apart} ranks cannot share {costs.shape.kv_heads} key-value heads of each GPU by an "
            f"all-to-all in groups of {size}: give a divisor of both"
        )
    wanted = {"cp-a2a": apart == size, "cp-a2a+p2p": 1 < apart < size}.get(name, apart == 1)
    if not wanted:
        raise ValueError(f"{name} has no all-to-all among {apart} of {size} ranks")


def _memory(bins: Bins, layout: BaselineLayout, costs: ModelCosts) -> Floats:
    """Peak bytes of each rank's GPUs, `[stages * ranks]`."""
    layers = costs.model.layers // layout.stages
    replicas = layout.data_parallel * layout.context_parallel
    in_flight = most_in_flight_of_1f1b(layout.micro_batches, layout.stages)
    shared = bins.shared
    kept = layers * (bins.tokens * costs.activation_bytes() + shared.kept)
    found = []
    for stage, most in enumerate(in_flight):
        # 1F1B keeps consecutive micro-batches.
        together = np.stack(
            [kept[:, n : n + most].sum(axis=1) for n in range(layout.micro_batches - most + 1)]
        ).max(axis=0)
        peak = together.ravel() + costs.state_bytes(stage, layout.stages, replicas)
        more = shared.transient.max(axis=3) + bins.tokens * costs.recomputed_bytes()
        if stage == layout.stages - 1:
            more = np.maximum(more, bins.tokens * costs.logit_bytes())
        found.append(peak + more.max(axis=1).ravel())
    return np.concatenate(found)
