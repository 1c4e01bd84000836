"""FlashAttention on GPUs: versions 2, 3 and 4, each from its package, and torch's own version 2.

All run tasks of variable length in one call, align their causal mask to the lower right, and return
the LSE. Packages write gradients to the memory that they are given, and versions 3 and 4 outputs;
what torch's own and version 2 return in new tensors is copied there. None has been run on a GPU
yet. Tests check the calls of torch's own against its operator schemas, and those of the packages
against stand-ins with their functions' parameters.

cuDNN's fused attention does not serve: of sequences of unequal query and key lengths it aligns the
causal mask to the upper left, and torch's operators give it no windows.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils.weak import WeakIdKeyDictionary

from distca.attention.fused import RowJob, RowMemory, load_fused_kernels
from distca.attention.kernel import Gradients, KernelTasks, Outputs
from distca.attention.paged import KeyTable, PagedKeys


@dataclass(frozen=True)
class _Placed:
    """`KernelTasks` with the offsets on the GPU, and the lengths of the longest task.

    Attributes:
        table: where the tasks' keys lie in a pool; None: they lie one task after the other.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    longest_q: int
    longest_kv: int
    tasks: KernelTasks
    table: KeyTable | None = None

    def paged(self, name: str) -> dict[str, torch.Tensor]:
        """Arguments for keys of a pool; `name` is the package's name for the table."""
        if self.table is None:
            return {}
        return {name: self.table.blocks, "seqused_k": self.table.used}

    def window(self, unbounded: int | None) -> dict[str, int | None]:
        """Returns the window's arguments; `unbounded` is what the package writes for a side without
        one."""
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


