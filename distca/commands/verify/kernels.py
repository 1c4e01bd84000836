"""Stage: each installed attention kernel against attention as it is defined."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from distca.attention import KernelTasks, PagedKernel
from distca.attention.choice import check_head_dim, kernels_for
from distca.attention.filled_heads import FilledHeadsKernel
from distca.attention.paged import PagedKeys
from distca.attention.reference import attend_tasks
from distca.attention.torch_cpu import TorchCpuKernel
from distca.commands.verify.stage import SEND, Context, Fault, Found

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.03}
"""Most that a number may be off, over the largest number of its tensor."""
_SCALE, _SOFTCAP = 0.125, 2.0
_BLOCK = 256
_CURE = f"uninstall it, so that another kernel is used, and {SEND}"


@dataclass(frozen=True)
class Heads:
    """Heads of a call.

    Attributes:
        name: what models have them.
        heads: query heads.
        kv_heads: key-value heads.
        head_dim: elements of a query's and a key's head.
        value_dim: elements of a value's head.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


HEADS = (
    Heads("GQA", 8, 2, 128, 128),
    Heads("MHA", 4, 4, 64, 64),
    Heads("MLA", 2, 2, 192, 128),
)


@dataclass(frozen=True)
class Case:
    """Tasks of a call.

    Attributes:
        name: what is particular.
        lengths: queries and keys of each task.
        causal: whether the tasks end on the diagonal.
        window: earlier tokens that a query sees; None: all.
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    causal: bool
    window: int | None = None

    def tasks(self, softcap: float | None = None) -> KernelTasks:
        """Returns the tasks as kernels take them."""
        q, kv = (np.cumsum([0, *each], dtype=np.int32) for each in zip(*self.lengths, strict=True))
        edges = torch.from_numpy(q), torch.from_numpy(kv)
        return KernelTasks(*edges, self.causal, self.window, _SCALE, softcap)


CASES = (
    Case("odd sizes", ((64, 64), (1, 1), (257, 257)), True),
    Case("more keys than queries", ((5, 64), (1, 300), (128, 129)), True),
    Case("full rectangles", ((7, 100), (1, 1), (130, 3)), False),
    Case("windows", ((300, 300), (5, 64), (1, 9), (140, 200)), True, 17),
    Case("tasks without keys", ((3, 0), (4, 4)), True),
    Case("one query each", ((1, 40), (1, 300)), False),
)
_LINES = np.array([[3, 1], [0, 4], [2, 5]], dtype=np.int32)
_FULL_LINES, _IDLE_LINE = ((1, 300), (1, 256), (1, 40)), ((1, 300), (0, 256), (1, 40))
PAGED = (
    (Case("paged keys", _FULL_LINES, False), (0, 0, 0)),
    (Case("paged keys with an idle line", _IDLE_LINE, False), (0, 0, 0)),
    (Case("paged keys under a window", ((1, 100), (1, 100), (1, 40)), False), (200, 156, 0)),
)
"""Cases over a pool's blocks, and the first row of each line that queries see."""


def check_kernels(context: Context) -> Found:
    """Runs all cases with each kernel that is installed."""
    worst: dict[str, float] = {}
    for name, kernel, softcaps, heads in _installed(context):
        for of_heads in heads:
            for off, what in _named(name, _errors(kernel, of_heads, softcaps, context), of_heads):
                if not off <= TOLERANCES[context.dtype]:
                    raise Fault(
                        f"{name}: {of_heads.name}, {what} are {off:.2g} of their largest number "
                        f"from attention in float64 ({TOLERANCES[context.dtype]:g} is allowed)",
                        _CURE,
                    )
                worst[name] = max(worst.get(name, 0.0), off)
    said = ", ".join(f"{name} within {off:.1e}" for name, off in worst.items())
    return Found(f"{said} of float64", {f"error of {name}": off for name, off in worst.items()})


def _named(
    name: str, errors: Iterator[tuple[float, str]], heads: Heads
) -> Iterator[tuple[float, str]]:
    """Says which kernel refuses a call."""
    try:
        yield from errors
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError) as error:  # Version 4 asserts what it takes.
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise Fault(f"{name}: {heads.name}: {first}", _CURE) from error


