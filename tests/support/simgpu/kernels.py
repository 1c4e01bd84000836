"""Stand-ins for attention kernels of GPUs, with the checks of the kernels' own sources.

They compute with `TorchCpuKernel`. They refuse what a real kernel refuses. What it would not
compute, or would read beyond the end of its input, is an error, too.
"""

from __future__ import annotations

from typing import Any

from support.simgpu.lacking import launch

_libraries: list[Any] = []


def install(native: Any) -> None:
    """Registers torch's own FlashAttention 2 for the simulated devices."""
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


def refuse(condition: Any, why: str) -> None:
    """Raises what a kernel's own check would, if its condition holds."""
    if condition:
        raise RuntimeError(f"FlashAttention: {why}")


def _check_rows(tensors: dict[str, Any], dtype: Any) -> None:
    """Checks that are those of `flash_api.cpp`, and what its vector loads rely on."""
    import torch

    refuse(dtype not in (torch.float16, torch.bfloat16), "only supports fp16 and bf16 data type")
    for name, each in tensors.items():
        refuse(not each.is_cuda, f"{name} must be on CUDA")
        refuse(each.dtype != dtype, f"{name} must have the queries' dtype")
        refuse(each.stride(-1) != 1, f"{name} must have a contiguous last dimension")
        offsets = (each.storage_offset(), *each.stride()[:-1])
        aligned = all(offset * each.itemsize % 16 == 0 for offset in offsets)
        refuse(not aligned, f"{name} is not aligned to 16 bytes: strides {each.stride()}")


def _check_offsets(offsets: Any, longest: int, rows: int, native: Any, name: str) -> None:
    import torch

    refuse(not offsets.is_cuda, f"{name} must be on CUDA")
    refuse(offsets.dtype != torch.int32, f"{name} must have dtype int32")
    refuse(not offsets.is_contiguous(), f"{name} must be contiguous")
    found = native.as_cpu(offsets)
    refuse(found.diff().max() > longest, f"{name}: rows beyond {longest} would not be computed")
    refuse(int(found[-1]) > rows, f"{name} goes beyond the last of {rows} rows")


def _in_order(k: Any, v: Any, table: Any, used: Any) -> Any:
    """Keys and values of a table's lines, one line after the other, and their offsets."""
    import torch

    lines = list(zip(table.long(), used.tolist(), strict=True))
    k, v = (torch.cat([x[line].flatten(0, 1)[:n] for line, n in lines]) for x in (k, v))
    return k, v, torch.cat([torch.zeros(1, dtype=torch.int32), used.cumsum(0).int()])


def _tasks(cu_q: Any, cu_k: Any, causal: bool, left: Any, scale: Any) -> Any:
    from distca.attention.kernel import KernelTasks

    return KernelTasks(cu_q, cu_k, causal, None if left is None or left < 0 else left, scale)


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

    _check_rows({"q": q, "k": k, "v": v}, q.dtype)
    batch, (rows, heads, size) = len(cu_q) - 1, q.shape
    kv_heads = k.shape[-2]
    refuse(size > 256 or size % 8, f"head dimension {size}")
    refuse(heads % kv_heads, "queries' heads must be a multiple of the keys'")
    _check_offsets(cu_q, most_q, rows, native, "cu_seqlens_q")
    refuse(len(cu_k) != batch + 1, "cu_seqlens_k must have one more element than tasks")
    reads = [q, k, v, cu_q, cu_k]
    if block_table is not None:
        refuse(not block_table.is_cuda, "block_table must be on CUDA")
        refuse(block_table.dtype != torch.int32, "block_table must have dtype int32")
        refuse(block_table.stride(-1) != 1, "block_table must be contiguous")
        refuse(len(block_table) != batch, "block_table must have a line for each task")
        refuse(k.shape[1] % 256, "Paged KV cache block size must be divisible by 256")
        refuse(seqused_k is None or seqused_k.dtype != torch.int32, "seqused_k must be int32")
        refuse(not seqused_k.is_cuda, "seqused_k must be on CUDA")
        refuse(len(seqused_k) != batch, "seqused_k must have a number for each task")
        refuse(int(native.as_cpu(seqused_k).max()) > most_k, "keys beyond max_seqlen_k")
        reads += [block_table, seqused_k]
    else:
        _check_offsets(cu_k, most_k, len(k), native, "cu_seqlens_k")
    windowed = any(side is not None and side >= 0 for side in (window_size_left, window_size_right))
    # The heads of a group take the place of queries: then each task has exactly one query.
    swapped = most_q == 1 and heads > kv_heads and not windowed
    refuse(
        swapped and rows != batch,
        f"shape '[{batch}, {kv_heads}, {heads // kv_heads}, {size}]' is invalid for input of size "
        f"{q.numel()}",
    )
    out, lse_HT = torch.empty_like(q), q.new_empty((heads, rows), dtype=torch.float32)

    def call(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *more: Any) -> None:
        from distca.attention.torch_cpu import TorchCpuKernel

        *paged, out, lse_HT = more
        if paged:
            k, v, cu_k = _in_order(k, v, *paged)
        tasks = _tasks(cu_q, cu_k, causal, window_size_left, scale)
        found, lse_TH = TorchCpuKernel().forward(q, k, v, tasks)
        out.copy_(found)
        # Version 2 gives plus infinity to a row without keys.
        lse_HT.copy_(lse_TH.masked_fill(lse_TH == float("-inf"), float("inf")).T)

    launch(native, "_flash_attention_forward", reads, [out, lse_HT], call)
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

    _check_rows({"dout": dout, "q": q, "k": k, "v": v, "out": out}, q.dtype)
    refuse(lse_HT.dtype != torch.float32, "softmax_lse must be float32")
    refuse(lse_HT.shape != (q.shape[1], len(q)), "softmax_lse must be [heads, queries]")
    refuse(not state.is_cuda, "rng_state must be on CUDA")
    _check_offsets(cu_q, most_q, len(q), native, "cu_seqlens_q")
    _check_offsets(cu_k, most_k, len(k), native, "cu_seqlens_k")
    gradients = [torch.empty_like(each) for each in (q, k, v)]

    def call(*tensors: Any) -> None:
        from distca.attention.torch_cpu import TorchCpuKernel

        dout, q, k, v, out, lse_HT, cu_q, cu_k, *into = tensors
        lse_TH = lse_HT.T.contiguous()
        # The backward pass takes plus infinity as a row without gradient.
        lse_TH = lse_TH.masked_fill(lse_TH == float("inf"), float("-inf"))
        tasks = _tasks(cu_q, cu_k, causal, window_size_left, scale)
        found = TorchCpuKernel().backward(dout, q, k, v, out, lse_TH, tasks)
        for gradient, its in zip(into, found, strict=True):
            gradient.copy_(its)

    reads = [dout, q, k, v, out, lse_HT, cu_q, cu_k]
    launch(native, "_flash_attention_backward", reads, gradients, call)
    return tuple(gradients)
