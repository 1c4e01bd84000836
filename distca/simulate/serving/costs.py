"""Costs of a transformer's layers in inference: forward alone, on many tokens or on few.

Linear layers take the longer of their products and of reading their weights, which is what few
tokens wait for. Tensor parallelism adds four collectives of a layer's activations, as in training.
It may span nodes here, and then goes through as many rings as a node has links. Where there are
fewer key-value heads than tensor-parallel ranks, ranks hold copies. What each layer and collective
costs beside its work is `Overheads`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.cost.link import Links
from distca.cost.model_sizes import ModelSize
from distca.cost.volume import AttentionShape
from distca.plan.span import Floats, Int64s
from distca.simulate.cluster import Cluster
from distca.simulate.costs import TENSOR_COLLECTIVES
from distca.simulate.serving.overheads import NO_OVERHEADS, Overheads
from distca.simulate.serving.spent import COLLECTIVES, LAUNCHES, LINEAR

_Numbers = TypeVar("_Numbers", float, Floats)


@dataclass(frozen=True)
class InferenceCosts:
    """Costs of a model's parts.

    Attributes:
        model: sizes of the model.
        cluster: GPUs and links that the model runs on.
        tensor_parallel: GPUs that share each layer: a part of a node, or whole nodes.
        dtype_bytes: bytes of an activation, and of a weight outside of the MLP.
        mlp_dtype_bytes: bytes of a weight of the MLP; 1: products of 8 bits, at twice the rate.
        overheads: what iterations cost beside their work.
        decode_overheads: the same of iterations that only decode, which CUDA graphs may launch;
            None: `overheads`.

    Raises:
        ValueError: the sizes don't divide each other.
    """

    model: ModelSize
    cluster: Cluster
    tensor_parallel: int = 1
    dtype_bytes: int = 2
    mlp_dtype_bytes: int = 2
    overheads: Overheads = NO_OVERHEADS
    decode_overheads: Overheads | None = None

    def __post_init__(self) -> None:
        size, of_node = self.tensor_parallel, self.cluster.gpus_per_node
        if size < 1 or (of_node % size and size % of_node):
            raise ValueError(
                f"tensor-parallel size {size}: give a divisor or a multiple of the {of_node} GPUs "
                "of a node"
            )
        kv_heads = self.model.kv_heads
        if self.model.heads % size or (kv_heads % size and size % kv_heads):
            raise ValueError(
                f"tensor-parallel size {size} does not divide {self.model.heads} heads, or neither "
                f"divides {kv_heads} key-value heads nor is a multiple of them"
            )

    def of_decode(self) -> InferenceCosts:
        """Returns the costs of iterations that only decode."""
        if self.decode_overheads is None:
            return self
        return replace(self, overheads=self.decode_overheads, decode_overheads=None)

    def attention_cost(self) -> CostModel:
        """Returns the seconds of core-attention tasks on one GPU, by the cluster's rates."""
        return self.cluster.inference_cost(self.shape, self.overheads.cache_efficiency)

    @property
    def shape(self) -> AttentionShape:
        """The attention heads of one GPU."""
        model, size = self.model, self.tensor_parallel
        kv_heads = max(model.kv_heads // size, 1)
        return AttentionShape(model.heads // size, kv_heads, model.head_dim, self.dtype_bytes)

    @property
    def links(self) -> Links:
        """Links between ranks: messages of a rank's GPUs go at the speed of each one's link."""
        cluster = self.cluster
        speeds = cluster.node_bytes_per_second / 1e9, cluster.network_bytes_per_second / 1e9
        return Links(max(cluster.gpus_per_node // self.tensor_parallel, 1), *speeds)

    def bytes_per_second(self, ranks: int) -> float:
        """Speed of a GPU's link on the slowest way between that many ranks."""
        inside = ranks <= self.links.ranks_per_node
        return (self.links.node_gb_per_s if inside else self.links.network_gb_per_s) * 1e9

    def pre_seconds(self, tokens: Int64s) -> Floats:
        """Returns the seconds of a layer before core attention, for the tokens of each rank,
        `[ranks]`."""
        return _total(self.pre_parts(tokens))

    def post_seconds(self, tokens: Int64s) -> Floats:
        """Returns the seconds of a layer after core attention, likewise."""
        return _total(self.post_parts(tokens))

    def pre_parts(self, tokens: Int64s) -> dict[str, Floats]:
        """Returns the parts of `pre_seconds`, by their names in `distca.simulate.serving.spent`."""
        parts = self._parts(tokens, self.model.pre_parameters, 0, TENSOR_COLLECTIVES["pre"])
        # The gaps of the whole layer are charged here, once.
        return parts | {LAUNCHES: np.where(tokens > 0, self.overheads.layer_seconds, 0.0)}

    def post_parts(self, tokens: Int64s) -> dict[str, Floats]:
        """Returns the parts of `post_seconds`, likewise."""
        model = self.model
        projection = model.post_parameters - model.mlp_parameters
        collectives = TENSOR_COLLECTIVES["projection"] + TENSOR_COLLECTIVES["mlp"]
        read = self._mlp_read(tokens)
        return self._parts(tokens, projection, model.mlp_parameters, collectives, read)

    def block_seconds(self, tokens: Int64s) -> tuple[Floats, Floats, Floats]:
        """Returns the seconds of a layer's projections to queries, keys and values, of that of
        outputs, and of its MLP, each without collectives, likewise."""
        model = self.model
        outputs = model.post_parameters - model.mlp_parameters
        return (
            self._linear(tokens, model.pre_parameters, 0, 0),
            self._linear(tokens, outputs, 0, 0),
            self._linear(tokens, 0, model.mlp_parameters, 0, self._mlp_read(tokens)),
        )

    def _mlp_read(self, tokens: Int64s) -> Floats:
        """Parameters of MLPs that all tokens of a rank together use, `[ranks]`."""
        model, read = self.model, np.full(tokens.shape, float(self.model.mlp_parameters))
        if experts := model.experts:
            # Few tokens choose other experts each.
            used = np.minimum(tokens * experts.chosen, experts.number)
            shared = 3 * model.hidden_size * model.ffn_hidden_size
            read = shared + used / experts.number * model.expert_parameters
        return read

    def head_seconds(self, tokens: Int64s) -> Floats:
        """Returns the seconds of the output layer, for the tokens whose logits each rank needs,
        `[ranks]`."""
        return _total(self.head_parts(tokens))

    def head_parts(self, tokens: Int64s) -> dict[str, Floats]:
        """Returns the parts of `head_seconds`, by their names."""
        return self._parts(tokens, self.model.vocabulary_parameters, 0, 1)

    def _linear(
        self,
        tokens: Int64s,
        parameters: int,
        of_mlp: int,
        collectives: int,
        of_mlp_read: Floats | float = 0.0,
    ) -> Floats:
        """Returns the seconds of linear layers, as the parts of `_parts` add up."""
        return _total(self._parts(tokens, parameters, of_mlp, collectives, of_mlp_read))

    def _parts(
        self,
        tokens: Int64s,
        parameters: int,
        of_mlp: int,
        collectives: int,
        of_mlp_read: Floats | float = 0.0,
    ) -> dict[str, Floats]:
        """Returns the seconds of linear layers and of their collectives for the tokens of each
        rank, `[ranks]`.

        Args:
            tokens: tokens of each rank, `[ranks]`.
            parameters: parameters that a token uses, but for those of MLPs.
            of_mlp: parameters of MLPs that a token uses.
            collectives: collectives of tensor parallelism.
            of_mlp_read: parameters of MLPs that all tokens of a rank together use, `[ranks]`.
        """
        cluster, size = self.cluster, self.tensor_parallel
        rate = cluster.peak_tflops * 1e12 * cluster.linear_mfu * size
        products = 2.0 * (parameters + of_mlp * self.mlp_dtype_bytes / 2) * tokens / rate
        read = cluster.copied_bytes_per_second * self.overheads.weight_efficiency
        weights = self._weight_bytes(parameters, np.asarray(of_mlp_read)) / read
        # No rank waits for weights that it does not use.
        return {
            LINEAR: np.where(tokens > 0, np.maximum(products, weights), 0.0),
            COLLECTIVES: np.where(tokens > 0, collectives * self._collective(tokens), 0.0),
        }

    def _collective(self, tokens: Int64s) -> Floats:
        """Returns the seconds of an all-gather or a reduce-scatter of activations, `[ranks]`."""
        size = self.tensor_parallel
        if size == 1:
            return np.zeros(len(tokens))
        speed, latency = self.cluster.ring(size, size, 1)
        latency += self.collective_overhead()
        row = self.model.hidden_size * self.dtype_bytes * (size - 1) / size
        return tokens.astype(np.float64) * (row / (speed * 1e9)) + latency

    def collective_overhead(self) -> float:
        """Returns the seconds of a collective of the tensor-parallel GPUs beside its bytes and
        latency."""
        nodes = max(self.tensor_parallel // self.cluster.gpus_per_node, 1)
        return self.overheads.of_collective(nodes)

    def launch_seconds(self) -> float:
        """Returns the seconds in which a host launches a layer, and its collectives end."""
        number = sum(TENSOR_COLLECTIVES.values()) * (self.tensor_parallel > 1)
        return self.overheads.host_layer_seconds + number * self.collective_overhead()

    def _weight_bytes(self, parameters: int, of_mlp: _Numbers) -> _Numbers:
        """Returns the bytes of weights on each GPU."""
        nbytes = parameters * self.dtype_bytes + of_mlp * self.mlp_dtype_bytes
        return nbytes / self.tensor_parallel

    def state_bytes(self) -> float:
        """Returns the bytes of all weights on each GPU."""
        model = self.model
        beside = model.layer_parameters - model.mlp_parameters
        of_mlp = model.dense_layer_parameters - beside + model.expert_parameters
        layer = self._weight_bytes(beside, of_mlp)
        return model.layers * layer + self._weight_bytes(2 * model.vocabulary_parameters, 0)


def _total(parts: dict[str, Floats]) -> Floats:
    """Returns the sum of all parts, `[ranks]`."""
    total: Floats = np.sum([*parts.values()], axis=0)
    return total
