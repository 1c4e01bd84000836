"""FlashAttention on GPUs: the `flash-attn` package where it is installed, else torch's own.

Both run tasks of variable length in one call, align their causal mask to the lower right, and
return the LSE. Neither has been run on a GPU yet; tests check the calls against torch's operator
schemas.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from distca.attention.kernel import Gradients, Kernel, KernelTasks


def make_flash_kernel() -> Kernel:
    """Makes the `flash-attn` package's kernel where it is installed, else torch's own."""
    if importlib.util.find_spec("flash_attn") is None:
        return TorchFlashKernel()
    try:
        # Other releases install a package of that name without FlashAttention-2's kernels.
        usable = importlib.util.find_spec("flash_attn.flash_attn_interface") is not None
    except ImportError:
        # The installation is broken: the error of `FlashAttnKernel` says what to do.
        usable = True
    return FlashAttnKernel() if usable else TorchFlashKernel()


class _Offsets:
    """Copies of `cu_seqlens` on the GPU, each with the length of the longest task.

    All layers have the same offsets, so each is copied once, from pinned memory: a copy of pageable
    memory would wait, at every call, for all work that the GPU was given before.
    """

    def __init__(self) -> None:
        self._placed = WeakIdKeyDictionary()

    def __call__(self, cu_seqlens: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, int]:
        if cu_seqlens not in self._placed:
            # torch keeps the pinned memory until the copy is done.
            source = cu_seqlens.pin_memory() if device.type == "cuda" else cu_seqlens
            longest = int(cu_seqlens.diff().max())
            self._placed[cu_seqlens] = source.to(device, non_blocking=True), longest
        placed: tuple[torch.Tensor, int] = self._placed[cu_seqlens]
        return placed


def _lse_TH(lse_HT: torch.Tensor) -> torch.Tensor:
    """LSE as in `Kernel`; FlashAttention gives plus infinity to a row that sees no key."""
    lse_TH = lse_HT.transpose(0, 1).contiguous()
    return lse_TH.masked_fill_(lse_TH == float("inf"), float("-inf"))


def _is_empty(q_THD: torch.Tensor, k_THD: torch.Tensor) -> bool:
    return q_THD.shape[0] == 0 or k_THD.shape[0] == 0


def _nothing_seen(q_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q_THD.new_full(q_THD.shape[:2], float("-inf"), dtype=torch.float32)
    return torch.zeros_like(q_THD), lse


class TorchFlashKernel:
    """torch's built-in FlashAttention-2, a `Kernel` for bfloat16 and float16."""

    def __init__(self) -> None:
        self._offsets = _Offsets()

    def forward(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        tasks: KernelTasks,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if _is_empty(q_THD, k_THD):
            return _nothing_seen(q_THD)
        q_offsets, q_longest = self._offsets(tasks.cu_seqlens_q, q_THD.device)
        kv_offsets, kv_longest = self._offsets(tasks.cu_seqlens_kv, q_THD.device)
        out, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            q_THD,
            k_THD,
            v_THD,
            q_offsets,
            kv_offsets,
            q_longest,
            kv_longest,
            0.0,
            tasks.causal,
            False,
            scale=tasks.softmax_scale,
            **self._window(tasks.window_left),
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
        tasks: KernelTasks,
    ) -> Gradients:
        if _is_empty(q_THD, k_THD):
            return torch.zeros_like(q_THD), torch.zeros_like(k_THD), torch.zeros_like(v_THD)
        q_offsets, q_longest = self._offsets(tasks.cu_seqlens_q, q_THD.device)
        kv_offsets, kv_longest = self._offsets(tasks.cu_seqlens_kv, q_THD.device)
        # Dropout's random state, unused without dropout.
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
            tasks.causal,
            rng_state,
            rng_state.new_empty(0),
            scale=tasks.softmax_scale,
            **self._window(tasks.window_left),
        )
        return gradients

    @staticmethod
    def _window(window_left: int | None) -> dict[str, Any]:
        if window_left is None:
            return {}
        return {"window_size_left": window_left, "window_size_right": 0}


class FlashAttnKernel:
    """The `flash-attn` package (2.7 or later), a `Kernel` for bfloat16 and float16.

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
        self._offsets = _Offsets()

    @staticmethod
    def _window(window_left: int | None) -> dict[str, int]:
        if window_left is None:
            return {"window_size_left": -1, "window_size_right": -1}
        return {"window_size_left": window_left, "window_size_right": 0}

    def forward(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        tasks: KernelTasks,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if _is_empty(q_THD, k_THD):
            return _nothing_seen(q_THD)
        q_offsets, q_longest = self._offsets(tasks.cu_seqlens_q, q_THD.device)
        kv_offsets, kv_longest = self._offsets(tasks.cu_seqlens_kv, q_THD.device)
        out, lse_HT, *_ = self._forward(
            q_THD,
            k_THD,
            v_THD,
            q_offsets,
            kv_offsets,
            q_longest,
            kv_longest,
            dropout_p=0.0,
            softmax_scale=tasks.softmax_scale,
            causal=tasks.causal,
            **self._window(tasks.window_left),
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
        tasks: KernelTasks,
    ) -> Gradients:
        dq, dk, dv = torch.zeros_like(q_THD), torch.zeros_like(k_THD), torch.zeros_like(v_THD)
        if _is_empty(q_THD, k_THD):
            return dq, dk, dv
        q_offsets, q_longest = self._offsets(tasks.cu_seqlens_q, q_THD.device)
        kv_offsets, kv_longest = self._offsets(tasks.cu_seqlens_kv, q_THD.device)
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
            softmax_scale=tasks.softmax_scale,
            causal=tasks.causal,
            **self._window(tasks.window_left),
            softcap=0.0,
            alibi_slopes=None,
            deterministic=False,
        )
        return dq, dk, dv
