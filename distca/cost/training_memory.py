"""Memory of a training step on a GPU: the model's state, and what its layers keep of each token.

Activations are those that Megatron keeps for the backward pass with sequence parallelism,
FlashAttention and without recomputation: of each layer the inputs of both norms, the normed inputs,
queries, keys, values, core attention's output and LSE, the two halves of the gated MLP and their
product, all divided by the tensor-parallel size. Rows of experts are kept when they arrive and when
they leave. The optimizer is Adam, whose state data-parallel ranks share.
"""

from __future__ import annotations

from typing import Literal

from distca.cost.model_sizes import ModelSize

GRADIENT_BYTES, OPTIMIZER_BYTES = 4, 12
"""Bytes of a parameter's float32 gradient; of its float32 copy and Adam's two moments."""
LOGIT_BYTES, KEPT_LOGIT_BYTES = 6, 4
"""Bytes of a 16-bit logit and its float32 copy in the loss; those kept for the backward pass."""
Recompute = Literal["none", "mlp", "full"]
"""Parts of a layer that run forward again before they run backward, and keep their input alone:
nothing; the MLP (`--recompute-granularity selective --recompute-modules mlp`), as in the public
experiments of the DistCA paper; or the layer (`--recompute-granularity full`)."""


class MemoryCosts:
    """Bytes that follow from a model and how GPUs share it: for dataclasses with these fields.

    Attributes:
        model: sizes of the model.
        tensor_parallel: GPUs that share each layer.
        dtype_bytes: bytes of an activation and of a weight.
        recompute: part of each layer that runs forward again.
        expert_parallel: neighbouring GPUs of a stage that share each layer's routed experts.
    """

    model: ModelSize
    tensor_parallel: int
    dtype_bytes: int
    recompute: Recompute
    expert_parallel: int

    def activation_bytes(self) -> float:
        """Returns the bytes of a token that each GPU keeps for one layer's backward pass."""
        return self._activation_bytes(self.recompute)

    def _activation_bytes(self, recompute: Recompute) -> float:
        model = self.model
        hidden = model.hidden_size
        if recompute == "full":
            return hidden * self.dtype_bytes / self.tensor_parallel
        lse = 4 * model.heads
        # Queries, keys and values, and outputs; latents, which are inputs, too.
        attention = model.heads * model.head_dim + model.heads * model.value_dim
        attention += model.kv_heads * (model.head_dim + model.value_dim)
        attention += sum(outputs for _, outputs, shared in model.pre_products if not shared)
        kept = ((4 * hidden + attention) * self.dtype_bytes + lse) / self.tensor_parallel
        return kept if recompute == "mlp" else kept + self._mlp_bytes

    def recomputed_bytes(self) -> float:
        """Returns the bytes of a token of what has run forward again in one layer; without that
        none."""
        if self.recompute == "full":
            return self._activation_bytes("none")
        return self._mlp_bytes if self.recompute == "mlp" else 0.0

    @property
    def _mlp_bytes(self) -> float:
        """Bytes of a token of the activations within the MLPs of a layer."""
        model = self.model
        rows = 2 * model.experts.chosen * model.hidden_size if model.experts else 0
        return (3 * model.mlp_width + rows) * self.dtype_bytes / self.tensor_parallel

    def logit_bytes(self) -> float:
        """Returns the bytes of a token's logits on each GPU of the last stage."""
        return self.model.vocab_size * LOGIT_BYTES / self.tensor_parallel

    def kept_logit_bytes(self) -> float:
        """Returns the bytes of a token's logits that are kept until the backward pass."""
        return self.model.vocab_size * KEPT_LOGIT_BYTES / self.tensor_parallel

    def state_bytes(self, stage: int, stages: int, replicas: int) -> float:
        """Returns the bytes of a GPU's weights, gradients and part of the optimizer's state.

        Args:
            stage: number of the GPU's pipeline stage.
            stages: number of all stages.
            replicas: data-parallel (and context-parallel) ranks that share the optimizer's state.
        """
        each = self.dtype_bytes + GRADIENT_BYTES
        dense = self.stage_parameters(stage, stages) * (each + OPTIMIZER_BYTES / replicas)
        of_experts = OPTIMIZER_BYTES / self.expert_replicas(replicas)
        return dense + self.stage_expert_parameters(stages) * (each + of_experts)

    def stage_parameters(self, stage: int, stages: int) -> float:
        """Parameters on one GPU of a stage, but for routed experts."""
        parameters = self.model.layers // stages * self.model.dense_layer_parameters
        parameters += self.model.vocabulary_parameters * ((stage == 0) + (stage == stages - 1))
        return parameters / self.tensor_parallel

    def stage_expert_parameters(self, stages: int) -> float:
        """Parameters of routed experts on one GPU of a stage."""
        return self.model.layers // stages * self.model.expert_parameters / self.expert_parallel

    def expert_replicas(self, replicas: int) -> int:
        """GPUs that have the same experts, of a stage of that many servers."""
        return max(replicas * self.tensor_parallel // self.expert_parallel, 1)
