"""FlashAttention on GPUs: the `flash-attn` package where it is installed, else torch's own.

Both take variable-length tasks in one call, align their causal mask to the lower right, and return
the LSE. Nothing in this file has been run on a GPU yet; its calls are checked against torch's
operator schemas in the tests.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from distca.attention.kernel import Gradients, Kernel


def make_flash_kernel() -> Kernel:
    """The `flash-attn` package's kernel where it is installed, else torch's own."""
    if importlib.util.find_spec("flash_attn") is None:
        return TorchFlashKernel()
    try:
        # A package of that name may also hold other versions' kernels alone.
        there = importlib.util.find_spec("flash_attn.flash_attn_interface") is not None
    except ImportError:
        # It is there, but broken: the kernel's own error says what to do.
        there = True
    return FlashAttnKernel() if there else TorchFlashKernel()


class _Offsets:
    """`cu_seqlens` on the GPU, and the longest of the tasks.

    All layers have the same ones. They are copied once, and without a wait: a copy of pageable
    memory would wait for all that the GPU was given before, at every call.
    """

    def __init__(self) -> None:
        self._placed = WeakIdKeyDictionary()

    def __call__(self, cu_seqlens: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, int]:
        if cu_seqlens not in self._placed:
            # Only pinned memory is copied without a wait; it is kept until the copy is done.
            source = cu_seqlens.pin_memory() if device.type == "cuda" else cu_seqlens
            longest = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
            self._placed[cu_seqlens] = source.to(device, non_blocking=True), longest
        placed: tuple[torch.Tensor, int] = self._placed[cu_seqlens]
        return placed


def _lse_TH(lse_HT: torch.Tensor) -> torch.Tensor:
    """As `Kernel` has it: FlashAttention gives plus infinity to a row that sees no key."""
    lse_TH = lse_HT.transpose(0, 1).contiguous()
    return lse_TH.masked_fill_(lse_TH == float("inf"), float("-inf"))


def _is_empty(q_THD: torch.Tensor, k_THD: torch.Tensor) -> bool:
    return q_THD.shape[0] == 0 or k_THD.shape[0] == 0


def _nothing_seen(q_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q_THD.new_full(q_THD.shape[:2], float("-inf"), dtype=torch.float32)
    return torch.zeros_like(q_THD), lse


class TorchFlashKernel:
    """torch's built-in FlashAttention-2; see `Kernel`. bfloat16 and float16."""

    def __init__(self) -> None:
        self._place = _Offsets()

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
        q_offsets, q_longest = self._place(cu_seqlens_q, q_THD.device)
        kv_offsets, kv_longest = self._place(cu_seqlens_kv, q_THD.device)
        out, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            q_THD,
            k_THD,
            v_THD,
            q_offsets,
            kv_offsets,
            q_longest,
            kv_longest,
            0.0,
            causal,
            False,
            scale=softmax_scale,
            **self._window(window_left),
        )
        return out, _lse_TH(lse_HT)

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
        q_offsets, q_longest = self._place(cu_seqlens_q, q_THD.device)
        kv_offsets, kv_longest = self._place(cu_seqlens_kv, q_THD.device)
        # The random state is that of dropout, of which there is none.
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q_THD.device)
        gradients: Gradients = torch.ops.aten._flash_attention_backward(
            dout_THD,
            q_THD,
            k_THD,
            v_THD,
            out_THD,
            lse_TH.transpose(0, 1).contiguous(),
            q_offsets,
            kv_offsets,
            q_longest,
            kv_longest,
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
        self._place = _Offsets()

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
        q_offsets, q_longest = self._place(cu_seqlens_q, q_THD.device)
        kv_offsets, kv_longest = self._place(cu_seqlens_kv, q_THD.device)
        out, lse_HT, *_ = self._forward(
            q_THD,
            k_THD,
            v_THD,
            q_offsets,
            kv_offsets,
            q_longest,
            kv_longest,
            dropout_p=0.0,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size_left=-1 if window_left is None else window_left,
            window_size_right=-1 if window_left is None else 0,
        )
        return out, _lse_TH(lse_HT)

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
        q_offsets, q_longest = self._place(cu_seqlens_q, q_THD.device)
        kv_offsets, kv_longest = self._place(cu_seqlens_kv, q_THD.device)
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
            q_offsets,
            kv_offsets,
            q_longest,
            kv_longest,
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
