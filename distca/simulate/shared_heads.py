"""What it costs with `--distca` that neighbouring ranks share heads: `distca.runtime.shared_heads`.

In a pass of core attention a rank sends its queries, keys and values in one all-to-all, and
receives its outputs in another; in the backward pass the gradients of both. Nothing hides them.
Rows are copied before and after each. Ranks that share heads lie in one node or in whole nodes.
Between nodes rows go through the network, while others go inside a node. Peers' all-to-alls
(`distca.simulate.sharing`) send three tensors one by one, and outputs once more in the backward
pass, as Transformer Engine does.
"""

from __future__ import annotations

from dataclasses import dataclass

from distca.simulate.costs import ModelCosts

_EXCHANGES = 2
"""All-to-alls of a pass."""


@dataclass(frozen=True)
class SharedHeadCosts:
    """Costs of a pass of core attention, forward or backward, on a rank.

    Attributes:
        seconds: seconds for each of the rank's tokens.
        launch_seconds: seconds that don't grow with tokens.
        sent: bytes that the rank sends for each of its tokens.
    """

    seconds: float = 0.0
    launch_seconds: float = 0.0
    sent: int = 0

    @classmethod
    def of(cls, costs: ModelCosts) -> SharedHeadCosts:
        """Returns the costs of a model on a cluster."""
        size, cluster = costs.head_parallel, costs.cluster
        if size == 1:
            return cls()
        each = costs.shape.token_bytes
        inside = min(size, cluster.servers_per_node(costs.tensor_parallel))
        exchange = max(
            (inside - 1) * each / cluster.node_bytes_per_second,
            (size - inside) * each / cluster.network_bytes_per_second,
        )
        # Before and after an all-to-all all rows are read and written.
        copying = 4 * size * each / cluster.copied_bytes_per_second
        latency = cluster.node_latency if size == inside else cluster.network_latency
        launch = cluster.launch_seconds + latency
        return cls(exchange + copying, _EXCHANGES * launch, (size - 1) * each)
