"""Links between ranks: where they are, and seconds for bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.cost.volume import Messages, PlanBytes
from distca.plan.mask import IntOrArray
from distca.plan.span import Bools, Floats, Int64s


@dataclass(frozen=True)
class Links:
    """Ranks in nodes, and nodes in racks: fast links inside a node, and one link to the network for
    each rank, through which bytes for other racks go, too.

    Both are full duplex: a rank sends and receives at the same time, inside the node and outside.

    Attributes:
        ranks_per_node: ranks of a node: `[0, ranks_per_node)` share the first node, and so on.
            Ranks are attention servers of one tensor-parallel index, so with as many
            tensor-parallel ranks as a node has GPUs this is 1.
        node_gb_per_s: gigabytes (10^9) a second and direction between two ranks of a node; the
            default is NVLink's of an H100.
        network_gb_per_s: gigabytes a second and direction between two ranks of different nodes;
            the default is the paper's 50 GB/s a GPU.
        nodes_per_rack: nodes of a rack, numbered like the ranks of a node; None: one rack has all.
        rack_gb_per_s: gigabytes a second and direction between two ranks of different racks;
            None: as between nodes.

    Raises:
        ValueError: a value is not positive.
    """

    ranks_per_node: int = 1
    node_gb_per_s: float = 450.0
    network_gb_per_s: float = 50.0
    nodes_per_rack: int | None = None
    rack_gb_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"a node needs at least one rank, not {self.ranks_per_node}")
        if not (0 < self.node_gb_per_s < np.inf and 0 < self.network_gb_per_s < np.inf):
            raise ValueError(
                f"link speeds must be positive: {self.node_gb_per_s} GB/s within a node, "
                f"{self.network_gb_per_s} GB/s between nodes"
            )
        if self.nodes_per_rack is not None and self.nodes_per_rack < 1:
            raise ValueError(f"a rack needs at least one node, not {self.nodes_per_rack}")
        if self.rack_gb_per_s is not None and not 0 < self.rack_gb_per_s < np.inf:
            raise ValueError(f"link speeds must be positive: {self.rack_gb_per_s} GB/s of racks")

    def node(self, rank: IntOrArray) -> IntOrArray:
        """Returns the node that each rank is on."""
        return rank // self.ranks_per_node

    def rack(self, rank: IntOrArray) -> IntOrArray:
        """Returns the rack that each rank is in."""
        if self.nodes_per_rack is None:
            return 0 * rank
        return rank // (self.ranks_per_node * self.nodes_per_rack)

    def gb_per_s(self, source: Int64s, destination: Int64s) -> Floats:
        """Gigabytes a second and direction between pairs of different ranks, `[pairs]`."""
        racks = self.network_gb_per_s if self.rack_gb_per_s is None else self.rack_gb_per_s
        apart = np.where(self.rack(source) == self.rack(destination), self.network_gb_per_s, racks)
        return np.where(self.node(source) == self.node(destination), self.node_gb_per_s, apart)

    def seconds_per_byte(self, source: int, destination: int) -> float:
        """Returns the seconds for a byte between two different ranks: `gb_per_s` of a single pair.

        Planning asks very often, and NumPy is slow for single numbers.
        """
        of_node = self.ranks_per_node
        if source // of_node == destination // of_node:
            return 1e-9 / self.node_gb_per_s
        if self.rack_gb_per_s is None or self.rack(source) == self.rack(destination):
            return 1e-9 / self.network_gb_per_s
        return 1e-9 / self.rack_gb_per_s

    def busy_seconds(self, moved: PlanBytes) -> Floats:
        """Returns the seconds that each rank's links are busy with a layer's bytes, float64
        `[world_size]`.

        Sending, receiving and the two kinds of links overlap, so the slowest of these
        four counts. Phases follow each other, so their seconds add up.
        """
        busy = np.zeros(next(iter(moved.messages.values())).world_size)
        for messages in moved.messages.values():
            apart = self._apart(messages)
            seconds = messages.sizes * 1e-9 / self.gb_per_s(messages.source, messages.destination)
            ports = np.zeros((4, len(busy)))
            np.add.at(ports, (2 * apart, messages.source), seconds)
            np.add.at(ports, (2 * apart + 1, messages.destination), seconds)
            busy += ports.max(axis=0)
        return busy

    def between_nodes(self, moved: PlanBytes) -> int:
        """Returns the bytes that leave a node."""
        return sum(int(m.sizes[self._apart(m)].sum()) for m in moved.messages.values())

    def _apart(self, messages: Messages) -> Bools:
        """Tells which pairs of ranks are on different nodes, bool `[pairs]`."""
        apart: Bools = self.node(messages.source) != self.node(messages.destination)
        return apart
