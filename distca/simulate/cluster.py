"""Clusters: GPUs in nodes, their rates, their memory, and the links between them.

Presets take their figures from published sources, which stand beside them. Your own machine is
`dataclasses.replace` of one, since `Cluster` is a plain value.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.cost.link import Links
from distca.cost.roofline import RooflineCost
from distca.cost.tiled import TiledCost
from distca.cost.volume import AttentionShape
from distca.json_files import read_text
from distca.plan.span import Floats, Int64s
from distca.simulate.charges import UNCHARGED, Charges
from distca.whole_file import write_text


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal nodes. Rates are those of one GPU, and of links in each direction.

    Attributes:
        name: title in tables.
        gpus_per_node: GPUs that share the fast links of a node.
        memory_gb: memory of a GPU, gigabytes (10^9).
        reserved_gb: memory of a GPU that the driver, the libraries and fragments take.
        peak_tflops: dense 16-bit operations, 10^12 a second.
        linear_mfu: share of the peak that linear layers reach, with norms, activations and rotary
            embedding between them counted in.
        attention_tflops: rate of the attention kernel, forward, on long tasks.
        backward_over_forward: seconds of the attention kernel's backward pass over its forward.
        node_gb_per_s: speed between two GPUs of a node.
        network_gb_per_s: speed between nodes.
        node_latency: seconds until a message within a node begins to arrive.
        network_latency: seconds until a message between nodes begins to arrive.
        copy_gb_per_s: memory traffic, read and written, when rows are copied before and after an
            exchange and around kernels.
        launch_seconds: overhead of every kernel call of core attention, and of every exchange.
        multiprocessors: multiprocessors of a GPU.
        charges: what keeps links, memory and compute from these rates.
        source: origin of the figures.

    Raises:
        ValueError: a value is out of range.
    """

    name: str
    gpus_per_node: int
    memory_gb: float
    peak_tflops: float
    attention_tflops: float
    node_gb_per_s: float
    network_gb_per_s: float
    copy_gb_per_s: float
    reserved_gb: float = 4.0
    linear_mfu: float = 0.5
    backward_over_forward: float = 2.9
    node_latency: float = 5e-6
    network_latency: float = 1.5e-5
    launch_seconds: float = 1e-5
    multiprocessors: int = 132
    charges: Charges = UNCHARGED
    source: str = ""

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise ValueError(f"a node needs at least one GPU, not {self.gpus_per_node}")
        if self.multiprocessors < 1:
            raise ValueError(f"a GPU needs at least 1 multiprocessor, not {self.multiprocessors}")
        may_be_zero = {"reserved_gb", "node_latency", "network_latency", "launch_seconds"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type != "float":
                continue
            allowed = math.isfinite(value) and value >= 0
            if not allowed or (value == 0 and field.name not in may_be_zero):
                raise ValueError(f"{self.name}: {field.name} is {value}: give a positive number")
        if self.linear_mfu > 1:
            raise ValueError(f"{self.name}: linear_mfu is {self.linear_mfu}: a part of the peak")

    def save(self, path: Path) -> None:
        """Writes a readable JSON file."""
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Cluster:
        """Reads a file that `save` wrote.

        Raises:
            ValueError: the file is missing, or describes no cluster.
        """
        text = read_text(path, "make a cluster with `distca verify --output`")
        try:
            saved = json.loads(text)
            return Cluster(**saved | {"charges": Charges(**saved["charges"])})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{path} describes no cluster ({error}): make it with `distca verify --output`"
            ) from error

    @property
    def usable_bytes(self) -> float:
        """Bytes of a GPU's memory that training may fill."""
        return (self.memory_gb - self.reserved_gb) * 1e9

    @property
    def node_bytes_per_second(self) -> float:
        """Speed that exchanges reach within a node."""
        return self.node_gb_per_s * self.charges.link_efficiency * 1e9

    @property
    def network_bytes_per_second(self) -> float:
        """Speed that exchanges reach between nodes."""
        return self.network_gb_per_s * self.charges.link_efficiency * 1e9

    @property
    def copied_bytes_per_second(self) -> float:
        """Speed that copies reach, read and written bytes together."""
        return self.copy_gb_per_s * self.charges.copy_efficiency * 1e9

    def traffic_seconds(self, nbytes: Int64s) -> Floats:
        """Returns the seconds in which a GPU copies rows, by the bytes that it reads and writes."""
        return nbytes.astype(np.float64) / self.copied_bytes_per_second

    def servers_per_node(self, tensor_parallel: int) -> int:
        """Returns the number of tensor-parallel groups in a node; each is one attention server.

        Raises:
            ValueError: the groups don't divide a node.
        """
        if tensor_parallel < 1 or self.gpus_per_node % tensor_parallel:
            raise ValueError(
                f"tensor-parallel size {tensor_parallel} does not divide the {self.gpus_per_node} "
                "GPUs of a node"
            )
        return self.gpus_per_node // tensor_parallel

    def links(self, server_gpus: int) -> Links:
        """Links between the servers, at the speeds that exchanges reach.

        Args:
            server_gpus: GPUs of a server: a divisor of a node's, or whole nodes. Each GPU exchanges
                with those that have the same heads, one in each server.

        Raises:
            ValueError: a server begins or ends inside a node that it shares.
        """
        efficiency = self.charges.link_efficiency
        whole_nodes = server_gpus % self.gpus_per_node == 0
        return Links(
            1 if whole_nodes else self.servers_per_node(server_gpus),
            self.node_gb_per_s * efficiency,
            self.network_gb_per_s * efficiency,
        )

    def ring(self, members: int, servers: int, tensor_parallel: int) -> tuple[float, float]:
        """Speed and latency of a collective in rings over groups of consecutive servers.

        A group in several nodes has as many rings through the network as it has members on the node
        where it has fewest, since each member has a network link of its own.

        Args:
            members: servers of each group.
            servers: servers of all groups together; a multiple of `members`.
            tensor_parallel: GPUs of a server.

        Returns:
            GB/s of all rings together, and seconds of a hop.
        """
        of_node = self.servers_per_node(tensor_parallel)
        efficiency = self.charges.link_efficiency
        if servers <= of_node or of_node % members == 0:
            return self.node_gb_per_s * efficiency, self.node_latency
        links = math.gcd(members, of_node)
        speed = min(links * self.network_gb_per_s, self.node_gb_per_s)
        return speed * efficiency, self.network_latency

    def attention_cost(self, shape: AttentionShape) -> CostModel:
        """Forward seconds of core-attention tasks on one GPU."""
        return TiledCost.of_shape(shape, self.attention_tflops * 1e12, self.name)

    def inference_cost(self, shape: AttentionShape, cache_efficiency: float = 1.0) -> CostModel:
        """Returns the seconds of core-attention tasks on one GPU where some have few queries.

        Args:
            shape: heads of the GPU.
            cache_efficiency: share of the memory's speed at which such tasks read.
        """
        flops = self.attention_tflops * 1e12
        memory = self.copied_bytes_per_second * cache_efficiency
        return RooflineCost.of_shape(shape, flops, memory, self.name)


