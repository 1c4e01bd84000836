"""Costs of a transformer's layers on a GPU of a tensor-parallel group: seconds and bytes.

Linear layers take their operations at the cluster's rate, and where half waves are charged, seconds
of each call that don't grow with its tokens. Tensor parallelism adds four collectives
of a layer's activations in each direction (two all-gathers and two reduce-scatters, with sequence
parallelism), one before core attention and three after.

Routed experts are whole on their GPUs (`--expert-tensor-parallel-size 1`) and get equally many
tokens. An all-to-all among the GPUs of `--expert-model-parallel-size` brings each token's row to
the experts that it chose, one more brings the results back, and nothing hides either, in all
systems; these GPUs wait for the slowest of them in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.cost.model_sizes import ModelSize
from distca.cost.training_memory import GRADIENT_BYTES, MemoryCosts, Recompute
from distca.cost.volume import AttentionShape
from distca.plan.span import Floats, Int64s
from distca.simulate.charges import half_wave_seconds
from distca.simulate.cluster import Cluster

TENSOR_COLLECTIVES = {"pre": 1, "projection": 1, "mlp": 2}


@dataclass(frozen=True)
class ModelCosts(MemoryCosts):
    """Costs of a model's parts.

    Attributes:
        model: sizes of the model.
        cluster: GPUs and links that the model runs on.
        tensor_parallel: GPUs that share each layer, within a node.
        dtype_bytes: bytes of an activation and of a weight.
        recompute: part of each layer that runs forward again.
        expert_parallel: neighbouring GPUs of a stage that share each layer's routed experts.
        sends_latents: whether latents travel to servers instead of keys and values, with
            `--distca`.
        head_parallel: neighbouring ranks that share the heads of core attention, with `--distca`.
    """

    model: ModelSize
    cluster: Cluster
    tensor_parallel: int = 1
    dtype_bytes: int = 2
    recompute: Recompute = "none"
    expert_parallel: int = 1
    sends_latents: bool = False
    head_parallel: int = 1

    @property
    def server_gpus(self) -> int:
        """GPUs of an attention server, which share heads."""
        return self.tensor_parallel * self.head_parallel

    @property
    def shape(self) -> AttentionShape:
        """The attention heads of one GPU."""
        return self.model.attention_shape(self.server_gpus, self.dtype_bytes)

    @property
    def comm_shape(self) -> AttentionShape:
        """The same heads, with what travels to servers for their keys and values."""
        if self.sends_latents:
            return self.model.latent_shape(self.tensor_parallel, self.dtype_bytes)
        return self.shape

    @property
    def _out_width(self) -> int:
        return self.model.heads * self.model.value_dim

    def _token_seconds(self, parameters: int, collectives: int) -> tuple[float, float]:
        """Returns the seconds of a token's linear layers and collectives, forward and backward."""
        cluster = self.cluster
        rate = cluster.peak_tflops * 1e12 * cluster.linear_mfu * self.tensor_parallel
        linear = 2.0 * parameters / rate
        others = (self.tensor_parallel - 1) / self.tensor_parallel
        row = self.model.hidden_size * self.dtype_bytes
        moved = collectives * others * row / cluster.node_bytes_per_second
        return linear + moved, 2 * linear + moved

    def pre_seconds(self) -> tuple[float, float]:
        """Returns the seconds of a token in a layer before core attention, forward and backward."""
        return self._token_seconds(self.model.pre_parameters, TENSOR_COLLECTIVES["pre"])

    def post_seconds(self) -> tuple[float, float]:
        """Returns the seconds of a token in a layer after core attention, forward and backward."""
        model = self.model
        projection = model.post_parameters - model.mlp_parameters
        projected = self._token_seconds(projection, TENSOR_COLLECTIVES["projection"])
        collectives = TENSOR_COLLECTIVES["mlp"] if model.ffn_hidden_size else 0
        mlp, mlp_backward = self._token_seconds(model.mlp_parameters, collectives)
        routed = self._routing_seconds()
        again = mlp + routed if self.recompute == "mlp" else 0.0
        return projected[0] + mlp + routed, again + projected[1] + mlp_backward + routed

    def layer_seconds(self) -> tuple[float, float]:
        """Returns the seconds of a token in a layer but for core attention, forward and
        backward."""
        pre, post = self.pre_seconds(), self.post_seconds()
        return pre[0] + post[0], pre[1] + post[1]

    def _routing_seconds(self) -> float:
        """Returns the seconds of a token of the all-to-alls that bring its rows to experts and
        back."""
        experts, size, cluster = self.model.experts, self.expert_parallel, self.cluster
        if experts is None:
            return 0.0
        row = self.model.hidden_size * self.dtype_bytes / self.tensor_parallel
        near = min(size, cluster.gpus_per_node)
        each = 2 * experts.chosen * row / size
        return max(
            (near - 1) * each / cluster.node_bytes_per_second,
            (size - near) * each / cluster.network_bytes_per_second,
        )

    @property
    def passes(self) -> Int64s:
        """How often layers run forward and backward, `[2]`."""
        return np.array([2 if self.recompute == "full" else 1, 1])

    def head_seconds(self) -> tuple[float, float]:
        """Returns the seconds of a token in the output layer, on the last stage, forward and
        backward."""
        return self._token_seconds(self.model.vocabulary_parameters, 1)

    def _half_waves(self, forward: float, backward: float) -> tuple[float, float]:
        """Returns the seconds of half a wave of matrix products, forward and to the inputs'
        gradients.

        The gradients of weights sum over tokens, which libraries split into as many parts as fill
        the GPU.
        """
        cluster = self.cluster
        if not cluster.charges.half_waves:
            return 0.0, 0.0
        rate = cluster.peak_tflops * 1e12 * cluster.linear_mfu
        many = cluster.multiprocessors
        return half_wave_seconds(forward, many, rate), half_wave_seconds(backward, many, rate)

    def pre_launch_seconds(self) -> tuple[float, float]:
        """Returns the seconds of a layer before core attention that don't grow with tokens, there
        and back."""
        products = self.model.pre_products
        outputs = (n / (self.tensor_parallel if shared else 1) for _, n, shared in products)
        return self._half_waves(sum(inputs for inputs, _, _ in products), sum(outputs))

    def post_launch_seconds(self) -> tuple[float, float]:
        """Returns the same as `pre_launch_seconds` after core attention: projection and two of the
        MLP."""
        hidden, ffn = self.model.hidden_size, self.model.ffn_hidden_size
        tp, experts = self.tensor_parallel, self.model.experts
        # Widths of what a GPU computes of a dense MLP, and of its routed experts in one call.
        widths = [ffn / tp] * (ffn > 0) + ([float(experts.ffn_hidden_size)] if experts else [])
        mlp = sum(hidden + width for width in widths)
        of_mlp = sum(2 * width + hidden for width in widths)
        forward, backward = self._half_waves(self._out_width / tp + mlp, hidden + of_mlp)
        again, _ = self._half_waves(mlp * (self.recompute == "mlp"), 0.0)
        return forward, again + backward

    def head_launch_seconds(self) -> tuple[float, float]:
        """Returns the same as `pre_launch_seconds` of the output layer."""
        return self._half_waves(
            self.model.hidden_size, self.model.vocab_size / self.tensor_parallel
        )

    def servers_with_all_experts(self, servers: int) -> int:
        """Neighbouring servers of a stage that share each layer's routed experts; 1: none do.

        Args:
            servers: servers of a stage. Where groups of them do not divide, all count as one.
        """
        number = min(max(self.expert_parallel // self.server_gpus, 1), servers)
        return servers if servers % number else number

    def _expert_bytes_per_second(self, copies: int, gpus: int) -> float:
        """Speed of the rings among GPUs with the same experts, which lie `expert_parallel` apart.

        Args:
            copies: GPUs with the same experts.
            gpus: GPUs of all stages.
        """
        cluster = self.cluster
        inside = max(cluster.gpus_per_node // self.expert_parallel, 1)
        if gpus <= cluster.gpus_per_node or inside % copies == 0:
            return cluster.node_bytes_per_second
        return min(inside * cluster.network_bytes_per_second, cluster.node_bytes_per_second)

    def gradient_seconds(self, stage: int, stages: int, replicas: int) -> float:
        """Returns the seconds of the rings that reduce-scatter a stage's gradients and all-gather
        its weights.

        Args:
            stage, stages, replicas: the same as in `state_bytes`.
        """
        each, servers = GRADIENT_BYTES + self.dtype_bytes, stages * replicas
        speed, _ = self.cluster.ring(replicas, servers, self.tensor_parallel)
        nbytes = self.stage_parameters(stage, stages) * each
        seconds = nbytes * (replicas - 1) / replicas / (speed * 1e9)
        copies, of_experts = self.expert_replicas(replicas), self.stage_expert_parameters(stages)
        rate = self._expert_bytes_per_second(copies, servers * self.tensor_parallel)
        return seconds + of_experts * each * (copies - 1) / copies / rate

    def message_seconds(self, tokens: Floats, crosses: bool) -> Floats:
        """Returns the seconds until the activations of tokens have come to the next stage."""
        cluster = self.cluster
        nbytes = tokens * self.model.hidden_size * self.dtype_bytes / self.tensor_parallel
        speed = cluster.network_bytes_per_second if crosses else cluster.node_bytes_per_second
        latency = cluster.network_latency if crosses else cluster.node_latency
        result: Floats = nbytes / speed + latency
        return result
