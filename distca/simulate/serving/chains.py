"""Searched partitions of a prefill over a chain of ranks, on a described machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.plan import BLOCK
from distca.schedule.serving.partitions import (
    PartitionTable,
    Shares,
    even_shares,
    search_partition,
)
from distca.simulate.costs import TENSOR_COLLECTIVES
from distca.simulate.serving.costs import InferenceCosts
from distca.simulate.serving.overheads import NO_OVERHEADS
from distca.simulate.serving.prefill_chain import ChainCosts

_MANY = 8192
"""Tokens at which rates are taken: launches and short tiles count for little."""


def chain_costs(
    costs: InferenceCosts, cost_model: CostModel, ranks: int, cached: int = 0
) -> ChainCosts:
    """Returns the costs of a chain of a model's ranks, by rates that hold for many tokens.

    Args:
        costs: costs of the model's layers.
        cost_model: seconds of tasks with the heads of a GPU.
        ranks: ranks of the chain.
        cached: tokens before the new ones, all of which these see.
    """
    layers, cluster, of = costs.model.layers, costs.cluster, costs.overheads
    tokens = np.array([_MANY], dtype=np.int64)
    # What does not grow with tokens is charged for each layer, not for each token.
    collectives = sum(TENSOR_COLLECTIVES.values()) * (costs.tensor_parallel > 1)
    fixed = of.layer_seconds + collectives * costs.collective_overhead()
    growing = replace(costs, overheads=NO_OVERHEADS)
    pre, post = (
        float(each[0]) / _MANY
        for each in (growing.pre_seconds(tokens), growing.post_seconds(tokens))
    )
    product = float(cost_model.seconds(tokens, tokens, tokens * tokens)[0]) / _MANY**2
    together = costs.links.ranks_per_node
    speeds = tuple(
        (
            cluster.node_bytes_per_second
            if rank // together == (rank + 1) // together
            else cluster.network_bytes_per_second
        )
        / 1e9
        for rank in range(ranks - 1)
    )
    return ChainCosts(
        token_seconds=layers * (pre + post + product * cached),
        product_seconds=layers * product,
        layers=layers,
        kv_bytes=float(costs.shape.kv_row_bytes),
        gb_per_s=speeds,
        before_attention=pre / (pre + post + product * cached),
        latency=cluster.node_latency if ranks <= together else cluster.network_latency,
        causal=True,
        overheads=replace(of, layer_seconds=fixed, host_layer_seconds=costs.launch_seconds()),
    )


def searched_table(
    lengths: Iterable[int],
    costs: InferenceCosts,
    cost_model: CostModel,
    ranks: int,
) -> PartitionTable:
    """Searches the partitions of several lengths, of no model and no hardware in particular."""
    found = {each: searched_shares(each, costs, cost_model, ranks) for each in {*lengths}}
    return PartitionTable("", "", ranks, found)


def searched_shares(
    tokens: int, costs: InferenceCosts, cost_model: CostModel, ranks: int, cached: int = 0
) -> Shares:
    """Searches the partition of new tokens with the earliest first token (KVR-S).

    Args:
        tokens: new tokens; of fewer than ranks the parts are even.
        costs, cost_model, ranks, cached: as for `chain_costs`.
    """
    if tokens < ranks:
        return even_shares(ranks)
    chain = chain_costs(costs, cost_model, ranks, cached)
    finest = BLOCK if tokens >= 16 * ranks * BLOCK else 1
    parts = search_partition(tokens, ranks, chain.chain_seconds, finest)
    return tuple(float(part) / tokens for part in parts)
