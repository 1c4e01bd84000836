"""What the stand-ins for FlashAttention's kernels share.

They compute with `TorchCpuKernel`. They refuse what the real kernel refuses. What it would not
compute, or would read beyond the end of its input, is an error, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from support.simgpu.lacking import launch

HALVES = ("torch.float16", "torch.bfloat16")


def refuse(condition: Any, why: str) -> None:
    """Raises what a kernel's own check would, if its condition holds."""
    if condition:
        raise RuntimeError(f"FlashAttention: {why}")


def is_aligned(tensor: Any) -> bool:
    """Whether all rows begin at multiples of 16 bytes, as vector loads need."""
    offsets = (tensor.storage_offset(), *tensor.stride()[:-1])
    return all(offset * tensor.itemsize % 16 == 0 for offset in offsets)


def check_rows(tensors: dict[str, Any], dtype: Any) -> None:
    """Checks that are those of the sources, and what the kernels' loads rely on."""
    refuse(str(dtype) not in HALVES, f"only supports fp16 and bf16 data type, and not {dtype}")
    for name, each in tensors.items():
        refuse(not each.is_cuda, f"{name} must be on CUDA")
        refuse(each.dtype != dtype, f"{name} must have the queries' dtype")
        refuse(each.stride(-1) != 1, f"{name} must have a contiguous last dimension")
        refuse(not is_aligned(each), f"{name} is not aligned to 16 bytes: strides {each.stride()}")


def check_numbers(name: str, numbers: Any, length: int) -> None:
    """Checks a vector of whole numbers: lengths, or offsets of tasks."""
    refuse(not numbers.is_cuda, f"{name} must be on CUDA")
    refuse(str(numbers.dtype) != "torch.int32", f"{name} must have dtype int32")
    refuse(not numbers.is_contiguous(), f"{name} must be contiguous")
    refuse(numbers.shape != (length,), f"{name} must have shape {(length,)}")


def check_offsets(offsets: Any, longest: int, rows: int, native: Any, name: str) -> None:
    """Checks where tasks begin, and that all of their rows are there and are computed."""
    check_numbers(name, offsets, len(offsets))
    found = native.as_cpu(offsets)
    refuse(found.diff().max() > longest, f"{name}: rows beyond {longest} would not be computed")
    refuse(int(found[-1]) > rows, f"{name} goes beyond the last of {rows} rows")


def check_table(table: Any, used: Any, pages: Any, tasks: int, most: int, native: Any) -> None:
    """Checks a table of pages, `[tasks, columns]`, and the rows that are used of each line."""
    refuse(not table.is_cuda, "the table of pages must be on CUDA")
    refuse(str(table.dtype) != "torch.int32", "the table of pages must have dtype int32")
    refuse(table.stride(-1) != 1, "the table of pages must have a contiguous last dimension")
    refuse(len(table) != tasks, "the table of pages must have a line for each task")
    refuse(used is None, "seqused_k must be given: all rows of the table would be read")
    check_numbers("seqused_k", used, tasks)
    number, size = pages.shape[:2]
    lines = zip(native.as_cpu(table).tolist(), native.as_cpu(used).tolist(), strict=True)
    for line, rows in lines:
        refuse(rows > min(most, len(line) * size), f"seqused_k: {rows} rows of {most}")
        read = line[: -(-rows // size)]
        refuse(any(not 0 <= page < number for page in read), f"pages {read} of {number}")


@dataclass(frozen=True)
class Call:
    """A call of a kernel.

    Attributes:
        name: name of the operator.
        rows: queries, keys and values; of a table keys and values are pages.
        offsets: first query of each task, and the total; likewise keys, unless there is a table.
        causal: whether tasks end on the diagonal.
        left: earlier keys that a query sees; None, or below 0: all.
        right: later ones.
        scale: factor of the scores.
        softcap: bound of the scores; None or 0: none.
        no_keys: LSE of a row that sees no key.
        table: pages of each task, and how many rows of them are used.
    """

    name: str
    rows: Sequence[Any]
    offsets: Sequence[Any]
    causal: bool
    left: int | None
    right: int | None
    scale: float
    softcap: float | None
    no_keys: float
    table: Sequence[Any] = ()

    def tasks(self, cu_q: Any, cu_k: Any) -> Any:
        """The tasks as our kernels take them."""
        from distca.attention.kernel import KernelTasks

        left = None if self.left is None or self.left < 0 else self.left
        causal = self.causal or self.right == 0
        refuse(not causal and left is not None, "windows that see later keys are not simulated")
        return KernelTasks(cu_q, cu_k, causal, left, self.scale, self.softcap or None)


def _in_order(k: Any, v: Any, table: Any, used: Any) -> Any:
    """Keys and values of a table's lines, one line after the other, and their offsets."""
    import torch

    lines = list(zip(table.long(), used.tolist(), strict=True))
    size = k.shape[1]
    k, v = (
        torch.cat([x[line[: -(-n // size)]].flatten(0, 1)[:n] for line, n in lines]) for x in (k, v)
    )
    return k, v, torch.cat([torch.zeros(1, dtype=torch.int32), used.cumsum(0).int()])


def launch_forward(native: Any, call: Call, out: Any, lse_HT: Any) -> None:
    """Computes the output, and the LSE, `[heads, queries]`."""

    def run(*tensors: Any) -> None:
        from distca.attention.torch_cpu import TorchCpuKernel

        *reads, out, lse_HT = tensors
        q, k, v = reads[:3]
        if call.table:
            k, v, cu_k = _in_order(k, v, *reads[-2:])
        else:
            cu_k = reads[4]
        found, lse_TH = TorchCpuKernel().forward(q, k, v, call.tasks(reads[3], cu_k))
        out.copy_(found)
        lse_HT.copy_(lse_TH.masked_fill(lse_TH == float("-inf"), call.no_keys).T)

    launch(native, call.name, [*call.rows, *call.offsets, *call.table], [out, lse_HT], run)


def launch_backward(
    native: Any, call: Call, dout: Any, out: Any, lse_HT: Any, gradients: Sequence[Any]
) -> None:
    """Computes the gradients of queries, keys and values."""

    def run(*tensors: Any) -> None:
        from distca.attention.torch_cpu import TorchCpuKernel

        dout, q, k, v, out, lse_HT, cu_q, cu_k, *into = tensors
        lse_TH = lse_HT.T.contiguous()
        # The kernels take plus infinity, too, as a row without gradient.
        lse_TH = lse_TH.masked_fill(lse_TH == float("inf"), float("-inf"))
        found = TorchCpuKernel().backward(dout, q, k, v, out, lse_TH, call.tasks(cu_q, cu_k))
        for gradient, its in zip(into, found, strict=True):
            gradient.copy_(its)

    launch(native, call.name, [dout, *call.rows, out, lse_HT, *call.offsets], gradients, run)
