"""Links between ranks: seconds for bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from distca.cost.volume import Messages, PlanBytes
from distca.plan.span import Bools, Floats


@dataclass(frozen=True)
class Links:
    """Ranks in nodes: fast links inside a node, and one link to the network for each rank.

    Both are full duplex: a rank sends and receives at the same time, inside the node and outside.

    Attributes:
        ranks_per_node: ranks of a node: `[0, ranks_per_node)` share the first node, and so on.
            Ranks are attention servers of one tensor-parallel index, so with as many
            tensor-parallel ranks as a node has GPUs this is 1.
        node_gb_per_s: gigabytes (10^9) a second and direction between two ranks of a node; the
            default is NVLink's of an H100.
        network_gb_per_s: gigabytes a second and direction between two ranks of different nodes;
            the default is the paper's 50 GB/s a GPU.

    Raises:
        ValueError: a value is not positive.
    """

    ranks_per_node: int = 1
    node_gb_per_s: float = 450.0
    network_gb_per_s: float = 50.0

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"a node needs at least one rank, not {self.ranks_per_node}")
        if not (0 < self.node_gb_per_s < np.inf and 0 < self.network_gb_per_s < np.inf):
            raise ValueError(
                f"link speeds must be positive: {self.node_gb_per_s} GB/s within a node, "
                f"{self.network_gb_per_s} GB/s between nodes"
            )

    def seconds_per_byte(self, source: int, destination: int) -> float:
        """Seconds for a byte between two different ranks."""
        same = source // self.ranks_per_node == destination // self.ranks_per_node
        return 1e-9 / (self.node_gb_per_s if same else self.network_gb_per_s)

    def busy_seconds(self, moved: PlanBytes) -> Floats:
        """Seconds that each rank's links are busy with a layer's bytes, float64 `[world_size]`.

        Sending and receiving overlap, and so do the two kinds of links, so the slowest of these
        four counts. Phases follow each other, so their seconds add up.
        """
        busy = np.zeros(next(iter(moved.messages.values())).world_size)
        for messages in moved.messages.values():
            apart = self._apart(messages)
            outside = replace(messages, sizes=np.where(apart, messages.sizes, 0))
            inside = replace(messages, sizes=np.where(apart, 0, messages.sizes))
            busy += np.maximum.reduce(
                [
                    inside.sent() / self.node_gb_per_s,
                    inside.received() / self.node_gb_per_s,
                    outside.sent() / self.network_gb_per_s,
                    outside.received() / self.network_gb_per_s,
                ]
            )
        return busy * 1e-9

    def between_nodes(self, moved: PlanBytes) -> int:
        """Bytes that leave a node."""
        return sum(int(m.sizes[self._apart(m)].sum()) for m in moved.messages.values())

    def _apart(self, messages: Messages) -> Bools:
        """Tells which pairs of ranks are on different nodes, bool `[pairs]`."""
        size = self.ranks_per_node
        result: Bools = messages.source // size != messages.destination // size
        return result
