"""Layers of transformers' models with few launches, on GPUs: norms, rotary embeddings, experts.

transformers' own take eight launches for a norm, and ten to rotate queries and keys; ours take one
each. Experts take 23 launches beside the products of matrices, or 14 without biases; ours take
four. A model's modules are given other functions; its classes stay as they are. Results are rounded
as those of transformers' operators are. None has run on a GPU yet.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from distca.attention.fused import ClampedGate, ExpertKernels, FusedKernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROTATES = "apply_rotary_pos_emb"
"""Name by which the layers of transformers' models call what rotates queries and keys."""
_Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]

_EXPERTS = ("Qwen3MoeExperts", "GptOssExperts")
"""Classes of experts that are covered."""
_SORTS = "grouped_mm"
"""Name of transformers' way to compute experts that sorts rows by them, as we do."""


@dataclass(frozen=True)
class _Family:
    """How a family of models computes.

    Attributes:
        norm: name of the class of its norms.
        rounds: whether these round rows before they are multiplied by the weight.
        added: is added to the weight.
        angles: angles of a head over its elements.
    """

    norm: str
    rounds: bool = True
    added: float = 0.0
    angles: float = 1.0


_FAMILIES = {
    "llama": _Family("LlamaRMSNorm"),
    "qwen2": _Family("Qwen2RMSNorm"),
    "qwen3": _Family("Qwen3RMSNorm"),
    "mistral": _Family("MistralRMSNorm"),
    "phi3": _Family("Phi3RMSNorm"),
    "gemma2": _Family("Gemma2RMSNorm", rounds=False, added=1.0),
    "gemma3_text": _Family("Gemma3RMSNorm", rounds=False, added=1.0),
    "qwen3_moe": _Family("Qwen3MoeRMSNorm"),
    "gpt_oss": _Family("GptOssRMSNorm", rounds=False, angles=0.5),
}


def fuse_layers(model: PreTrainedModel, kernels: FusedKernels) -> None:
    """Lets the layers of a model call fused kernels. Other families' stay as they are."""
    family = _FAMILIES.get(model.config.model_type)
    if family is None:
        return
    for module in model.modules():
        if type(module).__name__ == family.norm:
            module.forward = _norm(module, family, kernels)
        elif hasattr(module, "layer_idx") and hasattr(module, "scaling"):
            _rotate_in(module, family, kernels)


def _norm(
    module: torch.nn.Module, family: _Family, kernels: FusedKernels
) -> Callable[[torch.Tensor], torch.Tensor]:
    eps = float(getattr(module, "variance_epsilon", None) or module.eps)  # type: ignore[arg-type]
    weight = module.weight
    assert isinstance(weight, torch.Tensor)

    def forward(rows: torch.Tensor) -> torch.Tensor:
        return kernels.normalize_rows(rows, weight, eps, family.rounds, family.added)

    return forward


def _rotate_in(module: torch.nn.Module, family: _Family, kernels: FusedKernels) -> None:
    """Gives a block of attention a `forward` that is its own, but for what rotates."""
    theirs = inspect.unwrap(type(module).forward)
    rotate: _Rotation | None = theirs.__globals__.get(_ROTATES)
    if rotate is None or _ROTATES not in theirs.__code__.co_names:
        return

    def fused(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if cos.shape[-1] != int(family.angles * q.shape[-1]) or len(q) > 1 or more:
            # A part of each head is rotated.
            return rotate(q, k, cos, sin, *more)
        q_THD, k_THD = (each[0].transpose(0, 1) for each in (q, k))
        turned_q, turned_k = kernels.rotate_heads(q_THD, k_THD, cos[0], sin[0])
        return turned_q.transpose(0, 1)[None], turned_k.transpose(0, 1)[None]

    names = theirs.__globals__ | {_ROTATES: fused}
    forward = types.FunctionType(
        theirs.__code__, names, theirs.__name__, theirs.__defaults__, theirs.__closure__
    )
    forward.__kwdefaults__ = theirs.__kwdefaults__
    module.forward = types.MethodType(forward, module)


def fuse_experts(model: PreTrainedModel, kernels: ExpertKernels) -> bool:
    """Lets the experts of a model call fused kernels. Others stay as they are.

    Covered are modules of transformers 5 whose products are one call of torch, which 2.10 has.

    Returns:
        Whether all experts of the model call them.
    """
    multiply = getattr(torch.nn.functional, "grouped_mm", None)
    experts = [each for each in model.modules() if type(each).__name__.endswith("Experts")]
    covered = [each for each in experts if type(each).__name__ in _EXPERTS and _is_covered(each)]
    if multiply is None:
        return not experts
    for module in covered:
        module.forward = types.MethodType(_experts(module, kernels, multiply), module)
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


def _experts(
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
