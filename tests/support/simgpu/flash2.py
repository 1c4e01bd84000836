"""A stand-in for torch's own FlashAttention 2, with the checks of its source (`flash_api.cpp`)."""

from __future__ import annotations

from typing import Any

from support.simgpu.flash import (
    Call,
    check_offsets,
    check_rows,
    check_table,
    launch_backward,
    launch_forward,
    refuse,
)

_libraries: list[Any] = []


def install(native: Any) -> None:
    """Registers it for the simulated devices."""
    import torch

    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)

    def forward(q: Any, k: Any, v: Any, *values: Any, **options: Any) -> Any:
        return _flash_forward(native, q, k, v, *values, **options)

    def backward(*values: Any, **options: Any) -> Any:
        return _flash_backward(native, *values, **options)

    for name, call in (
        ("_flash_attention_forward", forward),
        ("_flash_attention_backward", backward),
    ):
        library.impl(name, call, "CUDA")


def _flash_forward(
    native: Any,
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    most_q: int,
    most_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: Any = None,
    window_size_left: Any = None,
    window_size_right: Any = None,
    seqused_k: Any = None,
    alibi_slopes: Any = None,
    block_table: Any = None,
    **_: Any,
) -> Any:
    import torch

    check_rows({"q": q, "k": k, "v": v}, q.dtype)
    batch, (rows, heads, size) = len(cu_q) - 1, q.shape
    kv_heads = k.shape[-2]
    refuse(size > 256 or size % 8, f"head dimension {size}")
    refuse(heads % kv_heads, "queries' heads must be a multiple of the keys'")
    check_offsets(cu_q, most_q, rows, native, "cu_seqlens_q")
    refuse(len(cu_k) != batch + 1, "cu_seqlens_k must have one more element than tasks")
    if block_table is None:
        check_offsets(cu_k, most_k, len(k), native, "cu_seqlens_k")
    else:
        refuse(k.shape[1] % 256, "Paged KV cache block size must be divisible by 256")
        check_table(block_table, seqused_k, k, batch, most_k, native)
    window = window_size_left, window_size_right
    # The heads of a group take the place of queries: then each task has exactly one query.
    windowed = any(side is not None and side >= 0 for side in window)
    swapped = most_q == 1 and heads > kv_heads and not windowed
    refuse(
        swapped and rows != batch,
        f"shape '[{batch}, {kv_heads}, {heads // kv_heads}, {size}]' is invalid for input of size "
        f"{q.numel()}",
    )
    out, lse_HT = torch.empty_like(q), q.new_empty((heads, rows), dtype=torch.float32)
    table = () if block_table is None else (block_table, seqused_k)
    name, no_keys = "_flash_attention_forward", float("inf")
    call = Call(name, (q, k, v), (cu_q, cu_k), causal, *window, scale, None, no_keys, table)
    launch_forward(native, call, out, lse_HT)
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    return out, lse_HT, state, state.new_empty(0), q.new_empty(0)


def _flash_backward(
    native: Any,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse_HT: Any,
    cu_q: Any,
    cu_k: Any,
    most_q: int,
    most_k: int,
    dropout: float,
    causal: bool,
    state: Any,
    unused: Any,
    *,
    scale: Any = None,
    window_size_left: Any = None,
    window_size_right: Any = None,
) -> Any:
    import torch

    check_rows({"dout": dout, "q": q, "k": k, "v": v, "out": out}, q.dtype)
    refuse(lse_HT.dtype != torch.float32, "softmax_lse must be float32")
    refuse(lse_HT.shape != (q.shape[1], len(q)), "softmax_lse must be [heads, queries]")
    refuse(not state.is_cuda, "rng_state must be on CUDA")
    check_offsets(cu_q, most_q, len(q), native, "cu_seqlens_q")
    check_offsets(cu_k, most_k, len(k), native, "cu_seqlens_k")
    gradients = [torch.empty_like(each) for each in (q, k, v)]
    name, window = "_flash_attention_backward", (window_size_left, window_size_right)
    offsets = cu_q, cu_k
    call = Call(name, (q, k, v), offsets, causal, *window, scale, None, float("inf"))
    launch_backward(native, call, dout, out, lse_HT, gradients)
    return tuple(gradients)
