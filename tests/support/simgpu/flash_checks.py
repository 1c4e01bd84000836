"""Our kernels over FlashAttention's packages on a simulated GPU, against attention in float64.

`python -m support.simgpu.flash_checks` runs all checks with the kernel that is chosen for the
packages that are installed, and writes what each raised to standard output, as JSON.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from distca.attention import KernelTasks, select_kernel
from distca.attention.flash import FlashAttn3Kernel, FlashAttn4Kernel
from distca.attention.paged import PagedKeys
from distca.attention.reference import attend_tasks
from distca.attention.softcap import SoftCapped
from support.attention_cases import CASES, SCALE, assert_close, make_inputs, reference

TOLERANCE = 0.02
"""Of bfloat16."""
HEADS = {"GQA": (8, 2, 64), "MHA": (2, 2, 128), "MQA, heads of 24": (3, 1, 24)}
"""Query heads, key-value heads and elements of each."""
POOLS = [
    ("one query each", (1, 1, 1, 1), 0, 256),
    ("idle lines", (1, 0, 1, 1), 0, 256),
    ("an idle line and several queries", (1, 0, 2, 1), 0, 128),
    ("windows", (1, 0, 1, 1), 3, 256),
    ("small blocks", (1, 0, 3, 1), 0, 16),
    ("nobody asks", (0, 0, 0, 0), 0, 256),
]
"""Queries of each line of a table, rows before those that they see, and rows of a block."""
_USED = np.array([300, 0, 512, 7])


def calls_mean_the_tasks(heads: str, number: int, softcap: float | None) -> None:
    """Outputs, LSE and gradients of a case, also where memory is given whose rows lie apart."""
    query_heads, kv_heads, dim = HEADS[heads]
    _, case, causal, window = CASES[number]
    tensors, edges = make_inputs(case, query_heads, kv_heads, dim, torch.bfloat16)
    tasks = KernelTasks(*edges, causal, window, SCALE, softcap)
    q, k, v, dout = (each.cuda() for each in tensors)
    kernel = select_kernel("cuda", dim, softcap is not None)
    out, lse = kernel.forward(q, k, v, tasks)
    gradients = kernel.backward(dout, q, k, v, out, lse, tasks)
    apart = [
        torch.full((len(x), 2, *x.shape[1:]), 7.0, dtype=x.dtype, device="cuda")[:, 0]
        for x in (out, lse, q, k, v)
    ]
    into = kernel.forward(q, k, v, tasks, (apart[0], apart[1]))
    into += kernel.backward(dout, q, k, v, *into, tasks, (apart[2], apart[3], apart[4]))
    wanted_out, wanted_lse, wanted = reference(tensors, edges, causal, window, softcap)
    found = zip(apart, into, (out, lse, *gradients), (wanted_out, wanted_lse, *wanted), strict=True)
    for given, written, its, right in found:
        assert given.data_ptr() == written.data_ptr()
        assert torch.equal(given.cpu(), its.cpu())
        assert_close(its.cpu(), right, TOLERANCE)


def calls_mean_the_pools_rows(
    heads: str, queries: tuple[int, ...], first: int, block: int, softcap: float | None
) -> None:
    """Keys in blocks, whole lines of a table or, under a window, their ends."""
    query_heads, kv_heads, dim = HEADS[heads]
    torch.manual_seed(0)
    columns = -(-int(_USED.max()) // block)
    order = np.random.default_rng(0).permutation(4 * columns).astype(np.int32)
    host = order.reshape(4, columns)
    q = torch.randn(sum(queries), query_heads, dim).bfloat16()
    k, v = torch.randn(2, 4 * columns * block, kv_heads, dim).bfloat16()
    table = torch.from_numpy(host).cuda()
    keys = PagedKeys(table, host, np.minimum(first, _USED), _USED, block)
    lengths = np.array(queries), keys.used - keys.first
    edges = [torch.tensor([0, *np.cumsum(each)], dtype=torch.int32) for each in lengths]
    tasks = KernelTasks(*edges, False, None, SCALE)
    slots = torch.from_numpy(
        np.concatenate(
            [
                line[np.arange(begin, end) // block] * block + np.arange(begin, end) % block
                for line, begin, end in zip(
                    host.astype(np.int64), keys.first, keys.used, strict=True
                )
            ]
        )
    )
    capped = replace(tasks, softcap=softcap)
    wanted_out, wanted_lse, _ = attend_tasks(q, q, k[slots], v[slots], capped)
    kernel: Any = select_kernel("cuda", dim, softcap is not None)
    kernel = kernel if softcap is None else SoftCapped(kernel, softcap)
    into = (
        torch.full((len(q), 2, query_heads, dim), 7.0, dtype=q.dtype, device="cuda")[:, 0],
        torch.full((len(q), query_heads), 7.0, device="cuda"),
    )
    pool = q.cuda(), k.cuda(), v.cuda(), tasks, keys
    for out, lse in (kernel.forward_paged(*pool), kernel.forward_paged(*pool, into)):
        assert_close(out.cpu(), wanted_out, TOLERANCE)
        assert_close(lse.cpu(), wanted_lse, TOLERANCE)
    assert out.data_ptr() == into[0].data_ptr()


def _given(paged: bool) -> dict[str, Any]:
    """Arguments of a call of the packages' forward functions that both take."""
    q = torch.randn(3, 4, 16, device="cuda").bfloat16()
    k = torch.randn(2, 256, 2, 16, device="cuda").bfloat16()
    cu = torch.tensor([0, 1, 3], dtype=torch.int32, device="cuda")
    given: dict[str, Any] = {"q": q, "k": k, "v": k, "cu_seqlens_q": cu, "max_seqlen_q": 2}
    given["num_splits"] = 1
    if paged:
        given["page_table"] = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32, device="cuda")
        given["seqused_k"] = torch.tensor([7, 300], dtype=torch.int32, device="cuda")
        return given
    given |= {"k": k[0], "v": k[0], "max_seqlen_k": 300}
    given["cu_seqlens_k"] = torch.tensor([0, 9, 256], dtype=torch.int32, device="cuda")
    return given


