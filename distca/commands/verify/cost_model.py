"""Stage: the cost model's figures of this machine, for planning and for `distca simulate`."""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from distca.attention import KernelTasks, select_kernel
from distca.attention.kernel_timing import (
    backward_over_forward,
    fastest,
    held_out_errors,
    profile_kernel,
)
from distca.commands.verify.predictions import described_cluster
from distca.commands.verify.stage import Context, Fault, Found
from distca.cost.volume import AttentionShape
from distca.simulate import Cluster, peak_tflops

_HEADS = 8, 2, 128
_LEAST, _MOST, _MOST_ON_GPUS, _WIDEST = 64, 4096, 131072, 4096
_BUDGET, _HELD_OUT = 0.002, 6
PROFILE, CLUSTER = "profile.json", "cluster.json"


def measure_costs(context: Context) -> Found:
    """Measures rank 0's kernel and matrix products; writes `profile.json` and `cluster.json`."""
    kernel = select_kernel(context.device.type)
    most = _MOST_ON_GPUS if context.on_gpu else _MOST
    q, k, v = (
        torch.randn(most, heads, 128, device=context.device, dtype=context.dtype)
        for heads in (8, 2, 2)
    )

    def attend(tokens: int) -> None:
        edges = torch.tensor([0, tokens], dtype=torch.int32)
        kernel.forward(
            q[:tokens], k[:tokens], v[:tokens], KernelTasks(edges, edges, True, None, 0.1)
        )

    longest = context.largest_size(_LEAST, most, attend)
    a = torch.randn(_WIDEST, _WIDEST, device=context.device, dtype=context.dtype)
    width = context.largest_size(_LEAST, _WIDEST, lambda size: a[:size, :size].mm(a[:size, :size]))
    found = _measure(context, longest, a[:width, :width]) if context.rank == 0 else None
    agreed = context.gather(found)[0]
    assert isinstance(agreed, Found)
    return agreed


def _measure(context: Context, longest: int, a: torch.Tensor) -> Found:
    """Measures tasks of at most `longest` tokens, and the product of a matrix with itself."""
    kind = context.device.type
    shape = AttentionShape(*_HEADS, dtype_bytes=context.dtype.itemsize)
    profile = profile_kernel(shape, longest, kind, budget=_BUDGET)
    errors = held_out_errors(profile, kind, _HELD_OUT)
    ratio = backward_over_forward(shape, longest, kind)
    attention, products = profile.flops_per_second / 1e12, _product_tflops(context, a)
    known = peak_tflops(torch.cuda.get_device_name()) if context.on_gpu else None
    peak = max(known or 0.0, products, attention)
    figures = {"memory_gb": 16.0}
    if context.on_gpu:
        gpu = torch.cuda.get_device_properties(context.device)
        figures = {
            "memory_gb": gpu.total_memory / 1e9,
            "multiprocessors": gpu.multi_processor_count,
        }
    figures |= {
        "attention_tflops": attention,
        "backward_over_forward": ratio,
        "product_tflops": products,
        "peak_tflops": peak,
        "median_error": statistics.median(errors),
        "longest": float(longest),
    }
    where = "not written: give --output DIR"
    if context.output is not None:
        older = _older(context.output / CLUSTER)
        cluster = described_cluster(context, figures, profile.description, older)
        try:
            for name, save in ((PROFILE, profile.save), (CLUSTER, cluster.save)):
                save(context.output / name)
        except ValueError as error:
            cure = "make room or give another --output, then run it again"
            raise Fault(str(error), cure) from error
        where = f"in {context.output / PROFILE} and {CLUSTER}"
    return Found(
        f"attention {attention:.3g} TFLOP/s forward, {ratio:.1f} times as long backward; products "
        f"{products:.3g} TFLOP/s; other lengths, up to {longest:,} tokens, are predicted within "
        f"{statistics.median(errors):.0%} (median); {where}",
        figures,
    )


def _older(path: Path) -> Cluster | None:
    """Reads an earlier description of this machine; None: there is no readable one."""
    try:
        return Cluster.load(path)
    except ValueError:
        return None


def _product_tflops(context: Context, a: torch.Tensor) -> float:
    """Rate of the product of a matrix with itself, 10^12 operations a second."""

    def multiply() -> None:
        a.mm(a)

    return 2 * len(a) ** 3 / fastest(multiply, context.synchronize, 0.1) / 1e12
