"""Seconds and bytes of keys and values that move after a prefill, on a described cluster."""

from __future__ import annotations

import numpy as np

from distca.plan.span import Floats
from distca.schedule.serving.restripe import Restripe
from distca.simulate.resources import Resources, Transfer
from distca.simulate.serving.costs import InferenceCosts


def simulate_restripe(move: Restripe, costs: InferenceCosts) -> tuple[float, int]:
    """Simulates a move, layer by layer: rows of one travel while those before are written.

    Args:
        move: who holds which rows before and after.
        costs: costs of the model on its cluster.

    Returns:
        Seconds until the last rank has all rows, and the bytes that all GPUs send.
    """
    ranks, cluster = move.before.world_size, costs.cluster
    messages = move.messages(costs.shape)
    transfer = Transfer.of_messages(messages, costs.links)
    sent, received = messages.sent(), messages.received()
    resources = Resources(ranks, cluster, np.ones(ranks))
    arrives: Floats | None = None
    for layer in range(costs.model.layers + 1):
        started: Floats | None = None
        if layer < costs.model.layers:
            launch = cluster.launch_seconds * (sent > 0)
            resources.compute(resources.copy_seconds(sent) + launch, "restripe", "exchange")
            started = resources.exchange(transfer, "restripe")
        if arrives is not None:
            resources.wait(arrives, "wait for rows")
            resources.compute(resources.copy_seconds(received))
        arrives = started
    nbytes = int(resources.sent["restripe"].sum()) * costs.tensor_parallel
    return float(resources.clock.max()), nbytes
