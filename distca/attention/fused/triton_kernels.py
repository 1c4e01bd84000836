"""The fused kernels themselves, in Triton. `jobs.py` gives their arguments.

Strides count units of `UNIT` elements, which all strides of a tensor are multiples of: the compiler
then knows by how much addresses are aligned, and loads up to 16 bytes at a time. Numbers that a
plan decides, those of rows above all, come encoded, so that a new plan compiles nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decoded(encoded):
    """Decodes what `distca.attention.fused.jobs.encoded` made of a number."""
    return (encoded - 3) >> 1


@triton.jit
def _make_rows_of_one(
    source,
    other,
    before,
    parts,
    begins,
    into,
    into_before,
    rows,
    number_of_parts,
    local,
    stride,
    other_stride,
    before_stride,
    into_stride,
    into_before_stride,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
):
    ROWS: tl.constexpr = TILE // COLUMNS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    target = row.to(tl.int64) * into_stride
    if into_before is not None:
        target += tl.load(into_before + row, mask=is_row, other=0) * into_before_stride
    if begins is not None:
        begin = tl.load(begins + row, mask=is_row, other=0)
        # The last row has what is left.
        end = tl.load(begins + row + 1, mask=row + 1 < rows, other=number_of_parts)
        count = tl.where(is_row, end - begin, 0)
        most = tl.max(count, axis=0)
        for first in range(0, WIDTH, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            is_column = (column < WIDTH)[None, :]
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for number in range(0, most):
                is_part = number < count
                part = tl.load(parts + begin + number, mask=is_part, other=0)
                place = source + (part * stride * UNIT)[:, None] + column[None, :]
                found = tl.load(place, mask=is_part[:, None] & is_column, other=0.0)
                total += found.to(tl.float32)
            place = into + (target * UNIT)[:, None] + column[None, :]
            tl.store(place, total.to(into.dtype.element_ty), mask=is_row[:, None] & is_column)
    else:
        if parts is not None:
            part = tl.load(parts + row, mask=is_row, other=0)
        else:
            part = row.to(tl.int64)
        if other is not None:
            is_other = part >= local
            in_other = (part - local) * other_stride
        at = part * stride
        if before is not None:
            at += tl.load(before + row, mask=is_row, other=0) * before_stride
        for first in range(0, WIDTH, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            wanted = is_row[:, None] & (column < WIDTH)[None, :]
            if other is not None:
                found = tl.load(
                    source + (at * UNIT)[:, None] + column[None, :],
                    mask=wanted & (is_other == 0)[:, None],
                )
                rest = tl.load(
                    other + (in_other * UNIT)[:, None] + column[None, :],
                    mask=wanted & is_other[:, None],
                )
                found = tl.where(is_other[:, None], rest, found)
            else:
                found = tl.load(source + (at * UNIT)[:, None] + column[None, :], mask=wanted)
            tl.store(into + (target * UNIT)[:, None] + column[None, :], found, mask=wanted)


@triton.jit
def make_rows(
    sources,
    others,
    befores,
    parts,
    begins,
    intos,
    into_befores,
    counts,
    strides,
    WIDTHS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Makes rows of several tensors: a program makes some rows of one of them.

    A row is a copy of a row of `sources`, or, from number `local` on, of `others`; or where there
    are `begins` a sum of such rows, in float32 and in their order.

    Args:
        sources: for each tensor where rows come from.
        others: the same, of rows from `local` on; None: all are in `sources`.
        befores: how many rows of another kind lie before each row of `sources`, int64, or None.
        parts: numbers of the rows that each row is made of, int64; None: the same numbers.
        begins: place in `parts` of each row's first part, int64; None: each has one.
        intos: where rows go.
        into_befores: how many rows of another kind lie before each row of `intos`, int64.
        counts: for each tensor the rows to make, the parts, and `local`.
        strides: for each tensor the strides of the source, of the other, of rows of another kind in
            the source, of the target, and of rows of another kind there.
        WIDTHS: elements of a row.
        COLUMNS: elements of a row that are handled at a time, a power of two.
        UNITS: elements that strides are multiples of.
        TILE: elements that a program handles at a time, a power of two.
    """
    for job in tl.static_range(len(WIDTHS)):
        if tl.program_id(1) == job:
            _make_rows_of_one(
                sources[job],
                others[job],
                befores[job],
                parts[job],
                begins[job],
                intos[job],
                into_befores[job],
                decoded(counts[3 * job]),
                decoded(counts[3 * job + 1]),
                decoded(counts[3 * job + 2]),
                decoded(strides[5 * job]),
                decoded(strides[5 * job + 1]),
                decoded(strides[5 * job + 2]),
                decoded(strides[5 * job + 3]),
                decoded(strides[5 * job + 4]),
                WIDTHS[job],
                COLUMNS[job],
                UNITS[job],
                TILE,
            )


