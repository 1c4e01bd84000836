"""FlashAttention on GPUs: versions 2, 3 and 4, each from its package, and torch's own version 2.

All run tasks of variable length in one call, align their causal mask to the lower right, and return
the LSE. None has been run on a GPU yet. Tests check the calls of torch's own against its operator
schemas, and those of the packages against stand-ins with their functions' parameters.

cuDNN's fused attention does not serve: of sequences of unequal query and key lengths it aligns the
causal mask to the upper left, and torch's operators give it no windows.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from distca.attention.kernel import Gradients, KernelTasks


@dataclass(frozen=True)
class _Placed:
    """`KernelTasks` with the offsets on the GPU, and the lengths of the longest task."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    longest_q: int
    longest_kv: int
    tasks: KernelTasks

    def window(self, unbounded: int | None) -> dict[str, int | None]:
        """The window's arguments; `unbounded` is what the package writes for a side without one."""
        left = self.tasks.window_left
        bounds = (unbounded, unbounded) if left is None else (left, 0)
        return dict(zip(("window_size_left", "window_size_right"), bounds, strict=True))


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
    """LSE as in `Kernel`; FlashAttention 2 gives plus infinity to a row that sees no key."""
    lse_TH = lse_HT.transpose(0, 1).contiguous()
    return lse_TH.masked_fill_(lse_TH == float("inf"), float("-inf"))


def _is_empty(q_THD: torch.Tensor, k_THD: torch.Tensor) -> bool:
    return q_THD.shape[0] == 0 or k_THD.shape[0] == 0


def _nothing_seen(q_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q_THD.new_full(q_THD.shape[:2], float("-inf"), dtype=torch.float32)
    return torch.zeros_like(q_THD), lse


class _FlashKernel(ABC):
    """A `Kernel` for bfloat16 and float16; subclasses call their package.

    The packages have the LSE by heads, and refuse calls without queries or without keys.
    """

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
        out, lse_HT = self._call_forward(q_THD, k_THD, v_THD, self._place(tasks, q_THD.device))
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
        inputs = dout_THD, q_THD, k_THD, v_THD, out_THD, lse_TH.transpose(0, 1).contiguous()
        return self._call_backward(*inputs, self._place(tasks, q_THD.device))

    def _place(self, tasks: KernelTasks, device: torch.device) -> _Placed:
        q, longest_q = self._offsets(tasks.cu_seqlens_q, device)
        kv, longest_kv = self._offsets(tasks.cu_seqlens_kv, device)
        return _Placed(q, kv, longest_q, longest_kv, tasks)

    @abstractmethod
    def _call_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, placed: _Placed
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output and the LSE, `[heads, queries]`."""

    @abstractmethod
    def _call_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse_HT: torch.Tensor,
        placed: _Placed,
    ) -> Gradients:
        """Returns `(dq, dk, dv)`."""


class TorchFlashKernel(_FlashKernel):
    """torch's built-in FlashAttention 2."""

    def _call_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, placed: _Placed
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            placed.cu_seqlens_q,
            placed.cu_seqlens_kv,
            placed.longest_q,
            placed.longest_kv,
            0.0,
            placed.tasks.causal,
            False,
            scale=placed.tasks.softmax_scale,
            **placed.window(None),
        )
        return out, lse_HT

    def _call_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse_HT: torch.Tensor,
        placed: _Placed,
    ) -> Gradients:
        # Dropout's random state, unused without dropout.
        rng_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        gradients: Gradients = torch.ops.aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse_HT,
            placed.cu_seqlens_q,
            placed.cu_seqlens_kv,
            placed.longest_q,
            placed.longest_kv,
            0.0,
            placed.tasks.causal,
            rng_state,
            rng_state.new_empty(0),
            scale=placed.tasks.softmax_scale,
            **placed.window(None),
        )
        return gradients


