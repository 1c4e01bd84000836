"""Costs of a transformer's layers in inference: forward alone, on many tokens or on few.

Linear layers take the longer of their products and of reading their weights, which is what few
tokens wait for. Tensor parallelism adds four collectives of a layer's activations, as in training.
It may span nodes here, and then goes through as many rings as a node has links. Where there are
fewer key-value heads than tensor-parallel ranks, ranks hold copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from distca.cost.link import Links
from distca.cost.model_sizes import ModelSize
from distca.cost.volume import AttentionShape
from distca.plan.span import Floats, Int64s
from distca.simulate.cluster import Cluster
from distca.simulate.costs import TENSOR_COLLECTIVES

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

    Raises:
        ValueError: the sizes don't divide each other.
    """

    model: ModelSize
    cluster: Cluster
    tensor_parallel: int = 1
    dtype_bytes: int = 2
    mlp_dtype_bytes: int = 2

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
        return self._linear(tokens, self.model.pre_parameters, 0, TENSOR_COLLECTIVES["pre"])

    def post_seconds(self, tokens: Int64s) -> Floats:
        """Returns the seconds of a layer after core attention, likewise."""
        model = self.model
        projection = model.post_parameters - model.mlp_parameters
        collectives = TENSOR_COLLECTIVES["projection"] + TENSOR_COLLECTIVES["mlp"]
        read = self._mlp_read(tokens)
        return self._linear(tokens, projection, model.mlp_parameters, collectives, read)

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
        return self._linear(tokens, self.model.vocabulary_parameters, 0, 1)

    def _linear(
        self,
        tokens: Int64s,
        parameters: int,
        of_mlp: int,
        collectives: int,
        of_mlp_read: Floats | float = 0.0,
    ) -> Floats:
        """Returns the seconds of linear layers for the tokens of each rank, `[ranks]`.

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
        weights = (
            self._weight_bytes(parameters, np.asarray(of_mlp_read))
            / cluster.copied_bytes_per_second
        )
        seconds = np.maximum(products, weights) + collectives * self._collective(tokens)
        # No rank waits for weights that it does not use.
        return np.where(tokens > 0, seconds, 0.0)

    def _collective(self, tokens: Int64s) -> Floats:
        """Returns the seconds of an all-gather or a reduce-scatter of activations, `[ranks]`."""
        size = self.tensor_parallel
        if size == 1:
            return np.zeros(len(tokens))
        speed, latency = self.cluster.ring(size, size, 1)
        row = self.model.hidden_size * self.dtype_bytes * (size - 1) / size
        return tokens.astype(np.float64) * (row / (speed * 1e9)) + latency

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
