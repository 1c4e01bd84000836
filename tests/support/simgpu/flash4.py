"""A stand-in for the functions of `flash-attn-4`, with the checks of their source.

What we never pass is no parameter of it.
"""

from __future__ import annotations

import math
from typing import Any

from support.simgpu import cuda
from support.simgpu.flash import (
    HALVES,
    Call,
    check_offsets,
    check_table,
    is_aligned,
    launch_backward,
    launch_forward,
    refuse,
)


def _check(condition: Any, why: str) -> None:
    """The package's checks are assertions."""
    assert condition, why


def _by_rows(tensor: Any) -> Any:
    """The package copies what its kernels cannot load, silently."""
    import torch

    begins_aligned = tensor.storage_offset() * tensor.itemsize % 16 == 0
    by_rows = tensor.is_contiguous() or (tensor.stride(-1) == 1 and is_aligned(tensor))
    if begins_aligned and by_rows:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _check_given(tensor: Any, name: str, shape: tuple[int, ...], like: Any) -> None:
    _check(tensor.shape == shape, f"{name} shape {tensor.shape} != expected {shape}")
    _check(tensor.dtype == like.dtype, f"{name} dtype {tensor.dtype} != expected {like.dtype}")
    _check(tensor.device == like.device, f"{name} device {tensor.device} != {like.device}")
    aligned = 0 not in tensor.stride() and tensor.stride(-1) == 1 and is_aligned(tensor)
    _check(aligned, f"{name} must have aligned strides and a contiguous last dimension")


def _check_inputs(tensors: dict[str, Any], numbers: dict[str, Any]) -> None:
    dtype = tensors["v"].dtype
    _check(str(dtype) in HALVES, "inputs must be float16, bfloat16, fp8 e4m3fn, or fp8 e5m2")
    _check(all(t.dtype == dtype for t in tensors.values()), "q, k, and v must have the same dtype")
    for name, each in numbers.items():
        _check(str(each.dtype) == "torch.int32", f"{name} must be int32")
        _check(each.stride(-1) == 1, f"{name} must be contiguous")
    on_gpu = all(each.is_cuda for each in (*tensors.values(), *numbers.values()))
    _check(on_gpu, "inputs must be on CUDA device")
    heads, kv_heads = (tensors[name].shape[-2] for name in ("q", "k"))
    _check(heads % kv_heads == 0, "num_head must be divisible by num_head_kv")
    sizes = tensors["q"].shape[-1], tensors["v"].shape[-1]
    hopper = cuda.capability == cuda.HOPPER
    fit = all(8 <= size <= (256 if hopper else 128) and size % 8 == 0 for size in sizes)
    fit = fit or (sizes == (192, 128) and not hopper)
    _check(fit, f"(head_dim, head_dim_v)={sizes} is not supported on SM{90 if hopper else 100}")