class FlashAttn2Kernel(_FlashKernel):
    """FlashAttention 2 of the `flash-attn` package, 2.7 or later.

    Raises:
        ImportError, AttributeError: the package is broken or incomplete.
    """

    def __init__(self) -> None:
        super().__init__()
        package = importlib.import_module("flash_attn.flash_attn_interface")
        self._forward = package._flash_attn_varlen_forward
        self._backward = package._flash_attn_varlen_backward

    @staticmethod
    def _options(placed: _Placed) -> dict[str, Any]:
        tasks = placed.tasks
        return {
            "cu_seqlens_q": placed.cu_seqlens_q,
            "cu_seqlens_k": placed.cu_seqlens_kv,
            "max_seqlen_q": placed.longest_q,
            "max_seqlen_k": placed.longest_kv,
            "dropout_p": 0.0,
            "softmax_scale": tasks.softmax_scale,
            "causal": tasks.causal,
            "softcap": 0.0,
            "alibi_slopes": None,
        } | placed.window(-1)

    def _call_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, placed: _Placed
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse_HT, *_ = self._forward(q, k, v, **self._options(placed))
        return out, lse_HT

    def _call_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse_HT: torch.Tensor,
        placed: _Placed,
    ) -> Gradients:
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        options = self._options(placed)
        self._backward(dout, q, k, v, out, lse_HT, *gradients, deterministic=False, **options)
        return gradients


class FlashAttn3Kernel(_FlashKernel):
    """FlashAttention 3 for Hopper: the operators of the `flash-attn-3` package.

    torch's `activate_flash_attention_impl` would put them behind its own operators for the whole
    process; here they are called as they are.

    Raises:
        ImportError, AttributeError: the package is broken, or from before it had operators.
    """

    def __init__(self) -> None:
        super().__init__()
        importlib.import_module("flash_attn_interface")  # It registers the operators.
        self._forward, self._backward = torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd

    @staticmethod
    def _options(placed: _Placed) -> dict[str, Any]:
        return {
            "cu_seqlens_q": placed.cu_seqlens_q,
            "cu_seqlens_k": placed.cu_seqlens_kv,
            "max_seqlen_q": placed.longest_q,
            "max_seqlen_k": placed.longest_kv,
            "softmax_scale": placed.tasks.softmax_scale,
            "is_causal": placed.tasks.causal,
        } | placed.window(-1)

    def _call_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, placed: _Placed
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Without a split over the keys, which would take memory that nothing counts.
        out, lse_HT, *_ = self._forward(q, k, v, num_splits=1, **self._options(placed))
        return out, lse_HT

    def _call_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse_HT: torch.Tensor,
        placed: _Placed,
    ) -> Gradients:
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self._backward(dout, q, k, v, out, lse_HT, *gradients, **self._options(placed))
        return gradients


class FlashAttn4Kernel(_FlashKernel):
    """FlashAttention 4 for Hopper and Blackwell: the functions of the `flash-attn-4` package.

    They compile a kernel when they are first called with a new kind of tasks. Betas of the package
    return more than torch 2.13's `activate_flash_attention_impl` takes, so they are called here.

    Raises:
        ImportError, AttributeError: the package is broken or incomplete.
    """

    def __init__(self) -> None:
        super().__init__()
        package = importlib.import_module("flash_attn.cute.interface")
        self._forward, self._backward = package._flash_attn_fwd, package._flash_attn_bwd

    @staticmethod
    def _options(placed: _Placed) -> dict[str, Any]:
        return {
            "cu_seqlens_q": placed.cu_seqlens_q,
            "cu_seqlens_k": placed.cu_seqlens_kv,
            "max_seqlen_q": placed.longest_q,
            "max_seqlen_k": placed.longest_kv,
            "softmax_scale": placed.tasks.softmax_scale,
            "causal": placed.tasks.causal,
        } | placed.window(None)

    def _call_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, placed: _Placed
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse_HT, *_ = self._forward(q, k, v, return_lse=True, **self._options(placed))
        return out, lse_HT

    def _call_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse_HT: torch.Tensor,
        placed: _Placed,
    ) -> Gradients:
        dq, dk, dv, *_ = self._backward(q, k, v, out, dout, lse_HT, **self._options(placed))
        return dq, dk, dv
