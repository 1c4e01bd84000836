"""Experts of transformers' models with few launches, on GPUs.

Beside the products of matrices transformers' own take 23 launches, or 14 without biases; ours take
four. Results are rounded as those of transformers' operators are. None has run on a GPU yet.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from distca.attention.fused import ClampedGate, ExpertKernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CLASSES = ("Qwen3MoeExperts", "GptOssExperts")
"""Classes of experts that are covered."""
_SORTS = "grouped_mm"
"""Name of transformers' way to compute experts that sorts rows by them, as we do."""


def fuse_experts(model: PreTrainedModel, kernels: ExpertKernels) -> bool:
    """Lets the experts of a model call fused kernels. Others stay as they are.

    Covered are modules of transformers 5 whose products are one call of torch, which 2.10 has.

    Returns:
        Whether all experts of the model call them.
    """
    multiply = getattr(torch.nn.functional, "grouped_mm", None)
    experts = [each for each in model.modules() if type(each).__name__.endswith("Experts")]
    covered = [each for each in experts if type(each).__name__ in _CLASSES and _is_covered(each)]
    if multiply is None:
        return not experts
    for module in covered:
        module.forward = types.MethodType(_forward(module, kernels, multiply), module)
    return len(covered) == len(experts)


def products_ask_host(device: torch.device, dtype: torch.dtype) -> bool:
    """Tells whether torch's products of experts' matrices wait for the host to read their sizes.

    Its kernels that read the sizes on the GPU are for bfloat16 and for compute capabilities 9 and
    10. Otherwise it copies the sizes to the host, which no CUDA graph can hold.
    """
    major, _ = torch.cuda.get_device_capability(device)
    return dtype != torch.bfloat16 or major not in (9, 10)


def _is_covered(module: Any) -> bool:
    config = module.config
    way = getattr(config, "_experts_implementation", None)
    gated = getattr(module, "has_gate", False) and not getattr(module, "has_bias", False)
    activation = "alpha" in vars(module) or (gated and config.hidden_act == "silu")
    return way == _SORTS and activation


def _forward(
    module: Any, kernels: ExpertKernels, multiply: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    clamped = None
    if "alpha" in vars(module):
        clamped = ClampedGate(float(module.alpha), float(module.limit))
    number, is_transposed = int(module.num_experts), bool(module.is_transposed)

    def product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return multiply(rows, weight if is_transposed else weight.transpose(-2, -1), offs=ends)

    def forward(
        self: Any, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Results of rows `[rows, hidden]` by the experts `chosen`, int64 `[rows, experts]`."""
        up_bias, down_bias = (
            getattr(self, f"{name}_bias") if self.has_bias else None
            for name in ("gate_up_proj", "down_proj")
        )
        experts, order = torch.sort(chosen.reshape(-1))
        placed = kernels.sort_rows(rows.contiguous(), experts, order, number)
        up = product(placed.rows, self.gate_up_proj, placed.ends)
        gated = kernels.gate_rows(up, clamped, experts if self.has_bias else None, up_bias)
        down = product(gated, self.down_proj, placed.ends)
        of_pair = chosen.contiguous() if self.has_bias else None
        return kernels.combine_rows(down, placed.places, weights.contiguous(), of_pair, down_bias)

    return forward
