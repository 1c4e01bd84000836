"""Fused kernels of layers with experts, in Triton. `experts.py` gives their arguments.

All tensors' rows lie one behind the other. See `triton_kernels.py` for encoded numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from distca.attention.fused.triton_kernels import decoded


@triton.jit
def _rounded(numbers, DTYPE: tl.constexpr):
    """Rounds float32 as an operator of torch does that writes another dtype."""
    return numbers.to(DTYPE).to(tl.float32)


@triton.jit
def sort_rows(
    source,
    experts,
    order,
    into,
    places,
    ends,
    counts,
    CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copies each row to where its experts' rows lie: a program makes one row.

    A pair is a row and one of its experts; pairs of a row have numbers that follow each other.

    Args:
        source: rows.
        experts: expert of each place, ascending, int64.
        order: pair that each place is for, int64.
        into: the row of each place.
        places: place of each pair, int64.
        ends: the place behind the last one of each expert, int32.
        counts: number of pairs.
        CHOSEN: experts of a row.
        EXPERTS: all experts.
        WIDTH: elements of a row.
        COLUMNS: elements that are copied at a time, a power of two.
    """
    place = tl.program_id(0)
    pair = tl.load(order + place)
    tl.store(places + pair, place.to(tl.int64))
    # The last place of an expert says where it ends, and where those end that have no rows
    # before the next place's.
    expert = tl.load(experts + place).to(tl.int32)
    is_followed = place + 1 < decoded(counts[0])
    following = tl.load(experts + place + 1, mask=is_followed, other=EXPERTS).to(tl.int32)
    for each in range(expert, following):
        tl.store(ends + each, place + 1)
    if place == 0:
        for each in range(0, expert):
            tl.store(ends + each, 0)
    of_row = source + pair // CHOSEN * WIDTH
    target = into + place.to(tl.int64) * WIDTH
    for first in range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        wanted = column < WIDTH
        tl.store(target + column, tl.load(of_row + column, mask=wanted), mask=wanted)


@triton.jit
def gate_rows(
    source,
    experts,
    bias,
    into,
    counts,
    alpha,
    limit,
    CLAMPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiplies elements by the activation of their gates.

    It computes in float32, and rounds as often as torch's operators do. A program handles a part of
    some rows.

    Args:
        source: rows of `2 * WIDTH` elements: all gates before all others, or if `CLAMPS` each
            element behind its gate.
        experts: expert of each row, int64; None: there is no bias.
        bias: is added to the rows of each expert, `2 * WIDTH` elements; None: nothing is.
        into: rows of `WIDTH` elements.
        counts: number of rows.
        alpha: factor of a gate inside its sigmoid, if `CLAMPS`.
        limit: bound of gates, and of elements on both sides, if `CLAMPS`.
        CLAMPS: the activation is that of gpt_oss, else SiLU.
        WIDTH: elements of a result.
        ROWS: rows of a program, a power of two.
        COLUMNS: elements of each row of a program, a power of two.
    """
    DTYPE: tl.constexpr = into.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < decoded(counts[0])
    first = tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    wanted = is_row[:, None] & (column < WIDTH)[None, :]
    at = row.to(tl.int64)[:, None] * (2 * WIDTH)
    if experts is not None:
        at_bias = tl.load(experts + row, mask=is_row, other=0)[:, None] * (2 * WIDTH)
    if CLAMPS:
        element = (2 * first + tl.arange(0, 2 * COLUMNS))[None, :]
        is_element = is_row[:, None] & (element < 2 * WIDTH)
        found = tl.load(source + at + element, mask=is_element, other=0.0).to(tl.float32)
        if experts is not None:
            added = tl.load(bias + at_bias + element, mask=is_element, other=0.0)
            found = _rounded(found + added.to(tl.float32), DTYPE)
        gate, up = tl.split(tl.reshape(found, (ROWS, COLUMNS, 2)))
        ALL: tl.constexpr = tl.PropagateNan.ALL
        gate = tl.minimum(gate, limit, propagate_nan=ALL)
        up = tl.minimum(tl.maximum(up, -limit, propagate_nan=ALL), limit, propagate_nan=ALL)
        share = _rounded(1 / (1 + tl.exp(-_rounded(gate * alpha, DTYPE))), DTYPE)
        result = _rounded(up + 1, DTYPE) * _rounded(gate * share, DTYPE)
    else:
        gate = tl.load(source + at + column[None, :], mask=wanted, other=0.0).to(tl.float32)
        up = tl.load(source + at + WIDTH + column[None, :], mask=wanted, other=0.0).to(tl.float32)
        if experts is not None:
            of_gate = tl.load(bias + at_bias + column[None, :], mask=wanted, other=0.0)
            of_up = tl.load(bias + at_bias + WIDTH + column[None, :], mask=wanted, other=0.0)
            gate = _rounded(gate + of_gate.to(tl.float32), DTYPE)
            up = _rounded(up + of_up.to(tl.float32), DTYPE)
        result = _rounded(gate / (1 + tl.exp(-gate)), DTYPE) * up
    target = into + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(target, result.to(DTYPE), mask=wanted)


@triton.jit
def combine_rows(
    source,
    places,
    weights,
    experts,
    bias,
    into,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums what the experts of each row made of it: a program makes a part of one row.

    Sums are in float32 and in the order of the experts. Each summand is rounded as torch's
    operators round it.

    Args:
        source: the row of each place.
        places: place of each pair, int64; see `sort_rows`.
        weights: factor of each pair.
        experts: expert of each pair, int64; None: there is no bias.
        bias: is added to the rows of each expert; None: nothing is.
        into: sums.
        CHOSEN: experts of a row.
        WIDTH: elements of a row.
        COLUMNS: elements of a program, a power of two.
    """
    DTYPE: tl.constexpr = into.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = column < WIDTH
    total = tl.zeros((COLUMNS,), tl.float32)
    for number in range(0, CHOSEN):
        pair = row * CHOSEN + number
        place = tl.load(places + pair)
        found = tl.load(source + place * WIDTH + column, mask=wanted, other=0.0).to(tl.float32)
        if experts is not None:
            expert = tl.load(experts + pair)
            added = tl.load(bias + expert * WIDTH + column, mask=wanted, other=0.0)
            found = _rounded(found + added.to(tl.float32), DTYPE)
        weight = tl.load(weights + pair).to(tl.float32)
        total += _rounded(found * weight, DTYPE)
    tl.store(into + row * WIDTH + column, total.to(DTYPE), mask=wanted)