# Peaks, memories, NVLink and network speeds: NVIDIA's data sheets of DGX A100 (80 GB), DGX H100 and
# DGX H200; NVLink's total of both directions is halved. Memories are what such a GPU reports, in
# 10^9 bytes: 80 GB are nearly 80 * 2**30, the H200's 141 GB about 139 * 2**30. The 50% of linear
# layers is the assumption of the paper's Appendix A. Attention: FlashAttention-2 reaches 73% of an
# A100's peak forward and 63% backward, with 2.5 times the operations (Dao, 2023); on H100 it
# reaches 35% of the peak (Shah et al., 2024), which agrees with published times of 32K and 64K
# tokens (339 and 341 TFLOP/s). FlashAttention-3's rates are up to twice as high.
# Blackwell: NVIDIA's data sheets of DGX B200 (1,440 GB, 64 TB/s and 14.4 TB/s of NVLink for 8 GPUs)
# and GB200 NVL72 (13.4 TB, 576 TB/s, 130 TB/s for 72, which are one NVLink domain and so a node
# here), peaks halved where they are with sparsity. Attention: FlashAttention-4 reaches 1,613
# TFLOP/s on B200, 1.3 times cuDNN 9.13 (its abstract); taken is cuDNN's, for both. H20: NVIDIA's
# figures as its vendors print them (148 TFLOP/s, 96 GB, 4 TB/s, NVLink 900 GB/s, 78
# multiprocessors); no rate of attention is published, so FlashAttention-2's share of an A100's peak
# is taken, and the network of DGX H100. Their memories are those of the data sheets.
_BACKWARD = 2.5 * 0.73 / 0.63
CLUSTERS = {
    "dgx-h100": Cluster(
        "dgx-h100",
        gpus_per_node=8,
        memory_gb=85.0,
        peak_tflops=990.0,
        attention_tflops=340.0,
        node_gb_per_s=450.0,
        network_gb_per_s=50.0,
        copy_gb_per_s=3350.0,
        backward_over_forward=_BACKWARD,
        source="NVIDIA DGX H100 data sheet; DistCA paper, Appendix A; FlashAttention-3, Section 1",
    ),
    "dgx-h200": Cluster(
        "dgx-h200",
        gpus_per_node=8,
        memory_gb=149.0,
        peak_tflops=990.0,
        attention_tflops=340.0,
        node_gb_per_s=450.0,
        network_gb_per_s=50.0,
        copy_gb_per_s=4800.0,
        backward_over_forward=_BACKWARD,
        source="NVIDIA DGX H200 data sheet; DistCA paper, Appendix A; FlashAttention-3, Section 1",
    ),
    "dgx-a100": Cluster(
        "dgx-a100",
        gpus_per_node=8,
        memory_gb=85.0,
        peak_tflops=312.0,
        attention_tflops=228.0,
        node_gb_per_s=300.0,
        network_gb_per_s=25.0,
        copy_gb_per_s=2039.0,
        multiprocessors=108,
        backward_over_forward=_BACKWARD,
        source="NVIDIA DGX A100 data sheet; FlashAttention-2, Section 4",
    ),
    "dgx-b200": Cluster(
        "dgx-b200",
        gpus_per_node=8,
        memory_gb=180.0,
        peak_tflops=2250.0,
        attention_tflops=1240.0,
        node_gb_per_s=900.0,
        network_gb_per_s=50.0,
        copy_gb_per_s=8000.0,
        multiprocessors=148,
        backward_over_forward=_BACKWARD,
        source="NVIDIA DGX B200 data sheet; FlashAttention-4, abstract",
    ),
    "gb200-nvl72": Cluster(
        "gb200-nvl72",
        gpus_per_node=72,
        memory_gb=186.0,
        peak_tflops=2500.0,
        attention_tflops=1240.0,
        node_gb_per_s=900.0,
        network_gb_per_s=50.0,
        copy_gb_per_s=8000.0,
        multiprocessors=148,
        backward_over_forward=_BACKWARD,
        source="NVIDIA GB200 NVL72 data sheet; FlashAttention-4, abstract",
    ),
    "hgx-h20": Cluster(
        "hgx-h20",
        gpus_per_node=8,
        memory_gb=96.0,
        peak_tflops=148.0,
        attention_tflops=108.0,
        node_gb_per_s=450.0,
        network_gb_per_s=50.0,
        copy_gb_per_s=4000.0,
        multiprocessors=78,
        backward_over_forward=_BACKWARD,
        source="NVIDIA HGX H20 specifications; FlashAttention-2, Section 4, by its share of A100",
    ),
}

_CLUSTERS_OF_GPUS = {
    "NVIDIA A100-SXM4-80GB": "dgx-a100",
    "NVIDIA H100 80GB HBM3": "dgx-h100",
    "NVIDIA H200": "dgx-h200",
}
"""Cluster with the GPUs that CUDA calls so."""


def peak_tflops(gpu: str) -> float | None:
    """Returns the dense 16-bit operations of a GPU, 10^12 a second; None where they are not known.

    Args:
        gpu: CUDA's name of it.
    """
    name = _CLUSTERS_OF_GPUS.get(gpu)
    return None if name is None else CLUSTERS[name].peak_tflops