Change = Callable[[Any], Any]
REFUSALS: list[tuple[bool, str, Change, str, str]] = [
    (False, "q", lambda q: q.float(), "fp16 and bf16", "same dtype"),
    (False, "v", lambda v: v.cpu(), "v must be on CUDA", "must be on CUDA"),
    (False, "k", lambda k: k[..., :8], "k must have shape", "k has heads of 8"),
    (False, "cu_seqlens_q", lambda cu: cu.cpu(), "must be on CUDA", "on CUDA device"),
    (False, "cu_seqlens_k", lambda cu: cu.long(), "dtype int32", "must be int32"),
    (False, "cu_seqlens_k", lambda cu: cu[:2], "must have shape (3,)", "shape (batch_size + 1,)"),
    (False, "max_seqlen_q", lambda _: 1, "rows beyond 1", "rows beyond 1"),
    (True, "page_table", lambda table: table.long(), "dtype int32", "must be int32"),
    (True, "page_table", lambda table: table[:1], "a line for each", "must have batch lines"),
    (True, "page_table", lambda table: table + 1, "pages [2] of 2", "pages [2] of 2"),
    (True, "seqused_k", lambda used: used.cpu(), "must be on CUDA", "on CUDA device"),
    (True, "seqused_k", lambda used: used + 300, "600 rows of 512", "600 rows of 512"),
    (False, "num_splits", lambda _: 512, "num_splits > 256", "SplitKV not supported on SM 9.0"),
]
"""Whether keys are in pages, an argument, its change, and what versions 3 and 4 say of it."""


def the_package_refuses(number: int) -> None:
    """What the sources refuse is refused, by errors of their kind."""
    paged, name, change, of_3, of_4 = REFUSALS[number]
    kernel: Any = select_kernel("cuda", 64)
    given = _given(paged)
    kernel._forward(**given)
    text = of_3 if isinstance(kernel, FlashAttn3Kernel) else of_4
    with pytest.raises((RuntimeError, AssertionError)) as raised:
        kernel._forward(**(given | {name: change(given[name])}))
    assert text in str(raised.value), raised.value


def sinks_of_version_4_take_their_share() -> None:
    kernel: Any = select_kernel("cuda", 64)
    if not isinstance(kernel, FlashAttn4Kernel):
        return
    sink, given = torch.arange(4.0, device="cuda"), _given(paged=False)
    out, lse, *_ = kernel._forward(**given, return_lse=True)
    with_sinks, with_lse, *_ = kernel._forward(**given, return_lse=True, learnable_sink=sink)
    kept = torch.exp(lse - with_lse).T.unsqueeze(-1)
    torch.testing.assert_close((out * kept).cpu(), with_sinks.float().cpu(), rtol=0.02, atol=0.02)
    expected = torch.logaddexp(lse, sink[:, None])
    torch.testing.assert_close(with_lse.cpu(), expected.cpu())


def checks() -> dict[str, Callable[[], None]]:
    """All checks by name."""
    found: dict[str, Callable[[], None]] = {
        "sinks of version 4 take their share": sinks_of_version_4_take_their_share
    }
    for heads in HEADS:
        for cap in (None, 2.0):
            capped = "" if cap is None else ", capped"
            for number, (name, *_) in enumerate(CASES):
                check = partial(calls_mean_the_tasks, heads, number, cap)
                found[f"{name}: {heads}{capped}"] = check
            for name, *pool in POOLS:
                check = partial(calls_mean_the_pools_rows, heads, *pool, cap)
                found[f"pool, {name}: {heads}{capped}"] = check
    for number, (paged, name, *_) in enumerate(REFUSALS):
        where = "paged " if paged else ""
        found[f"refusal {number}: {where}{name}"] = partial(the_package_refuses, number)
    return found


def main() -> None:
    """Runs all checks."""
    results: dict[str, str | None] = {}
    for name, check in checks().items():
        try:
            check()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    kind = type(select_kernel("cuda", 64)).__name__
    sys.stdout.write(json.dumps({"kernel": kind, "results": results}))


if __name__ == "__main__":
    main()
