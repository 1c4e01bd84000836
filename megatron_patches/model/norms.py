"""Norms of Megatron's local layers, by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class SequenceParallelNorm:
    """torch's RMSNorm or LayerNorm, also with sequence parallelism: the norm of local layers.

    megatron-core's `WrappedTorchNorm` refuses sequence parallelism, because the gradients of its
    weights would be partial sums. Weights marked as here have them added up over the
    tensor-parallel ranks by `finalize_model_grads`, as those of apex and Transformer Engine do. It
    also refuses `--apply-layernorm-1p`, with which the weights are kept as they differ from 1.
    """

    def __new__(  # type: ignore[misc]
        cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> torch.nn.Module:
        kinds: dict[str, tuple[type[torch.nn.Module], type[torch.nn.Module]]] = {
            "RMSNorm": (torch.nn.RMSNorm, ZeroCenteredRMSNorm),
            "LayerNorm": (torch.nn.LayerNorm, ZeroCenteredLayerNorm),
        }
        if config.normalization not in kinds:
            raise ValueError(
                f"--normalization {config.normalization}: choose one of {', '.join(kinds)}"
            )
        kind = kinds[config.normalization][bool(config.layernorm_zero_centered_gamma)]
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class ZeroCenteredRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, whose factor is one more than its weight. It computes in float32."""

    def reset_parameters(self) -> None:
        """Makes the factor 1."""
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norms rows `[..., hidden_size]`."""
        factor = 1 + self.weight.float()
        return functional.rms_norm(x.float(), self.normalized_shape, factor, self.eps).to(x.dtype)


class ZeroCenteredLayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm, whose factor is one more than its weight. It computes in float32."""

    def reset_parameters(self) -> None:
        """Makes the factor 1 and the bias 0."""
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norms rows `[..., hidden_size]`."""
        factor, bias, shape = 1 + self.weight.float(), self.bias.float(), self.normalized_shape
        return functional.layer_norm(x.float(), shape, factor, bias, self.eps).to(x.dtype)
