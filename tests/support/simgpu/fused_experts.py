"""Stand-ins for the fused kernels of layers with experts; see `support.simgpu.fused`."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from support.simgpu.fused import (
    Kernel,
    Launch,
    check_index,
    check_placed,
    check_unread,
    decode,
    within,
)

MODULE = "distca.attention.fused.triton_experts"


def stand_ins(launch: Launch, as_cpu: Callable[[Any], Any]) -> types.ModuleType:
    """A module with a stand-in for each kernel, to be launched as they are."""
    module = types.ModuleType(MODULE)
    for function in (sort_rows, gate_rows, combine_rows):
        setattr(module, function.__name__, Kernel(function, launch, as_cpu))
    return module


def _check(reads: list[Any], writes: list[Any], columns: int) -> None:
    assert columns & (columns - 1) == 0
    for each in (*reads, *writes):
        assert each.is_contiguous(), "rows lie apart"
        assert each.numel(), "nothing to do"
    check_unread(reads, writes)
    check_placed([*reads, *writes])


def sort_rows(
    kernel: Kernel,
    grid: tuple[int, ...],
    source: Any,
    experts: Any,
    order: Any,
    into: Any,
    places: Any,
    ends: Any,
    counts: tuple[int],
    chosen: int,
    number: int,
    width: int,
    columns: int,
) -> None:
    """See `triton_experts.sort_rows`."""
    import torch

    (pairs,) = decode(counts)
    assert grid == (pairs,)
    assert source.shape == (pairs // chosen, width)
    assert into.shape == (pairs, width)
    assert source.dtype == into.dtype
    assert ends.dtype == torch.int32
    assert ends.shape == (number,)
    check_index(experts, order, places)
    assert len(experts) == len(order) == len(places) == pairs
    _check([source, experts, order], [into, places, ends], columns)

    def call(source: Any, experts: Any, order: Any, into: Any, places: Any, ends: Any) -> None:
        # In graphs these are other numbers each time.
        within(experts, number)
        assert not experts.numel() or int(experts.diff().min() if pairs > 1 else 0) >= 0
        assert torch.equal(order.sort().values, torch.arange(pairs)), "a pair has no place"
        into.copy_(source[order // chosen])
        places[order] = torch.arange(pairs)
        ends.copy_(torch.bincount(experts, minlength=number).cumsum(0))

    kernel.launch("distca::sort_rows", [source, experts, order], [into, places, ends], call)


def gate_rows(
    kernel: Kernel,
    grid: tuple[int, ...],
    source: Any,
    experts: Any,
    bias: Any,
    into: Any,
    counts: tuple[int],
    alpha: float,
    limit: float,
    clamps: bool,
    width: int,
    at_once: int,
    columns: int,
) -> None:
    """See `triton_experts.gate_rows`."""
    import torch

    (rows,) = decode(counts)
    assert grid[0] * at_once >= rows
    assert grid[1] * columns >= width
    assert at_once & (at_once - 1) == 0
    assert source.shape == (rows, 2 * width)
    assert into.shape == (rows, width)
    assert source.dtype == into.dtype
    assert (experts is None) == (bias is None)
    reads = [source]
    if experts is not None:
        check_index(experts)
        assert len(experts) == rows
        assert bias.shape[1] == 2 * width
        assert bias.dtype == source.dtype
        reads += [experts, bias]
    _check(reads, [into], columns)

    def call(source: Any, *rest: Any) -> None:
        into = rest[-1]
        if len(rest) > 1:
            within(rest[0], len(rest[1]))
            source = source + rest[1][rest[0]]
        if not clamps:
            gate, up = source.chunk(2, dim=-1)
            into.copy_(torch.nn.functional.silu(gate) * up)
            return
        gate, up = source[:, ::2].clamp(max=limit), source[:, 1::2].clamp(-limit, limit)
        into.copy_((up + 1) * (gate * torch.sigmoid(gate * alpha)))

    kernel.launch("distca::gate_rows", reads, [into], call)


def combine_rows(
    kernel: Kernel,
    grid: tuple[int, ...],
    source: Any,
    places: Any,
    weights: Any,
    experts: Any,
    bias: Any,
    into: Any,
    chosen: int,
    width: int,
    columns: int,
) -> None:
    """See `triton_experts.combine_rows`."""
    total = grid[0]
    assert grid[1] * columns >= width
    assert weights.shape == (total, chosen)
    assert source.shape == (total * chosen, width)
    assert into.shape == (total, width)
    assert source.dtype == weights.dtype == into.dtype
    assert (experts is None) == (bias is None)
    check_index(places)
    assert len(places) == total * chosen
    reads = [source, places, weights]
    if experts is not None:
        check_index(experts)
        assert experts.shape == weights.shape
        assert bias.shape[1] == width
        assert bias.dtype == source.dtype
        reads += [experts, bias]
    _check(reads, [into], columns)

    def call(source: Any, places: Any, weights: Any, *rest: Any) -> None:
        within(places, len(source))
        found = source[places]
        if len(rest) > 1:
            within(rest[0], len(rest[1]))
            found = found + rest[1][rest[0].flatten()]
        found = found * weights.reshape(-1, 1)
        rest[-1].copy_(found.view(total, chosen, width).sum(1))

    kernel.launch("distca::combine_rows", reads, [into], call)