def _write(found: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
    """Copies tensors to where they belong, unless they are there already."""
    pairs = [
        (tensor, target)
        for tensor, target in zip(found, into, strict=True)
        if target.data_ptr() != tensor.data_ptr()
    ]
    kernels = load_fused_kernels(found[0].device.type)
    if kernels is not None:
        kernels.make_rows(
            [RowJob(RowMemory(each), RowMemory(target), each.shape[0]) for each, target in pairs]
        )
        return
    for tensor, target in pairs:
        target.copy_(tensor)


def _is_empty(q_THD: torch.Tensor, k_THD: torch.Tensor) -> bool:
    return q_THD.shape[0] == 0 or k_THD.shape[0] == 0


class _FlashKernel(ABC):
    """A `Kernel` for bfloat16 and float16; subclasses call their package.

    The packages have the LSE by heads, and refuse calls without queries or without keys.

    Attributes:
        paged_head_step: number that divides the elements of heads which the kernel reads from a
            table's blocks. Keys of other heads are copied.
    """

    paged_head_step = 8

    def __init__(self) -> None:
        self._offsets = _Offsets()

    def forward(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        tasks: KernelTasks,
        into: Outputs | None = None,
    ) -> Outputs:
        out, lse_TH = into or (None, q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32))
        if _is_empty(q_THD, k_THD):
            out = torch.empty_like(q_THD) if out is None else out
            return out.zero_(), lse_TH.fill_(float("-inf"))
        return self._written(q_THD, k_THD, v_THD, (out, lse_TH), self._place(tasks, q_THD.device))

    def forward_paged(
        self,
        q_THD: torch.Tensor,
        k_SHD: torch.Tensor,
        v_SHD: torch.Tensor,
        tasks: KernelTasks,
        keys: PagedKeys,
        into: Outputs | None = None,
    ) -> Outputs:
        """See `PagedKernel.forward_paged`.

        The packages read a table's lines from their first rows on. Where tasks begin later, under a
        window, their few keys are copied.
        """
        if keys.first.any() or not len(q_THD) or not self.reads_table(k_SHD.shape[-1]):
            slots = keys.slots(k_SHD.device)
            return self.forward(q_THD, k_SHD[slots], v_SHD[slots], tasks, into)
        out, lse_TH = into or (None, q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32))
        placed = self._place(tasks, q_THD.device)
        table = KeyTable(keys.table, keys.tensors[1], placed.cu_seqlens_q, keys.block_size)
        placed = replace(placed, table=table)
        pages = table.pages(k_SHD), table.pages(v_SHD)
        return self._written(q_THD, *pages, (out, lse_TH), placed)

    def reads_table(self, head_dim: int) -> bool:
        """See `TableKernel.reads_table`."""
        return head_dim % self.paged_head_step == 0

    def forward_table(
        self,
        q_THD: torch.Tensor,
        k_SHD: torch.Tensor,
        v_SHD: torch.Tensor,
        table: KeyTable,
        softmax_scale: float,
        window_left: int | None = None,
        softcap: float | None = None,
    ) -> Outputs:
        """See `TableKernel.forward_table`."""
        # Offsets of the keys are not read where there is a table.
        offsets = table.offsets, table.offsets
        # A query is the last of its task: without a window the diagonal bounds nothing.
        causal = window_left is not None
        tasks = KernelTasks(*offsets, causal, window_left, softmax_scale, softcap)
        placed = _Placed(*offsets, 1, table.longest, tasks, table)
        pages = table.pages(k_SHD), table.pages(v_SHD)
        out, lse_HT = self._call_forward(q_THD, *pages, None, placed)
        return out, lse_HT.transpose(0, 1)

    def _written(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        into: tuple[torch.Tensor | None, torch.Tensor],
        placed: _Placed,
    ) -> Outputs:
        out, lse_TH = into
        found, lse_HT = self._call_forward(q, k, v, out, placed)
        out = found if out is None else out
        kernels = load_fused_kernels(q.device.type)
        if kernels is not None:
            kernels.finish_outputs(found, lse_HT, out, lse_TH)
            return out, lse_TH
        _write([found], [out])
        lse_TH.copy_(lse_HT.transpose(0, 1))
        # FlashAttention 2 gives plus infinity to a row that sees no key.
        lse_TH.masked_fill_(lse_TH == float("inf"), float("-inf"))
        return out, lse_TH

    def backward(
        self,
        dout_THD: torch.Tensor,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor,
        tasks: KernelTasks,
        into: Gradients | None = None,
    ) -> Gradients:
        if into is None:
            into = torch.empty_like(q_THD), torch.empty_like(k_THD), torch.empty_like(v_THD)
        if _is_empty(q_THD, k_THD):
            for gradient in into:
                gradient.zero_()
            return into
        inputs = dout_THD, q_THD, k_THD, v_THD, out_THD, lse_TH.transpose(0, 1).contiguous()
        self._call_backward(*inputs, into, self._place(tasks, q_THD.device))
        return into

    def _place(self, tasks: KernelTasks, device: torch.device) -> _Placed:
        q, longest_q = self._offsets(tasks.cu_seqlens_q, device)
        kv, longest_kv = self._offsets(tasks.cu_seqlens_kv, device)
        if longest_q == 1 and int(tasks.cu_seqlens_q[-1]) < len(tasks.cu_seqlens_q) - 1:
            # Version 2 takes 1 for exactly one query of each task, and regroups heads by that.
            longest_q = 2
        return _Placed(q, kv, longest_q, longest_kv, tasks)

    @abstractmethod
    def _call_forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        into: torch.Tensor | None,
        placed: _Placed,
    ) -> Outputs:
        """Returns the output, written to `into` where the package can, and the LSE, `[heads,
        queries]`."""

    @abstractmethod
    def _call_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse_HT: torch.Tensor,
        into: Gradients,
        placed: _Placed,
    ) -> None:
        """Writes the gradients."""


class TorchFlashKernel(_FlashKernel):
    """torch's built-in FlashAttention 2, which has no soft caps."""

    def _call_forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        into: torch.Tensor | None,
        placed: _Placed,
    ) -> Outputs:
        assert placed.tasks.softcap is None, "another kernel was to be chosen"
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
            **placed.paged("block_table"),
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
        into: Gradients,
        placed: _Placed,
    ) -> None:
        # Dropout's random state, unused without dropout.
        rng_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        gradients = torch.ops.aten._flash_attention_backward(
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
        _write(gradients, into)


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
    def _options(placed: _Placed) -> dict[str, object]:
        tasks = placed.tasks
        return {
            "cu_seqlens_q": placed.cu_seqlens_q,
            "cu_seqlens_k": placed.cu_seqlens_kv,
            "max_seqlen_q": placed.longest_q,
            "max_seqlen_k": placed.longest_kv,
            "dropout_p": 0.0,
            "softmax_scale": tasks.softmax_scale,
            "causal": tasks.causal,
            "softcap": tasks.softcap or 0.0,
            "alibi_slopes": None,
        } | placed.window(-1)

    def _call_forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        into: torch.Tensor | None,
        placed: _Placed,
    ) -> Outputs:
        paged = placed.paged("block_table")
        out, lse_HT, *_ = self._forward(q, k, v, **self._options(placed), **paged)
        return out, lse_HT

    def _call_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse_HT: torch.Tensor,
        into: Gradients,
        placed: _Placed,
    ) -> None:
        options = self._options(placed)
        self._backward(dout, q, k, v, out, lse_HT, *into, deterministic=False, **options)


