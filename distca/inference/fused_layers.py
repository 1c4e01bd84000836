"""Norms and rotary embeddings of transformers' models as one launch each, on GPUs.

transformers' own take eight launches for a norm, and ten to rotate queries and keys. A model's
modules are given other functions; its classes stay as they are. Results are rounded as those of
transformers' operators are. None has run on a GPU yet.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from distca.attention.fused import FusedKernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROTATES = "apply_rotary_pos_emb"
"""Name by which the layers of transformers' models call what rotates queries and keys."""
_Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]


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
