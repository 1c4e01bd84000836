"""Memory of a training step by the flags, as `distca simulate` counts it.

The simulator's model is gated and untied, with experts in every layer and Megatron's usual
optimizer. What flags say otherwise changes the sizes here.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from distca.cost.model_sizes import Experts, ModelSize
from distca.cost.training_memory import MemoryCosts, Recompute
from distca.cost.volume import AttentionShape
from distca.schedule.program import LayerGroup
from distca.schedule.training.peak_memory import StepMemory
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.sizes import ModelSizes, optimizer_bytes

_MATRICES = 3
"""Matrices of a gated MLP, as the simulator has them."""


@dataclass(frozen=True)
class JobMemory(MemoryCosts):
    """Bytes of a job's model.

    Attributes:
        model, tensor_parallel, dtype_bytes, recompute, expert_parallel: as for `MemoryCosts`.
        layer_groups: groups of a model chunk's layers whose backward passes run together.
        sequence_parallel: whether tensor-parallel ranks share the inputs of norms.
        is_tied: whether the output layer has the embedding's weights.
        expert_share: part of the layers that have experts.
        gradient_bytes: bytes of a parameter's gradient.
        optimizer_bytes: bytes of a parameter's optimizer state.
        shares_optimizer: whether data-parallel ranks share the optimizer's state.
        shares_weights: whether they share weights and gradients as well.
    """

    model: ModelSize
    tensor_parallel: int
    dtype_bytes: int
    recompute: Recompute
    expert_parallel: int
    layer_groups: tuple[LayerGroup, ...]
    sequence_parallel: bool
    is_tied: bool
    expert_share: float
    gradient_bytes: int
    optimizer_bytes: int
    shares_optimizer: bool
    shares_weights: bool

    @classmethod
    def from_args(cls, args: Namespace, groups: tuple[LayerGroup, ...]) -> JobMemory:
        """Makes the value of Megatron-LM's checked arguments.

        Args:
            args: the arguments.
            groups: value of `layer_groups`.
        """
        sizes, recompute = ModelSizes.from_args(args), _recompute(args)
        wide = args.params_dtype.itemsize == 4 or args.accumulate_allreduce_grads_in_fp32
        sharded = bool(args.use_megatron_fsdp or args.use_torch_fsdp2)
        return cls(
            model=_model_size(sizes),
            tensor_parallel=args.tensor_model_parallel_size,
            dtype_bytes=sizes.dtype_bytes,
            recompute=recompute,
            expert_parallel=args.expert_model_parallel_size * args.expert_tensor_parallel_size,
            layer_groups=groups,
            sequence_parallel=args.sequence_parallel,
            is_tied=sizes.embeddings == 1,
            expert_share=1.0 if sizes.experts is None else sizes.experts.share,
            gradient_bytes=4 if wide else sizes.dtype_bytes,
            optimizer_bytes=0 if args.optimizer_cpu_offload else optimizer_bytes(args),
            shares_optimizer=args.use_distributed_optimizer or sharded,
            shares_weights=sharded,
        )

    def activation_bytes(self) -> float:
        """See `MemoryCosts.activation_bytes`; the mean of the layers."""
        others: Recompute = "none" if self.recompute == "full" else self.recompute
        kept = 0.0
        for group in self.layer_groups:
            # Layers that run forward again together keep the input of the first.
            inputs = 1 if group.recomputed else len(group.layers)
            kept += inputs * self._kept_of("full" if group.recomputed else others)
        return kept / sum(len(group.layers) for group in self.layer_groups)

    def recomputed_bytes(self) -> float:
        """See `MemoryCosts.recomputed_bytes`; of all layers of a group."""
        together = [len(group.layers) for group in self.layer_groups if group.recomputed]
        return max(together) * self._kept_of("none") if together else super().recomputed_bytes()

    def _kept_of(self, recompute: Recompute) -> float:
        kept = self._activation_bytes(recompute)
        if self.sequence_parallel or self.tensor_parallel == 1:
            return kept
        whole = 1 if recompute == "full" else 4
        hidden = self.model.hidden_size * self.dtype_bytes
        return kept + whole * hidden * (1 - 1 / self.tensor_parallel)

    def state_bytes(self, stage: int, stages: int, replicas: int) -> float:
        """See `MemoryCosts.state_bytes`."""
        nbytes = 0.0
        for parameters, copies in (
            (self.stage_parameters(stage, stages), replicas),
            (self.stage_expert_parameters(stages), self.expert_replicas(replicas)),
        ):
            each = (self.dtype_bytes + self.gradient_bytes) / (copies if self.shares_weights else 1)
            state = self.optimizer_bytes / (copies if self.shares_optimizer else 1)
            nbytes += parameters * (each + state)
        return nbytes

    def stage_parameters(self, stage: int, stages: int) -> float:
        """See `MemoryCosts.stage_parameters`."""
        once = self.model.vocabulary_parameters if self.is_tied and stages == 1 else 0
        return super().stage_parameters(stage, stages) - once / self.tensor_parallel

    def stage_expert_parameters(self, stages: int) -> float:
        """See `MemoryCosts.stage_expert_parameters`."""
        return self.expert_share * super().stage_expert_parameters(stages)


def step_memory(
    config: DistcaConfig, args: Namespace, shape: AttentionShape, groups: tuple[LayerGroup, ...]
) -> StepMemory:
    """Returns what the memory of a training step depends on beside its plans.

    Args:
        config: our flags.
        args: Megatron-LM's checked arguments.
        shape: heads of a rank, and what travels for keys and values.
        groups: groups of a model chunk's layers whose backward passes run together.
    """
    costs = JobMemory.from_args(args, groups)
    return StepMemory(costs, shape, config.backward, config.head_parallel)


def _recompute(args: Namespace) -> Recompute:
    if args.recompute_granularity == "full":
        return "full"
    modules = set(args.recompute_modules or ()) if args.recompute_granularity else set()
    return "mlp" if modules & {"mlp", "moe"} else "none"


def _model_size(sizes: ModelSizes) -> ModelSize:
    """Returns the simulator's sizes; MLPs without a gate are as wide as gated ones of as many
    parameters, and layers with and without experts have the mean width."""

    def gated(width: float) -> int:
        return round(width * sizes.mlp_matrices / _MATRICES)

    experts, width = None, float(sizes.ffn_hidden_size)
    if (found := sizes.experts) is not None:
        experts = Experts(found.number, found.chosen, gated(found.ffn_hidden_size))
        width = found.share * found.shared_ffn_hidden_size + (1 - found.share) * width
    return ModelSize(
        sizes.layers,
        sizes.hidden_size,
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        gated(width),
        sizes.vocabulary,
        experts,
        latents=sizes.latents,
    )
