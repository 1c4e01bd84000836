"""Our own attention of decodes on CPUs, in C++: it reads a pool's rows where they lie.

torch's operator takes one sequence at a time, and one run of neighbouring blocks. With many short
sequences its calls take longer than what they compute.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from distca.attention.kernel import KernelTasks, Outputs
from distca.attention.paged import PagedKeys
from distca.native import HOST_FLAGS, host_compiler, kept, run

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
"""Folder of the native sources."""

_FLAGS = (
    *(*HOST_FLAGS, "-march=native"),
    # Sums may be taken in any order; infinities and NaN stay what they are.
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
)
_DTYPES = (torch.float32, torch.bfloat16)
_MOST_QUERIES = 4
"""Queries of a task up to which this is faster than torch's operator."""
_WORK_OF_A_THREAD = 1 << 22
"""Products of numbers that are worth another thread."""

_TYPES: dict[str, type[ctypes.c_int | ctypes.c_int64 | ctypes.c_void_p | ctypes.c_float]] = {
    "i": ctypes.c_int,
    "n": ctypes.c_int64,
    "p": ctypes.c_void_p,
    "f": ctypes.c_float,
}
_ARGUMENTS = "ipnppnnpnpnpnpppnnnnnffn"


def paged_library(sources: Path = SOURCES, cache: Path | None = None) -> Path:
    """Returns the path of the compiled code, compiled if it is not cached.

    Args:
        sources: folder of the sources.
        cache: folder of compiled files; None: `default_cache()`.

    Raises:
        RuntimeError: no compiler is installed, it fails, or the cache cannot be written.
    """
    compiler = host_compiler("attention of decodes on CPUs", "decode more slowly, by torch")
    # What the compiler knows of this processor.
    features = run([compiler, "-march=native", "-xc++", "-E", "-dM", "/dev/null"])
    key = (run([compiler, "--version"]), platform.machine(), features, *_FLAGS)

    def build(into: Path) -> None:
        run([compiler, *_FLAGS, str(sources / "paged.cpp"), "-o", str(into)])

    return kept("paged.so", sources, key, build, cache)


@functools.cache
def load_paged() -> Callable[..., None] | None:
    """Loads the compiled code; None, and a warning, if it cannot be compiled."""
    try:
        function = ctypes.CDLL(str(paged_library())).distca_attend_paged
    except (RuntimeError, OSError) as error:
        logger.warning("decodes on CPUs are slower than they could be: %s", error)
        return None
    function.argtypes, function.restype = [_TYPES[each] for each in _ARGUMENTS], None
    compiled: Callable[..., None] = function
    return compiled


def suits(q_THD: torch.Tensor, k_SHD: torch.Tensor, tasks: KernelTasks) -> bool:
    """Returns whether the compiled code computes tasks, and is fast: they have few queries each."""
    if q_THD.dtype not in _DTYPES or k_SHD.dtype != q_THD.dtype or tasks.causal:
        return False
    queries = np.diff(tasks.cu_seqlens_q.numpy())
    return bool((queries <= _MOST_QUERIES).all())


def attend_paged(
    function: Callable[..., None],
    q_THD: torch.Tensor,
    k_SHD: torch.Tensor,
    v_SHD: torch.Tensor,
    tasks: KernelTasks,
    keys: PagedKeys,
    into: Outputs,
) -> None:
    """Does what `PagedKernel.forward_paged` does, for tasks that it `suits`.

    Args:
        function: the compiled code, of `load_paged`.
        q_THD: see `PagedKernel.forward_paged`, as all that follows.
        k_SHD: its heads, and those of `v_SHD`, lie side by side.
        v_SHD: values.
        tasks: tasks.
        keys: their keys.
        into: where outputs and LSE are written.
    """
    out, lse = into
    for rows in (q_THD, k_SHD, v_SHD, out):
        assert rows[:1].is_contiguous(), "heads of a row lie apart"
    host, edges = keys.host, tasks.cu_seqlens_q
    first, used = (np.ascontiguousarray(each, dtype=np.int64) for each in (keys.first, keys.used))
    assert host.dtype == np.int32
    assert host.shape[1] < 2 or host.strides[1] == host.itemsize
    assert edges.dtype == torch.int32
    assert edges.is_contiguous()
    (_, heads, dim), kv_heads = q_THD.shape, k_SHD.shape[1]
    work = int((used - first).sum()) * heads * dim
    threads = min(torch.get_num_threads(), 1 + work // _WORK_OF_A_THREAD, len(first) * kv_heads)
    function(
        *(q_THD.dtype == torch.bfloat16, q_THD.data_ptr(), q_THD.stride(0)),
        *(k_SHD.data_ptr(), v_SHD.data_ptr(), k_SHD.stride(0), v_SHD.stride(0)),
        *(out.data_ptr(), out.stride(0), lse.data_ptr(), lse.stride(0)),
        *(host.ctypes.data, host.strides[0] // host.itemsize),
        *(first.ctypes.data, used.ctypes.data, edges.data_ptr(), len(first), keys.block_size),
        *(heads, kv_heads, dim, tasks.softmax_scale, tasks.softcap or 0.0, max(threads, 1)),
    )
