"""Stand-ins for FlashAttention's packages, which compute on CPUs.

Their functions have the real ones' names, parameters, order and results, as far as we call them:
flash-attn 2.7.0 to 2.8.3, flash-attn-3 3.0.0 (the schemas of its operators), flash-attn-4 4.0.0b36.
A row that sees no key has an LSE of plus infinity in version 2, of minus infinity in the others.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from distca.attention.kernel import KernelTasks
from distca.attention.torch_cpu import TorchCpuKernel

MODULES = {
    "flash-attn": "flash_attn.flash_attn_interface",
    "flash-attn-3": "flash_attn_interface",
    "flash-attn-4": "flash_attn.cute.interface",
}
"""Module of each package that we import."""


class FakePackages:
    """A folder of installed packages, before all others."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace())

    def install(self, versions: dict[str, str], sources: dict[str, str] | None = None) -> None:
        """Installs these packages and no others.

        Args:
            versions: version of each package.
            sources: text of each package's module; by default it computes.
        """
        shutil.rmtree(self._folder)
        for name in [n for n in sys.modules if n.split(".")[0].startswith("flash_attn")]:
            self._monkeypatch.delitem(sys.modules, name)
        self._monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace())
        for package, version in versions.items():
            metadata = self._folder / f"{package.replace('-', '_')}-{version}.dist-info/METADATA"
            metadata.parent.mkdir(parents=True)
            metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
            module = self._folder / (MODULES[package].replace(".", "/") + ".py")
            module.parent.mkdir(parents=True, exist_ok=True)
            module.write_text((sources or {}).get(package, _SOURCES[package]))
        importlib.invalidate_caches()


_SOURCES = {
    "flash-attn": """
from support.fake_flash import fa2_backward as _flash_attn_varlen_backward
from support.fake_flash import fa2_forward as _flash_attn_varlen_forward
""",
    "flash-attn-3": """
import torch
from support.fake_flash import fa3_backward, fa3_forward
torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd = fa3_forward, fa3_backward
""",
    "flash-attn-4": """
from support.fake_flash import fa4_backward as _flash_attn_bwd
from support.fake_flash import fa4_forward as _flash_attn_fwd
""",
}


def _tasks(
    cu_q, cu_kv, longest_q, longest_kv, causal, left, right, scale, none, softcap
) -> KernelTasks:
    """The tasks that a call means; `none` is a side of the window without a bound."""
    assert cu_q.dtype == cu_kv.dtype == torch.int32
    # Bounds may be larger: a call in which some tasks have no query, and others one, says 2.
    assert longest_q in (cu_q.diff().max(), 2)
    assert longest_kv == cu_kv.diff().max()
    # 0 turns it off.
    cap = softcap or None
    if left == none:
        assert right == none
        return KernelTasks(cu_q, cu_kv, causal, None, scale, cap)
    assert left >= 0
    assert right == 0
    assert causal
    return KernelTasks(cu_q, cu_kv, causal, left, scale, cap)


def _in_order(k, v, table, used):
    """The rows of a table's lines, one line after the other, their offsets and the longest."""
    assert table.dtype == used.dtype == torch.int32
    assert k.shape[1:] == v.shape[1:]
    lines = list(zip(table.long(), used.tolist(), strict=True))
    k, v = (torch.cat([x[line].flatten(0, 1)[:n] for line, n in lines]) for x in (k, v))
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), used.cumsum(0).int()])
    return k, v, cu_seqlens, int(used.max())


def _forward(q, k, v, tasks: KernelTasks, no_keys: float):
    assert len(q)
    assert len(k)
    out, lse_TH = TorchCpuKernel().forward(q, k, v, tasks)
    lse_TH = lse_TH.masked_fill(lse_TH == float("-inf"), no_keys)
    return out, lse_TH.transpose(0, 1).contiguous()


def _backward(dout, q, k, v, out, lse_HT, gradients, tasks: KernelTasks) -> None:
    assert lse_HT.is_contiguous()
    assert lse_HT.shape == (q.shape[1], q.shape[0])
    inputs = dout, q, k, v, out, lse_HT.transpose(0, 1)
    for into, found in zip(gradients, TorchCpuKernel().backward(*inputs, tasks), strict=True):
        into.copy_(found)


def fa2_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    zero_tensors=False,
):
    assert dropout_p == 0
    if max_seqlen_q == 1 and q.shape[1] > k.shape[-2] and window_size_left < 0:
        # The package regroups heads: q.reshape(batch_size, num_heads_k, ngroups, head_size).
        assert len(q) == len(cu_seqlens_q) - 1, "max_seqlen_q is 1, and a task has no query"
    if block_table is not None:
        assert k.shape[1] % 256 == 0
        k, v, cu_seqlens_k, max_seqlen_k = _in_order(k, v, block_table, seqused_k)
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    window = window_size_left, window_size_right
    tasks = _tasks(*offsets, causal, *window, softmax_scale, -1, softcap)
    out, lse = _forward(q, k, v, tasks, float("inf"))
    return out, lse, torch.empty(0), torch.empty(2)


def fa2_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
):
    assert dropout_p == 0
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    window = window_size_left, window_size_right
    tasks = _tasks(*offsets, causal, *window, softmax_scale, -1, softcap)
    _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), tasks)
    return torch.empty(0)


def fa3_forward(
    q,
    k,
    v,
    k_new=None,
    v_new=None,
    q_v=None,
    out=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cu_seqlens_k_new=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    page_table=None,
    softmax_scale=None,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    num_splits=0,
    sm_margin=0,
):
    # The package chooses where keys lie in a table.
    assert num_splits == (page_table is None)
    if page_table is not None:
        assert cu_seqlens_k is None
        k, v, cu_seqlens_k, max_seqlen_k = _in_order(k, v, page_table, seqused_k)
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    window = window_size_left, window_size_right
    tasks = _tasks(*offsets, is_causal, *window, softmax_scale, -1, softcap)
    found, lse = _forward(q, k, v, tasks, float("-inf"))
    out = found if out is None else out.copy_(found)
    return out, lse, torch.empty(0), torch.empty(0)


def fa3_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq=None,
    dk=None,
    dv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    deterministic=False,
    sm_margin=0,
):
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    window = window_size_left, window_size_right
    tasks = _tasks(*offsets, is_causal, *window, softmax_scale, -1, softcap)
    _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), tasks)
    return tuple(torch.empty(0) for _ in range(5))


def fa4_forward(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    softcap=None,
    window_size_left=None,
    window_size_right=None,
    num_splits=1,
    return_lse=False,
    out=None,
):
    assert return_lse
    if page_table is not None:
        assert cu_seqlens_k is None
        k, v, cu_seqlens_k, max_seqlen_k = _in_order(k, v, page_table, seqused_k)
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    window = window_size_left, window_size_right
    tasks = _tasks(*offsets, causal, *window, softmax_scale, None, softcap)
    found, lse = _forward(q, k, v, tasks, float("-inf"))
    return found if out is None else out.copy_(found), lse, None, None, None


def fa4_backward(
    q,
    k,
    v,
    out,
    dout,
    lse,
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    window_size_left=None,
    window_size_right=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    deterministic=False,
    dq=None,
    dk=None,
    dv=None,
):
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    window = window_size_left, window_size_right
    tasks = _tasks(*offsets, causal, *window, softmax_scale, None, softcap)
    _backward(dout, q, k, v, out, lse, (dq, dk, dv), tasks)
    return dq, dk, dv