@triton.jit
def merge_rows(
    out,
    lse,
    rows,
    members,
    begins,
    into_out,
    into_lse,
    into_before,
    counts,
    strides,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    LSE_UNIT: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Merges partial outputs by their LSE: a program makes some heads of one row.

    A row's number is below `parts`, then it is a copy of that partial row, or `parts` and the
    number of a row that several partial rows make up. Outputs are read once, and sums rounded once.

    Args:
        out: partial outputs.
        lse: their LSE, float32.
        rows: number of each row, int64.
        members: partial rows that merge, row by row, int64.
        begins: place in `members` of each merged row's first, int64.
        into_out: where outputs go.
        into_lse: where their LSE go.
        into_before: how many rows of another kind lie before each row there, int64, or None.
        counts: partial rows, merged rows, members.
        strides: strides of `out`, `into_out` and rows of another kind there, in units of `UNIT`,
            then the same of LSE, in units of `LSE_UNIT`.
        HEADS: heads of a row.
        HEAD_DIM: elements of a head.
        UNIT: elements that strides of outputs are multiples of.
        LSE_UNIT: the same of LSE.
        HEADS_AT_ONCE: heads of a program, a power of two.
        COLUMNS: least power of two that is no less than `HEAD_DIM`.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
    column = tl.arange(0, COLUMNS)
    is_head = head < HEADS
    is_element = is_head[:, None] & (column < HEAD_DIM)[None, :]
    element = head[:, None] * HEAD_DIM + column[None, :]
    out_at, lse_at = row * decoded(strides[1]), row * decoded(strides[4])
    if into_before is not None:
        before = tl.load(into_before + row)
        out_at += before * decoded(strides[2])
        lse_at += before * decoded(strides[5])
    to_out = into_out + out_at * UNIT + element
    to_lse = into_lse + lse_at * LSE_UNIT + head
    number = tl.load(rows + row)
    merged = number - decoded(counts[0])
    if merged < 0:
        found = tl.load(out + number * decoded(strides[0]) * UNIT + element, mask=is_element)
        tl.store(to_out, found, mask=is_element)
        found_lse = tl.load(lse + number * decoded(strides[3]) * LSE_UNIT + head, mask=is_head)
        tl.store(to_lse, found_lse, mask=is_head)
    else:
        begin = tl.load(begins + merged)
        end = tl.load(
            begins + merged + 1, mask=merged + 1 < decoded(counts[1]), other=decoded(counts[2])
        )
        # Where no part has a key, all weigh 1 rather than exp(-inf + inf): their outputs are 0.
        LEAST: tl.constexpr = -3.4028234663852886e38
        highest = tl.full((HEADS_AT_ONCE,), LEAST, tl.float32)
        for each in range(begin, end):
            part = tl.load(members + each)
            of_part = tl.load(
                lse + part * decoded(strides[3]) * LSE_UNIT + head, mask=is_head, other=LEAST
            )
            highest = tl.maximum(highest, of_part, propagate_nan=tl.PropagateNan.ALL)
        total = tl.zeros((HEADS_AT_ONCE,), tl.float32)
        sums = tl.zeros((HEADS_AT_ONCE, COLUMNS), tl.float32)
        for each in range(begin, end):
            part = tl.load(members + each)
            of_part = tl.load(
                lse + part * decoded(strides[3]) * LSE_UNIT + head, mask=is_head, other=LEAST
            )
            weight = tl.exp(tl.maximum(of_part, LEAST, propagate_nan=tl.PropagateNan.ALL) - highest)
            found = tl.load(
                out + part * decoded(strides[0]) * UNIT + element, mask=is_element, other=0.0
            )
            sums += found.to(tl.float32) * weight[:, None]
            total += weight
        sums = sums / total[:, None]
        tl.store(to_out, sums.to(into_out.dtype.element_ty), mask=is_element)
        tl.store(to_lse, highest + tl.log(total), mask=is_head)


@triton.jit
def finish_outputs(
    found,
    found_lse,
    into,
    into_lse,
    counts,
    strides,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Writes an attention kernel's outputs where they belong, and its LSE row by row.

    An LSE of plus infinity, which FlashAttention 2 gives to a row without keys, becomes minus
    infinity. A program handles some rows.

    Args:
        found: outputs; None: they are where they belong.
        found_lse: LSE by heads, float32.
        into: where outputs go; None: they are there.
        into_lse: where LSE go, by rows.
        counts: number of rows.
        strides: strides of `found`, `found_lse` (from head to head), `into` and `into_lse`; those
            of outputs in units of `UNIT`.
        WIDTH: elements of an output row.
        HEADS: heads.
        UNIT: elements that strides of outputs are multiples of.
        ROWS: rows of a program, a power of two.
        COLUMNS: elements of each row that are copied at a time, a power of two.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (row < decoded(counts[0]))[:, None]
    row = row.to(tl.int64)[:, None]
    for first_head in range(0, HEADS, 16):
        head = (first_head + tl.arange(0, 16))[None, :]
        wanted = is_row & (head < HEADS)
        lse = tl.load(found_lse + head.to(tl.int64) * decoded(strides[1]) + row, mask=wanted)
        lse = tl.where(lse == float("inf"), float("-inf"), lse)
        tl.store(into_lse + row * decoded(strides[3]) + head, lse, mask=wanted)
    if found is not None:
        for first in range(0, WIDTH, COLUMNS):
            column = (first + tl.arange(0, COLUMNS))[None, :]
            wanted = is_row & (column < WIDTH)
            copied = tl.load(found + row * decoded(strides[0]) * UNIT + column, mask=wanted)
            tl.store(into + row * decoded(strides[2]) * UNIT + column, copied, mask=wanted)


@triton.jit
def write_rows(
    keys,
    values,
    slots,
    into_keys,
    into_values,
    strides,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copies keys and values to their slots: a program copies one row of either.

    Args:
        keys: rows of keys.
        values: rows of values.
        slots: row of the memory where each goes, int64. Two may be the same if their rows are.
        into_keys: memory of keys, rows one behind the other.
        into_values: memory of values, likewise.
        strides: strides of `keys` and `values`, in units of `UNIT`.
        WIDTH: elements of a row.
        UNIT: elements that strides are multiples of.
        COLUMNS: elements that are copied at a time, a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(slots + row) * WIDTH
    for first in range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        wanted = column < WIDTH
        if tl.program_id(1) == 0:
            found = tl.load(keys + row * decoded(strides[0]) * UNIT + column, mask=wanted)
            tl.store(into_keys + target + column, found, mask=wanted)
        else:
            found = tl.load(values + row * decoded(strides[1]) * UNIT + column, mask=wanted)
            tl.store(into_values + target + column, found, mask=wanted)


@triton.jit
def normalize_rows(
    source,
    weight,
    into,
    counts,
    eps,
    WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Divides rows by the root of their mean square, and multiplies them by a weight.

    It computes in float32. A program handles some rows.

    Args:
        source: rows, one behind the other.
        weight: factor of each element.
        into: where the results go, likewise.
        counts: number of rows.
        eps: is added to the mean square.
        WIDTH: elements of a row.
        ROUNDS: whether rows are rounded before they are multiplied, and then again.
        ADDED: is added to the weight.
        ROWS: rows of a program, a power of two.
        COLUMNS: least power of two that is no less than `WIDTH`.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    wanted = (row < decoded(counts[0])) & (column < WIDTH)
    at = row.to(tl.int64) * WIDTH + column
    found = tl.load(source + at, mask=wanted, other=0.0).to(tl.float32)
    square = tl.sum(found * found, axis=1) / WIDTH
    found = found * tl.rsqrt(square + eps)[:, None]
    if ROUNDS:
        found = found.to(into.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + ADDED
    tl.store(into + at, (found * factor).to(into.dtype.element_ty), mask=wanted)


@triton.jit
def rotate_heads(
    queries,
    keys,
    cos,
    sin,
    into_queries,
    into_keys,
    strides,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    UNIT: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rotates the heads of queries and of keys by the angles of their rows.

    An element of a head's first half turns with that of its second half. Each product and each sum
    is rounded, as torch's operators round them. A program handles some heads of a row.

    Args:
        queries: queries; their heads' elements lie side by side.
        keys: keys of the same rows, likewise.
        cos: cosines of each row's angles, the first `HALF` of them.
        sin: sines, likewise.
        into_queries: where queries go, `[rows, heads, 2 * HALF]`, one behind the other.
        into_keys: where keys go, likewise.
        strides: of rows and of heads of `queries`, the same of `keys`, of rows of `cos` and `sin`,
            in units of `UNIT`.
        HEADS: heads of queries.
        KV_HEADS: heads of keys.
        HALF: half of a head's elements.
        UNIT: elements that strides are multiples of.
        HEADS_AT_ONCE: heads of a program, a power of two.
        COLUMNS: least power of two that is no less than `HALF`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    is_column = column < HALF
    c = tl.load(cos + row * decoded(strides[4]) * UNIT + column, mask=is_column, other=0.0)
    s = tl.load(sin + row * decoded(strides[5]) * UNIT + column, mask=is_column, other=0.0)
    first_head = tl.program_id(1) * HEADS_AT_ONCE
    if first_head < HEADS:
        of_row = queries + row * decoded(strides[0]) * UNIT
        target = into_queries + row * (HEADS * 2 * HALF)
        stride = decoded(strides[1])
        _rotate(of_row, stride, target, first_head, c, s, HEADS, HALF, UNIT, HEADS_AT_ONCE)
    if first_head < KV_HEADS:
        of_row = keys + row * decoded(strides[2]) * UNIT
        target = into_keys + row * (KV_HEADS * 2 * HALF)
        stride = decoded(strides[3])
        _rotate(of_row, stride, target, first_head, c, s, KV_HEADS, HALF, UNIT, HEADS_AT_ONCE)


@triton.jit
def _rotate(
    source,
    stride,
    into,
    first_head,
    cos,
    sin,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    UNIT: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
):
    head = (first_head + tl.arange(0, HEADS_AT_ONCE)).to(tl.int64)[:, None]
    column = tl.arange(0, cos.shape[0])[None, :]
    wanted = (head < HEADS) & (column < HALF)
    at = source + head * stride * UNIT + column
    first = tl.load(at, mask=wanted, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=wanted, other=0.0).to(tl.float32)
    dtype = into.dtype.element_ty
    c, s = cos.to(tl.float32)[None, :], sin.to(tl.float32)[None, :]
    to = into + head * (2 * HALF) + column
    turned = (first * c).to(dtype).to(tl.float32) - (second * s).to(dtype).to(tl.float32)
    tl.store(to, turned.to(dtype), mask=wanted)
    turned = (second * c).to(dtype).to(tl.float32) + (first * s).to(dtype).to(tl.float32)
    tl.store(to + HALF, turned.to(dtype), mask=wanted)
