"""Seconds and bytes of blocks that move between ranks, on a described cluster."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.cost.volume import Messages
from distca.plan.span import Floats
from distca.schedule.serving.moves import BlockTransfer
from distca.simulate.resources import Resources, Transfer
from distca.simulate.serving.costs import InferenceCosts


def simulate_block_moves(
    moves: Sequence[BlockTransfer], block_size: int, ranks: int, costs: InferenceCosts
) -> tuple[float, int]:
    """Simulates moves, layer by layer: rows of one travel while those before are written.

    Args:
        moves: blocks that change their ranks, at least one.
        block_size: tokens of a block.
        ranks: number of ranks.
        costs: costs of the model on its cluster.

    Returns:
        Seconds until the last rank has all rows, and the bytes that all GPUs send.
    """
    pairs, counts = np.unique(
        [(each.source.rank, each.to.rank) for each in moves], axis=0, return_counts=True
    )
    nbytes = counts * block_size * costs.shape.kv_row_bytes
    source, to = pairs.T.astype(np.int64)
    messages = Messages(source, to, nbytes, ranks)
    transfer = Transfer.of_messages(messages, costs.links)
    sent, received = messages.sent(), messages.received()
    cluster = costs.cluster
    resources = Resources(ranks, cluster, np.ones(ranks))
    arrives: Floats | None = None
    for layer in range(costs.model.layers + 1):
        started: Floats | None = None
        if layer < costs.model.layers:
            launch = cluster.launch_seconds * (sent > 0)
            resources.compute(resources.copy_seconds(sent) + launch, "move blocks", "exchange")
            started = resources.exchange(transfer, "move blocks")
        if arrives is not None:
            resources.wait(arrives, "wait for blocks")
            resources.compute(resources.copy_seconds(received))
        arrives = started
    of_all = int(resources.sent["move blocks"].sum()) * costs.tensor_parallel
    return float(resources.clock.max()), of_all