def _tile_of_keys(size: int, of_value: int, causal: bool, local: bool) -> int:
    """Keys of a tile of the forward kernel."""
    if size <= 64:
        return 128
    if size <= 96:
        return 128 if causal or local else 144
    if size <= 128:
        return 128
    if size <= 192:
        return 96 if local else 128 if of_value <= 128 else 112
    return 64 if local else 80


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    seqused_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    page_table: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    softcap: Any = None,
    window_size_left: Any = None,
    window_size_right: Any = None,
    learnable_sink: Any = None,
    num_splits: int = 1,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """`_flash_attn_fwd`, without the parameters that tune it, and those for other inputs."""
    import torch

    native = cuda.native
    q, k, v = map(_by_rows, (q, k, v))
    batch, (rows, heads, size), of_value = len(cu_seqlens_q) - 1, q.shape, v.shape[-1]
    numbers = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    numbers = {name: each for name, each in numbers.items() if each is not None}
    kv_shape = tuple(k.shape[:-1])
    _check(v.shape == (*kv_shape, of_value), f"v has shape {v.shape}, and k {k.shape}")
    _check(k.shape[-1] == size, f"k has heads of {k.shape[-1]}, and q of {size}")
    if page_table is not None:
        _check(cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k")
        _check(str(page_table.dtype) == "torch.int32", "page_table must be int32")
        _check(page_table.shape == (batch, page_table.shape[1]), "page_table must have batch lines")
    _check_inputs({"q": q, "k": k, "v": v}, numbers)
    _check(num_splits == 1, "SplitKV not supported on SM 9.0")
    if out is None:
        out = q.new_empty((rows, heads, of_value))
    else:
        _check_given(out, "out", (rows, heads, of_value), q)
    lse_HT = q.new_empty((heads, rows), dtype=torch.float32)
    window = window_size_left, 0 if causal else window_size_right
    if not rows or not k.numel():
        out.zero_()
        lse_HT.fill_(float("-inf"))
        return out, lse_HT if return_lse else None, None, None, None
    longest = rows if max_seqlen_q is None else max_seqlen_q
    check_offsets(cu_seqlens_q, longest, rows, native, "cu_seqlens_q")
    offsets, pages = (cu_seqlens_q, cu_seqlens_k), ()
    if page_table is None:
        _check(cu_seqlens_k is not None, "calls without cu_seqlens_k are not simulated")
        _check(seqused_k is None, "seqused_k without a table is not simulated")
        _check(cu_seqlens_k.shape == (batch + 1,), "cu_seqlens_k must have shape (batch_size + 1,)")
        keys = len(k) if max_seqlen_k is None else max_seqlen_k
        check_offsets(cu_seqlens_k, keys, len(k), native, "cu_seqlens_k")
    else:
        keys = page_table.shape[1] * k.shape[1] if max_seqlen_k is None else max_seqlen_k
        check_table(page_table, seqused_k, k, batch, keys, native)
        tile = _tile_of_keys(size, of_value, causal, window[0] is not None)
        by_tiles = k.shape[1] == tile
        regular = size % 16 == 0 and of_value % 16 == 0
        _check(by_tiles or regular, "Paged KV does not support irregular head dim")
        offsets, pages = (cu_seqlens_q,), (page_table, seqused_k)
    scale = 1 / math.sqrt(size) if softmax_scale is None else softmax_scale
    name, none = "flash_attn_4::fwd", float("-inf")
    call = Call(name, (q, k, v), offsets, causal, *window, scale, softcap, none, pages)
    launch_forward(native, call, out, lse_HT)
    if learnable_sink is not None:
        _add_sink(learnable_sink, out, lse_HT)
    return out, lse_HT if return_lse else None, None, None, None


def _add_sink(sink_H: Any, out: Any, lse_HT: Any) -> None:
    """Gives each row the sink's share of its weights."""
    from distca.attention.sink import with_sink

    _check(sink_H.shape == (out.shape[1],), "learnable_sink must have a number for each head")
    kinds = (*HALVES, "torch.float32")
    _check(str(sink_H.dtype) in kinds, "learnable_sink must be float16, bfloat16, or float32")
    _check(sink_H.is_cuda, "inputs must be on CUDA device")
    found, lse_TH = with_sink(out, lse_HT.T, sink_H)
    out.copy_(found)
    lse_HT.copy_(lse_TH.T)


def backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    dout: Any,
    lse: Any,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: Any = None,
    window_size_right: Any = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
) -> Any:
    """`_flash_attn_bwd`, without the parameters that tune it, and those for other inputs."""
    import torch

    native = cuda.native
    q, k, v, out, dout, lse = map(_by_rows, (q, k, v, out, dout, lse))
    batch, (rows, heads, size), of_value = len(cu_seqlens_q) - 1, q.shape, v.shape[-1]
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout}
    _check_inputs(tensors, {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k})
    _check(v.shape == (*k.shape[:-1], of_value), f"v has shape {v.shape}, and k {k.shape}")
    _check(cu_seqlens_k.shape == (batch + 1,), "cu_seqlens_k must have shape (batch_size + 1,)")
    for name in ("out", "dout"):
        _check(tensors[name].shape == (rows, heads, of_value), f"{name} has another shape")
    _check(lse.shape == (heads, rows), "lse must have shape (num_head, total_q)")
    _check(lse.dtype == torch.float32, "lse must be float32")
    _check(lse.is_cuda, "inputs must be on CUDA device")
    gradients = []
    for name, each, its in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        gradients.append(torch.empty_like(its) if each is None else each)
        _check_given(gradients[-1], name, tuple(its.shape), its)
    # The compiled kernel takes no empty tensors.
    refuse(not rows or not len(k), "a dimension is 0")
    most_q = rows if max_seqlen_q is None else max_seqlen_q
    most_k = len(k) if max_seqlen_k is None else max_seqlen_k
    check_offsets(cu_seqlens_q, most_q, rows, native, "cu_seqlens_q")
    check_offsets(cu_seqlens_k, most_k, len(k), native, "cu_seqlens_k")
    scale = 1 / math.sqrt(size) if softmax_scale is None else softmax_scale
    window = window_size_left, 0 if causal else window_size_right
    name, none, offsets = "flash_attn_4::bwd", float("-inf"), (cu_seqlens_q, cu_seqlens_k)
    call = Call(name, (q, k, v), offsets, causal, *window, scale, softcap, none)
    launch_backward(native, call, dout, out, lse, gradients)
    return tuple(gradients)