class FlashAttn3Kernel(_FlashKernel):
    """FlashAttention 3 for Hopper: the operators of the `flash-attn-3` package.

    torch's `activate_flash_attention_impl` would put them behind its own operators for the whole
    process; here they are called as they are.

    Args:
        sm_margin: multiprocessors that kernels leave to others, such as those that exchange rows:
            its kernels otherwise stay on all of them from begin to end.

    Raises:
        ImportError, AttributeError: the package is broken, or from before it had operators.
    """

    def __init__(self, sm_margin: int = 0) -> None:
        super().__init__()
        self._sm_margin = sm_margin
        importlib.import_module("flash_attn_interface")  # It registers the operators.
        self._forward, self._backward = torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd

    def _options(self, placed: _Placed) -> dict[str, object]:
        return {
            "cu_seqlens_q": placed.cu_seqlens_q,
            "cu_seqlens_k": placed.cu_seqlens_kv,
            "max_seqlen_q": placed.longest_q,
            "max_seqlen_k": placed.longest_kv,
            "sm_margin": self._sm_margin,
            "softmax_scale": placed.tasks.softmax_scale,
            "is_causal": placed.tasks.causal,
            "softcap": placed.tasks.softcap or 0.0,
        } | placed.window(-1)

    def _call_forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        into: torch.Tensor | None,
        placed: _Placed,
    ) -> Outputs:
        options = self._options(placed) | placed.paged("page_table")
        # Keys of decoded tokens are split among multiprocessors as the package chooses: there are
        # few queries. Elsewhere a split would take memory that nothing counts.
        splits = 1
        if placed.table is not None:
            options["cu_seqlens_k"], splits = None, 0
        out, lse_HT, *_ = self._forward(q, k, v, out=into, num_splits=splits, **options)
        return out, lse_HT

    def _call_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse_HT: torch.Tensor,
        into: Gradients,
        placed: _Placed,
    ) -> None:
        self._backward(dout, q, k, v, out, lse_HT, *into, **self._options(placed))


class FlashAttn4Kernel(_FlashKernel):
    """FlashAttention 4 for Hopper and Blackwell: the functions of the `flash-attn-4` package.

    They compile a kernel when they are first called with a new kind of tasks. Betas of the package
    return more than torch 2.13's `activate_flash_attention_impl` takes, so they are called here.

    Raises:
        ImportError, AttributeError: the package is broken or incomplete.
    """

    # Its kernels for tables do not fill up heads, but where a block is a tile of theirs.
    paged_head_step = 16

    def __init__(self) -> None:
        super().__init__()
        package = importlib.import_module("flash_attn.cute.interface")
        self._forward, self._backward = package._flash_attn_fwd, package._flash_attn_bwd

    @staticmethod
    def _options(placed: _Placed) -> dict[str, object]:
        return {
            "cu_seqlens_q": placed.cu_seqlens_q,
            "cu_seqlens_k": placed.cu_seqlens_kv,
            "max_seqlen_q": placed.longest_q,
            "max_seqlen_k": placed.longest_kv,
            "softmax_scale": placed.tasks.softmax_scale,
            "causal": placed.tasks.causal,
            "softcap": placed.tasks.softcap or 0.0,
        } | placed.window(None)

    def _call_forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        into: torch.Tensor | None,
        placed: _Placed,
    ) -> Outputs:
        options = self._options(placed) | placed.paged("page_table")
        if placed.table is not None:
            options["cu_seqlens_k"] = None
        out, lse_HT, *_ = self._forward(q, k, v, return_lse=True, out=into, **options)
        return out, lse_HT

    def _call_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse_HT: torch.Tensor,
        into: Gradients,
        placed: _Placed,
    ) -> None:
        gradients = dict(zip(("dq", "dk", "dv"), into, strict=True))
        self._backward(q, k, v, out, dout, lse_HT, **gradients, **self._options(placed))