def _installed(context: Context) -> Iterator[tuple[str, PagedKernel, bool, list[Heads]]]:
    """Kernels with their names, whether they cap scores, and the heads that they take."""
    if not context.on_gpu:
        yield "torch's CPU kernel", TorchCpuKernel(), True, list(HEADS)
        return
    capability = torch.cuda.get_device_capability(context.device)
    taken: dict[str, list[Heads]] = {}
    kernels = {}
    for heads in HEADS:
        size = max(heads.head_dim, heads.value_dim)
        check_head_dim(size)
        for kernel in kernels_for(capability, size):
            if kernel.version is not None:
                kernels[str(kernel)] = kernel
                taken.setdefault(str(kernel), []).append(heads)
    for name, kernel in kernels.items():
        try:
            made = kernel.load()
        except ValueError as error:
            raise Fault(str(error), "do as it says; `distca doctor` names the choices") from error
        yield name, made, kernel.softcaps, taken[name]


def _errors(
    kernel: PagedKernel, heads: Heads, softcaps: bool, context: Context
) -> Iterator[tuple[float, str]]:
    """How far results are from the reference's, each with what it is of."""
    unlike = heads.head_dim != heads.value_dim
    of_heads = FilledHeadsKernel(kernel) if unlike else kernel
    for case in CASES:
        for softcap in (None, _SOFTCAP) if softcaps and case is CASES[0] else (None,):
            tasks = case.tasks(softcap)
            q, k, v, dout = _rows(case, heads, context)
            out, lse = of_heads.forward(q, k, v, tasks)
            gradients = of_heads.backward(dout, q, k, v, out, lse, tasks)
            expected = attend_tasks(dout, q, k, v, tasks)
            of = case.name if softcap is None else "capped scores"
            found = {"outputs": out, "LSE": lse}
            found |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
            wanted = expected[0], expected[1], *expected[2]
            for (name, tensor), right in zip(found.items(), wanted, strict=True):
                yield _off(tensor, right), f"{of}: {name}"
    if unlike:
        return
    for case, first in PAGED:
        for tensor, right, name in _paged(kernel, case, np.array(first), heads, context):
            yield _off(tensor, right), f"{case.name}: {name}"


def _rows(case: Case, heads: Heads, context: Context) -> list[torch.Tensor]:
    """Queries, keys, values and gradients of outputs of a case."""
    queries, keys = (sum(each) for each in zip(*case.lengths, strict=True))
    generator = torch.Generator().manual_seed(len(case.name))
    shapes = (
        (queries, heads.heads, heads.head_dim),
        (keys, heads.kv_heads, heads.head_dim),
        (keys, heads.kv_heads, heads.value_dim),
        (queries, heads.heads, heads.value_dim),
    )
    return [
        torch.randn(shape, generator=generator).to(context.device, context.dtype)
        for shape in shapes
    ]


def _paged(
    kernel: PagedKernel, case: Case, first: np.ndarray, heads: Heads, context: Context
) -> Iterator[tuple[torch.Tensor, torch.Tensor, str]]:
    """Runs a case over a pool; returns results, those of the reference, and what they are."""
    pool = replace(case, lengths=((int(_LINES.max() + 1) * _BLOCK,) * 2,))
    _, k, v, _ = _rows(pool, heads, context)
    q, _, _, dout = _rows(case, heads, context)
    lengths = np.array(case.lengths)[:, 1]
    table = torch.from_numpy(_LINES).to(context.device)
    keys = PagedKeys(table, _LINES, first, first + lengths, _BLOCK)
    out, lse = kernel.forward_paged(q, k, v, case.tasks(), keys)
    slots = np.concatenate(
        [
            line[rows // _BLOCK] * _BLOCK + rows % _BLOCK
            for line, begin, length in zip(_LINES.astype(np.int64), first, lengths, strict=True)
            for rows in [np.arange(begin, begin + length)]
        ]
    )
    expected_out, expected_lse, _ = attend_tasks(dout, q, k[slots], v[slots], case.tasks())
    yield out, expected_out, "outputs"
    yield lse, expected_lse, "LSE"


def _off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Most that a number is off, over the largest; infinite where one is not finite alone."""
    found = found.detach().double().cpu()
    if not expected.numel():
        return 0.0
    apart = torch.where(found == expected, 0.0, (found - expected).abs())
    finite = expected[expected.isfinite()].abs()
    largest = max(float(finite.max()) if len(finite) else 0.0, 1.0)
    return float(apart.nan_to_num(float("inf"), float("inf")).max()) / largest
