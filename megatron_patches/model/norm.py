"""The norm of Megatron's local layer spec, where apex is not installed."""

from __future__ import annotations

from typing import Any

import torch


class SequenceParallelNorm:
    """torch's RMSNorm or LayerNorm, also with sequence parallelism.

    megatron-core's `WrappedTorchNorm` refuses sequence parallelism, because the gradients of its
    weights would be partial sums. Weights marked as here have them added up over the
    tensor-parallel ranks by `finalize_model_grads`, as those of apex and Transformer Engine do.
    """

    def __new__(  # type: ignore[misc]
        cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> torch.nn.Module:
        kinds = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        if config.normalization not in kinds:
            raise ValueError(
                f"--normalization {config.normalization}: choose one of {', '.join(kinds)}"
            )
        if config.layernorm_zero_centered_gamma:
            raise ValueError("--apply-layernorm-1p needs --transformer-impl transformer_engine")
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
