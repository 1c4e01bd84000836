"""FlashAttention on GPUs: the `flash-attn` package where it is installed, else torch's own.

Both take variable-length tasks in one call, align their causal mask to the lower right, and return
the LSE. Nothing in this file has been run on a GPU yet; its calls are checked against torch's
operator schemas in the tests.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from distca.attention.kernel import Gradients, Kernel


def make_flash_kernel() -> Kernel:
    """The `flash-attn` package's kernel where it is installed, else torch's own."""
    if importlib.util.find_spec("flash_attn") is not None:
        return FlashAttnKernel()
    return TorchFlashKernel()


def _longest(cu_seqlens: torch.Tensor) -> int:
    return int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0


def _is_empty(q_THD: torch.Tensor, k_THD: torch.Tensor) -> bool:
    return q_THD.shape[0] == 0 or k_THD.shape[0] == 0


def _nothing_seen(q_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q_THD.new_full(q_THD.shape[:2], float("-inf"), dtype=torch.float32)
    return torch.zeros_like(q_THD), lse


class TorchFlashKernel:
    """torch's built-in FlashAttention-2; see `Kernel`. bfloat16 and float16."""

    def forward(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        *,
        causal: bool,
        window_left: int | None,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if _is_empty(q_THD, k_THD):
            return _nothing_seen(q_THD)
        out, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            q_THD,
            k_THD,
            v_THD,
            cu_seqlens_q.to(q_THD.device),
            cu_seqlens_kv.to(q_THD.device),
            _longest(cu_seqlens_q),
            _longest(cu_seqlens_kv),
            0.0,
            causal,
            False,
            scale=softmax_scale,
            **self._window(window_left),
        )
        return out, lse_HT.transpose(0, 1).contiguous()

    def backward(
        self,
        dout_THD: torch.Tensor,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        *,
        causal: bool,
        window_left: int | None,
        softmax_scale: float,
    ) -> Gradients:
        if _is_empty(q_THD, k_THD):
            return torch.zeros_like(q_THD), torch.zeros_like(k_THD), torch.zeros_like(v_THD)
        # The random state is that of dropout, of which there is none.
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q_THD.device)
        gradients: Gradients = torch.ops.aten._flash_attention_backward(
            dout_THD,
            q_THD,
            k_THD,
            v_THD,
            out_THD,
            lse_TH.transpose(0, 1).contiguous(),
            cu_seqlens_q.to(q_THD.device),
            cu_seqlens_kv.to(q_THD.device),
            _longest(cu_seqlens_q),
            _longest(cu_seqlens_kv),
            0.0,
            causal,
            rng_state,
            rng_state.new_empty(0),
            scale=softmax_scale,
            **self._window(window_left),
        )
        return gradients

    @staticmethod
    def _window(window_left: int | None) -> dict[str, Any]:
        if window_left is None:
            return {}
        return {"window_size_left": window_left, "window_size_right": 0}


class FlashAttnKernel:
    """The `flash-attn` package (2.7 or later); see `Kernel`. bfloat16 and float16.

    Raises:
        ImportError: the package is older or incomplete.
    """

    def __init__(self) -> None:
        try:
            from flash_attn.flash_attn_interface import (
                _flash_attn_varlen_backward,
                _flash_attn_varlen_forward,
            )
        except ImportError as error:
            raise ImportError(
                "this flash-attn lacks the variable-length functions: `pip install "
                "'flash-attn>=2.7'`, or uninstall it to use torch's own FlashAttention"
            ) from error
        self._forward, self._backward = _flash_attn_varlen_forward, _flash_attn_varlen_backward

    def forward(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        *,
        causal: bool,
        window_left: int | None,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if _is_empty(q_THD, k_THD):
            return _nothing_seen(q_THD)
        out, lse_HT, *_ = self._forward(
            q_THD,
            k_THD,
            v_THD,
            cu_seqlens_q.to(q_THD.device),
            cu_seqlens_kv.to(q_THD.device),
            _longest(cu_seqlens_q),
            _longest(cu_seqlens_kv),
            dropout_p=0.0,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size_left=-1 if window_left is None else window_left,
            window_size_right=-1 if window_left is None else 0,
        )
        return out, lse_HT.transpose(0, 1).contiguous()

    def backward(
        self,
        dout_THD: torch.Tensor,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        *,
        causal: bool,
        window_left: int | None,
        softmax_scale: float,
    ) -> Gradients:
        dq, dk, dv = torch.zeros_like(q_THD), torch.zeros_like(k_THD), torch.zeros_like(v_THD)
        if _is_empty(q_THD, k_THD):
            return dq, dk, dv
        self._backward(
            dout_THD,
            q_THD,
            k_THD,
            v_THD,
            out_THD,
            lse_TH.transpose(0, 1).contiguous(),
            dq,
            dk,
            dv,
            cu_seqlens_q.to(q_THD.device),
            cu_seqlens_kv.to(q_THD.device),
            _longest(cu_seqlens_q),
            _longest(cu_seqlens_kv),
            dropout_p=0.0,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size_left=-1 if window_left is None else window_left,
            window_size_right=-1 if window_left is None else 0,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=False,
        )
        return dq, dk, dv
