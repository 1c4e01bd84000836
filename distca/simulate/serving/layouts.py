"""A prefill on GPUs that split a model's weights and share its rows, on a described cluster.

Blocks and exchanges follow each other, as in the runtime: nothing is hidden. All bytes are those of
`distca.schedule.serving.csps.layouts`, which ranks count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.cost.link import Links
from distca.cost.volume import PlanBytes
from distca.plan import SteppedPlan
from distca.plan.span import Int64s
from distca.schedule.serving.csps.layouts import LayoutChoice, SharedRows, SplitLayer, SplitModel
from distca.simulate.outcome import Outcome
from distca.simulate.resources import Resources, Transfer
from distca.simulate.serving.costs import InferenceCosts
from distca.simulate.serving.steps import SteppedCosts


def described_split(costs: InferenceCosts, choice: LayoutChoice) -> SplitModel:
    """Returns the layers of a described model that its tensor-parallel GPUs split.

    Args:
        costs: costs of the model on its cluster.
        choice: layout of prefills, or how it is chosen.
    """
    model, ranks = costs.model, costs.tensor_parallel
    layer = SplitLayer(
        model.hidden_size,
        model.heads,
        model.kv_heads,
        model.head_dim,
        ranks,
        costs.dtype_bytes,
        min(costs.cluster.gpus_per_node, ranks),
    )
    return SplitModel(layer, model.layers, choice)


def gpu_links(costs: InferenceCosts) -> Links:
    """Links between GPUs."""
    cluster = costs.cluster
    speeds = cluster.node_bytes_per_second / 1e9, cluster.network_bytes_per_second / 1e9
    return Links(cluster.gpus_per_node, *speeds)


def simulate_shared(
    split: SplitModel,
    shared: SharedRows,
    plans: Sequence[SteppedPlan],
    costs: InferenceCosts,
    cost_model: CostModel | None = None,
    recording: bool = False,
) -> Outcome:
    """Simulates a prefill whose rows GPUs share.

    Args:
        split: layers of the model.
        shared: how its rows are shared.
        plans: plan of each layer, over all tokens on one rank, which all GPUs are.
        costs: costs of the model on its cluster.
        cost_model: seconds of tasks with the heads of a GPU; None: the cluster's own.
        recording: keep spans for `save_trace`.
    """
    cluster, layer, gpus = costs.cluster, split.layer, costs.tensor_parallel
    model, links = cost_model or cluster.inference_cost(costs.shape), gpu_links(costs)
    resources = Resources(gpus, cluster, np.ones(gpus), recording)
    every = np.ones(gpus)
    tokens = np.array([int(shared.rows.sum())])
    queries, outputs, mlp = (float(each[0]) * every for each in costs.block_seconds(tokens))
    kernels = {
        id(plan): float(
            sum(
                step.kernel_seconds[0] + cluster.launch_seconds * step.kernel_calls[0]
                for step in SteppedCosts(plan, costs.shape, model, links).steps
            )
        )
        for plan in plans
    }
    transfers: dict[str, list[tuple[str, Transfer, Int64s]]] = {}

    def move(name: str, moved: PlanBytes, only: Sequence[str]) -> None:
        if name not in transfers:
            transfers[name] = [
                (phase, Transfer.of_messages(each, links), each.sent() + each.received())
                for phase, each in moved.messages.items()
                if any(phase.startswith(begin) for begin in only)
            ]
        for phase, transfer, copied in transfers[name]:
            seconds = resources.copy_seconds(copied) + cluster.launch_seconds * (copied > 0)
            resources.compute(seconds, phase, "exchange")
            resources.wait(resources.exchange(transfer, phase), f"wait for {phase}")

    of_attention = layer.attention_bytes(shared.layout, shared.rows)
    of_block = layer.block_bytes(shared.rows)
    move("embeddings", layer.embedding_bytes(shared.rows), ["embeddings"])
    for number, plan in enumerate(plans):
        move("weights", of_attention, ["weights", "key weights", "all-gather"])
        resources.compute(queries, "queries, keys and values", "ticks", layer=number)
        move("heads", of_attention, ["heads"])
        resources.compute(kernels[id(plan)] * every, "core attention", "kernels", layer=number)
        move("outputs", of_attention, ["outputs"])
        resources.compute(outputs, "outputs", "ticks", layer=number)
        move("sums", of_attention, ["reduce-scatter"])
        move("rows", of_block, ["all-gather"])
        resources.compute(mlp, "MLP", "ticks", layer=number)
        move("sums of the MLP", of_block, ["reduce-scatter"])
    last = np.array([plans[0].plan.sequences])
    resources.compute(float(costs.head_seconds(last)[0]) * every, "output layer", "ticks")
    rows = sum(int(each.plan.placement.tokens_per_rank().sum()) for each in plans)
    whole = gpus * layer.own_weights + min(gpus, layer.kv_heads) * layer.key_weights
    gathered = whole * layer.dtype_bytes if shared.layout == "sp-ntp" else 0
    memory = costs.state_bytes() + rows * costs.shape.kv_row_bytes + gathered
    return Outcome(
        seconds=float(resources.clock.max()),
        tokens=int(tokens[0]),
        gpus=gpus,
        memory_bytes=memory * every,
        usable_bytes=cluster.usable_bytes,
        computed=resources.computed,
        exposed=resources.exposed,
        gathering=np.zeros(gpus),
        bytes_sent=resources.sent,
        spans=tuple(resources.spans),
    )
