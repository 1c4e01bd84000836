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
from distca.plan.span import Floats, Int64s
from distca.schedule.serving.csps.layouts import LayoutChoice, SharedRows, SplitLayer, SplitModel
from distca.simulate.outcome import Outcome
from distca.simulate.resources import Transfer
from distca.simulate.serving.costs import InferenceCosts
from distca.simulate.serving.spent import (
    ATTENTION,
    COLLECTIVES,
    EXCHANGES,
    LAUNCHES,
    LINEAR,
    ServingResources,
)
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
    model, links = cost_model or costs.attention_cost(), gpu_links(costs)
    resources = ServingResources(gpus, cluster, np.ones(gpus), recording)
    every = np.ones(gpus)
    tokens = np.array([int(shared.rows.sum())])
    queries, outputs, mlp = (float(each[0]) * every for each in costs.block_seconds(tokens))
    steps = {id(plan): SteppedCosts(plan, costs.shape, model, links).steps for plan in plans}
    kernels = {
        key: {
            ATTENTION: sum(float(step.kernel_seconds[0]) for step in of) * every,
            LAUNCHES: sum(cluster.launch_seconds * int(step.kernel_calls[0]) for step in of) * every
            + costs.overheads.layer_seconds,
        }
        for key, of in steps.items()
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
            spent = {
                EXCHANGES: resources.copy_seconds(copied),
                LAUNCHES: np.where(copied > 0, cluster.launch_seconds, 0.0),
                COLLECTIVES: np.where(copied > 0, costs.collective_overhead(), 0.0),
            }
            resources.spend(spent, phase, "exchange")
            launched.append(spent[COLLECTIVES])
            resources.wait(resources.exchange(transfer, phase), f"wait for {phase}")

    of_attention = layer.attention_bytes(shared.layout, shared.rows)
    of_block = layer.block_bytes(shared.rows)
    resources.wait_for_host(resources.clock + costs.overheads.iteration_seconds)
    began, launched = resources.clock, list[Floats]()
    move("embeddings", layer.embedding_bytes(shared.rows), ["embeddings"])
    for number, plan in enumerate(plans):
        move("weights", of_attention, ["weights", "key weights", "all-gather"])
        resources.spend({LINEAR: queries}, "queries, keys and values", "ticks", layer=number)
        move("heads", of_attention, ["heads"])
        resources.spend(kernels[id(plan)], "core attention", "kernels", layer=number)
        move("outputs", of_attention, ["outputs"])
        resources.spend({LINEAR: outputs}, "outputs", "ticks", layer=number)
        move("sums", of_attention, ["reduce-scatter"])
        move("rows", of_block, ["all-gather"])
        resources.spend({LINEAR: mlp}, "MLP", "ticks", layer=number)
        move("sums of the MLP", of_block, ["reduce-scatter"])
        launched.append(every * costs.overheads.host_layer_seconds)
        resources.wait_for_host(began + np.sum(launched, axis=0))
    last = np.array([plans[0].plan.sequences])
    head = {part: float(each[0]) * every for part, each in costs.head_parts(last).items()}
    resources.spend(head, "output layer", "ticks")
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
        spent=resources.of_last(),
    )
