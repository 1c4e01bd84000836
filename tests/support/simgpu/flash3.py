"""A stand-in for the operators of `flash-attn-3`, with the checks of their source.

Their schemas are those of the package (`hopper/flash_api.cpp`). What we never pass is refused.
"""

from __future__ import annotations

import math
from typing import Any

from support.simgpu.flash import (
    Call,
    check_numbers,
    check_offsets,
    check_rows,
    check_table,
    launch_backward,
    launch_forward,
    refuse,
)

LARGEST_HEAD = 256
_FORWARD = """
    fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None,
    Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,
    Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None,
    int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None,
    Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None,
    Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None,
    Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None,
    bool is_causal=False, int window_size_left=-1, int window_size_right=-1,
    int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False,
    Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0)
    -> (Tensor(out!), Tensor, Tensor, Tensor)
"""
_BACKWARD = """
    bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,
    Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None,
    Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None,
    int? max_seqlen_q=None, int? max_seqlen_k=None, float? softmax_scale=None,
    bool is_causal=False, int window_size_left=-1, int window_size_right=-1, float softcap=0.0,
    bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
"""
_libraries: list[Any] = []


def install(native: Any) -> None:
    """Registers the operators; the package does when it is imported."""
    import torch

    library = torch.library.Library("flash_attn_3", "DEF")
    _libraries.append(library)
    for schema, its in ((_FORWARD, _forward), (_BACKWARD, _backward)):

        def run(*values: Any, its: Any = its, **options: Any) -> Any:
            return its(native, *values, **options)

        name = library.define(" ".join(schema.split()))
        library.impl(name, run, "CUDA")


def _check_shapes(shapes: dict[str, tuple[Any, tuple[int, ...]]]) -> None:
    for name, (each, shape) in shapes.items():
        refuse(each.shape != shape, f"{name} must have shape {shape}")


def _check_heads(q: Any, k: Any, v: Any) -> None:
    size, of_value = q.shape[-1], v.shape[-1]
    refuse(max(size, of_value) > LARGEST_HEAD, f"only supports heads of at most {LARGEST_HEAD}")
    refuse(size % 8 or of_value % 8, "head_size should be a multiple of 8")
    refuse(q.shape[-2] % k.shape[-2], "Number of heads in key/value must divide queries'")
    unlike = 128 < size <= 192 and 96 < of_value <= 128
    refuse(size != of_value and not unlike, f"heads of {size} and {of_value} elements")


def _forward(
    native: Any,
    q: Any,
    k: Any,
    v: Any,
    k_new: Any = None,
    v_new: Any = None,
    q_v: Any = None,
    out: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    cu_seqlens_k_new: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    page_table: Any = None,
    kv_batch_idx: Any = None,
    leftpad_k: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    seqlens_rotary: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: Any = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    is_rotary_interleaved: bool = False,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: Any = None,
    sm_margin: int = 0,
) -> Any:
    import torch

    never = k_new, v_new, q_v, cu_seqlens_k_new, seqused_q, kv_batch_idx, leftpad_k, rotary_cos
    never += rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, scheduler_metadata
    refuse(any(each is not None for each in never) or attention_chunk, "this is not simulated")
    check_rows({"q": q, "k": k, "v": v}, q.dtype)
    refuse(cu_seqlens_q is None, "calls without cu_seqlens_q are not simulated")
    refuse(max_seqlen_q is None, "max_seqlen_q must be provided if cu_seqlens_q is provided")
    _check_heads(q, k, v)
    batch, (rows, heads, size), of_value = len(cu_seqlens_q) - 1, q.shape, v.shape[-1]
    check_offsets(cu_seqlens_q, max_seqlen_q, rows, native, "cu_seqlens_q")
    if page_table is None:
        refuse(cu_seqlens_k is None, "calls without cu_seqlens_k are not simulated")
        refuse(max_seqlen_k is None, "max_seqlen_k must be provided if cu_seqlens_k is provided")
        refuse(seqused_k is not None, "seqused_k without a table is not simulated")
        check_offsets(cu_seqlens_k, max_seqlen_k, len(k), native, "cu_seqlens_k")
        check_numbers("cu_seqlens_k", cu_seqlens_k, batch + 1)
        keys, pages, longest = (cu_seqlens_k,), (), max_seqlen_k
    else:
        refuse(cu_seqlens_k is not None, "If cu_seqlens_k is passed in, then page table is not")
        longest = page_table.shape[1] * k.shape[1]
        check_table(page_table, seqused_k, k, batch, longest, native)
        keys, pages = (), (page_table, seqused_k)
    kv_shape = (*k.shape[:-2], k.shape[-2])
    _check_shapes({"k": (k, (*kv_shape, size)), "v": (v, (*kv_shape, of_value))})
    if out is None:
        out = q.new_empty((rows, heads, of_value))
    else:
        check_rows({"out": out}, q.dtype)
        _check_shapes({"out": (out, (rows, heads, of_value))})
    refuse(num_splits > 256, "num_splits > 256 not supported")
    refuse(sm_margin < 0, "sm_margin is below 0")
    lse_HT = q.new_empty((heads, rows), dtype=torch.float32)
    scale = 1 / math.sqrt(size) if softmax_scale is None else softmax_scale
    left = -1 if window_size_left >= longest - 1 else window_size_left
    right = -1 if window_size_right >= max_seqlen_q - 1 else window_size_right
    # One query of each task sees all of its keys.
    causal = is_causal and not (max_seqlen_q == 1 and left < 0 and right < 0)
    window = left, 0 if causal else right
    offsets = cu_seqlens_q, *keys
    if rows and k.numel():
        name, cap, none = "flash_attn_3::fwd", softcap, float("-inf")
        call = Call(name, (q, k, v), offsets, causal, *window, scale, cap, none, pages)
        launch_forward(native, call, out, lse_HT)
    elif rows:
        out.zero_()
        lse_HT.fill_(float("inf"))
    # Partial results of a split; 0 lets the package choose, which takes memory, too.
    splits = 0 if num_splits == 1 else max(num_splits, 2)
    parts = q.new_empty((splits, heads, rows, of_value), dtype=torch.float32)
    return out, lse_HT, parts, q.new_empty((splits, heads, rows), dtype=torch.float32)


def _backward(
    native: Any,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    softmax_scale: Any = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Any:
    import torch

    refuse(seqused_q is not None or seqused_k is not None, "seqused is not simulated")
    refuse(cu_seqlens_q is None or cu_seqlens_k is None, "calls without offsets are not simulated")
    refuse(max_seqlen_q is None, "max_seqlen_q must be provided if cu_seqlens_q is provided")
    refuse(max_seqlen_k is None, "max_seqlen_k must be provided if cu_seqlens_k is provided")
    gradients = [
        torch.empty_like(its) if each is None else each
        for each, its in zip((dq, dk, dv), (q, k, v), strict=True)
    ]
    made = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    check_rows({"q": q, "k": k, "v": v, "out": out, "dout": dout} | made, q.dtype)
    _check_heads(q, k, v)
    batch, (rows, heads, size), of_value = len(cu_seqlens_q) - 1, q.shape, v.shape[-1]
    check_offsets(cu_seqlens_q, max_seqlen_q, rows, native, "cu_seqlens_q")
    check_offsets(cu_seqlens_k, max_seqlen_k, len(k), native, "cu_seqlens_k")
    check_numbers("cu_seqlens_k", cu_seqlens_k, batch + 1)
    _check_shapes(
        {
            "out": (out, (rows, heads, of_value)),
            "dout": (dout, (rows, heads, of_value)),
            "v": (v, (*k.shape[:-1], of_value)),
            "dq": (gradients[0], q.shape),
            "dk": (gradients[1], k.shape),
            "dv": (gradients[2], v.shape),
        }
    )
    refuse(deterministic and size > 192, "Deterministic backward not supported for hdim 256.")
    # The kernel reads it by its address, as if it lay so.
    refuse(not softmax_lse.is_cuda, "softmax_lse must be on CUDA")
    refuse(softmax_lse.dtype != torch.float32, "softmax_lse must be float32")
    refuse(softmax_lse.shape != (heads, rows), "softmax_lse must be [heads, queries]")
    refuse(not softmax_lse.is_contiguous(), "softmax_lse must be contiguous")
    scratch = [
        q.new_empty((heads, rows + 128 * (batch + 1)), dtype=torch.float32),
        q.new_empty((heads, rows + 128 * (batch + 1)), dtype=torch.float32),
        q.new_empty((heads, rows + 128 * (batch + 1), size), dtype=torch.float32),
    ]
    grouped = (k.shape[1], len(k) + 128 * (batch + 1)) if heads != k.shape[1] else (0, 0)
    scratch += [torch.zeros((*grouped, each), device=q.device) for each in (size, of_value)]
    scale = 1 / math.sqrt(size) if softmax_scale is None else softmax_scale
    left = -1 if window_size_left >= max_seqlen_k - 1 else window_size_left
    right = -1 if window_size_right >= max_seqlen_q - 1 else window_size_right
    window = left, 0 if is_causal else right
    if rows and len(k):
        name, offsets = "flash_attn_3::bwd", (cu_seqlens_q, cu_seqlens_k)
        causal, none = is_causal or window == (-1, 0), float("-inf")
        call = Call(name, (q, k, v), offsets, causal, *window, scale, softcap, none)
        launch_backward(native, call, dout, out, softmax_lse, gradients)
    else:
        for each in gradients:
            each.zero_()
    return tuple(scratch)
