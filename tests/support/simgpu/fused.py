"""Stand-ins for our fused kernels: what Triton would be given, by torch's operators, in one launch.

They check what the kernels rely on, and say which bytes are touched.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MODULE = "distca.attention.fused.triton_kernels"
LEAST = -3.4028234663852886e38

Launch = Callable[[str, list[Any], list[Any], Callable[..., None]], None]
"""`launch(name, reads, writes, call)`: runs `call` with the CPU's views of all these tensors."""


def install(native: Any) -> None:
    """Puts stand-ins where the kernels' module is imported, so that triton is not needed."""
    from support.simgpu import fused_experts
    from support.simgpu.lacking import launch

    def logged(name: str, reads: list[Any], writes: list[Any], call: Any) -> None:
        launch(native, name, reads, writes, call)

    sys.modules[MODULE] = stand_ins(logged, native.as_cpu)
    sys.modules[fused_experts.MODULE] = fused_experts.stand_ins(logged, native.as_cpu)


def stand_ins(launch: Launch, as_cpu: Callable[[Any], Any]) -> types.ModuleType:
    """A module with a stand-in for each kernel, to be launched as they are."""
    module = types.ModuleType(MODULE)
    for function in (
        *(make_rows, merge_rows, finish_outputs),
        *(write_rows, normalize_rows, rotate_heads),
    ):
        setattr(module, function.__name__, Kernel(function, launch, as_cpu))
    return module


@dataclass(frozen=True)
class Kernel:
    function: Callable[..., None]
    launch: Launch
    as_cpu: Callable[[Any], Any]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def call(*arguments: Any, **options: bool) -> None:
            assert options.keys() <= {"enable_fp_fusion"}, options
            assert all(0 < each < 2**31 for each in grid), f"no grid: {grid}"
            assert all(each < 2**16 for each in grid[1:]), f"no grid: {grid}"
            self.function(self, grid, *arguments)

        return call


def decode(encoded: tuple[int, ...]) -> tuple[int, ...]:
    """See `distca.attention.fused.jobs.encoded`."""
    assert all(each % 2 and each >= 3 for each in encoded)
    return tuple((each - 3) // 2 for each in encoded)


def _flat(tensor: Any) -> Any:
    """All of a tensor's storage from its first element on."""
    left = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    return tensor.as_strided((left,), (1,))


def _check_rows(tensor: Any, width: int, unit: int) -> None:
    assert 0 < unit * tensor.itemsize <= 16, f"unit of {unit} elements"
    inner = tensor.new_empty(0).new_empty((1, *tensor.shape[1:])).stride()[1:]
    sizes = tensor.shape[1:]
    for size, stride, expected in zip(sizes, tensor.stride()[1:], inner, strict=True):
        assert size == 1 or stride == expected, "a row's elements lie apart"
    assert sizes.numel() == width, f"{tensor.shape}: rows of {width} elements"


def check_index(*indices: Any) -> None:
    for each in indices:
        if each is not None:
            assert str(each.dtype) == "torch.int64", each.dtype
            assert each.is_contiguous(), "an index lies apart"


def within(numbers: Any, rows: int) -> None:
    if numbers.numel():
        low, high = int(numbers.min()), int(numbers.max())
        assert 0 <= low <= high < rows, f"rows {low} to {high} of {rows}"


def _offsets(rows: int, stride: int, before: Any, before_stride: int) -> Any:
    """First element of each row."""
    import torch

    found = torch.arange(rows) * stride
    return found if before is None else found + before * before_stride


def _touched(tensor: Any, offsets: Any, width: int) -> Any:
    """The elements from the first to the last that rows at these offsets have."""
    first, last = int(offsets.min()), int(offsets.max()) + width
    return tensor.as_strided((last - first,), (1,), tensor.storage_offset() + first)


def _check_apart(offsets: Any, width: int) -> None:
    """Checks that no two rows are written to the same elements."""
    gaps = offsets.sort().values.diff()
    assert not gaps.numel() or int(gaps.min()) >= width, "rows are written over each other"


def check_unread(reads: list[Any], writes: list[Any]) -> None:
    """Checks that no program reads what another one may have written."""

    def edges(each: Any) -> tuple[int, int]:
        reach = sum((n - 1) * s for n, s in zip(each.shape, each.stride(), strict=True))
        return each.data_ptr(), each.data_ptr() + (reach + 1) * each.itemsize

    for read in (each for each in reads if each.numel()):
        for write in writes:
            (a, b), (c, d) = edges(read), edges(write)
            same = read.device == write.device
            assert not same or b <= c or d <= a, "a kernel reads what it writes"


def check_placed(tensors: list[Any]) -> None:
    devices = {each.device for each in tensors}
    assert len(devices) == 1, f"tensors of several devices: {devices}"


@dataclass(frozen=True)
class _Job:
    """See `distca.attention.fused.jobs.RowJob`; strides are of elements."""

    source: Any
    other: Any
    before: Any
    parts: Any
    begins: Any
    into: Any
    into_before: Any
    rows: int
    number_of_parts: int
    local: int
    strides: tuple[int, ...]
    width: int

    def tensors(self) -> list[Any]:
        named = (self.source, self.other, self.before, self.parts, self.begins, self.into_before)
        return [each for each in named if each is not None]

    def check(self, unit: int, before: Any, into_before: Any, parts: Any, begins: Any) -> None:
        assert self.rows > 0
        check_index(self.before, self.parts, self.begins, self.into_before)
        for each in (self.source, self.other, self.into):
            if each is not None:
                _check_rows(each, self.width, unit)
                assert each.dtype == self.into.dtype, "rows of another dtype"
        for each in (before, into_before):
            assert each is None or len(each) >= self.rows, "rows without a place"
        if begins is not None:
            assert self.before is self.other is None, "a sum of both"
            assert len(begins) == self.rows
            assert int(begins.diff().min() if self.rows > 1 else 0) >= 0
            assert int(begins[-1]) <= self.number_of_parts == len(parts)
        elif parts is not None:
            assert len(parts) >= self.rows
        if parts is None:
            assert self.rows <= len(self.source)
            return
        if self.other is None:
            within(parts, len(self.source))
        else:
            within(parts, self.local + len(self.other))
            assert self.local <= len(self.source)

    def run(self, source: Any, other: Any, before: Any, parts: Any, begins: Any, at: Any) -> Any:
        """Returns the rows."""
        import torch

        column = torch.arange(self.width)
        stride, other_stride = self.strides[:2]
        if begins is not None:
            ends = torch.cat([begins[1:], torch.tensor([self.number_of_parts])])
            total = torch.zeros(self.rows, self.width)
            for number in range(int((ends - begins).max())):
                has = number < ends - begins
                of = parts[begins[has] + number] * stride
                total[has] += _flat(source)[of[:, None] + column].float()
            return total.to(source.dtype)
        numbers = torch.arange(self.rows) if parts is None else parts[: self.rows]
        is_other = numbers >= self.local if other is not None else numbers < 0
        offsets = numbers * stride
        if before is not None:
            offsets = offsets + before[: self.rows] * self.strides[2]
        found = torch.empty(self.rows, self.width, dtype=source.dtype)
        found[~is_other] = _flat(source)[offsets[~is_other, None] + column]
        if other is not None:
            of = (numbers[is_other] - self.local) * other_stride
            found[is_other] = _flat(other)[of[:, None] + column]
        return found


def _jobs(arguments: tuple[Any, ...]) -> Iterator[tuple[_Job, int]]:
    *columns, counts, strides, widths, _, units, _ = arguments
    counts, strides = decode(counts), decode(strides)
    for number, (*tensors, width, unit) in enumerate(zip(*columns, widths, units, strict=True)):
        of_job = tuple(each * unit for each in strides[5 * number : 5 * number + 5])
        yield _Job(*tensors, *counts[3 * number : 3 * number + 3], of_job, width), unit


def make_rows(kernel: Kernel, grid: tuple[int, ...], *arguments: Any) -> None:
    """See `triton_kernels.make_rows`."""
    jobs, tile, of_jobs = list(_jobs(arguments)), arguments[-1], arguments[-3]
    assert tile & (tile - 1) == 0
    assert grid[1] == len(jobs)
    reads, writes, places = [], [], []
    as_cpu = kernel.as_cpu
    for (job, unit), columns in zip(jobs, of_jobs, strict=True):
        assert columns & (columns - 1) == 0
        assert columns <= tile
        assert grid[0] * (tile // columns) >= job.rows, "rows that no program makes"
        host = [
            None if each is None else as_cpu(each)
            for each in (job.before, job.into_before, job.parts, job.begins)
        ]
        job.check(unit, *host)
        into_before = None if host[1] is None else host[1][: job.rows]
        places.append(_offsets(job.rows, job.strides[3], into_before, job.strides[4]))
        _check_apart(places[-1], job.width)
        writes.append(_touched(job.into, places[-1], job.width))
        source = job.source
        if job.before is not None:
            at = _offsets(job.rows, job.strides[0], host[0][: job.rows], job.strides[2])
            source = _touched(source, at, job.width)
        reads += [source, *job.tensors()[1:]]
        check_unread([source], writes[-1:])
    check_placed([*reads, *writes])

    def call(*_: Any) -> None:
        for (job, _), at in zip(jobs, places, strict=True):
            names = (job.source, job.other, job.before, job.parts, job.begins)
            rows = job.run(*(None if each is None else as_cpu(each) for each in names), at)
            _write(as_cpu(job.into), at, rows)

    kernel.launch("distca::make_rows", reads, writes, call)


def _write(into: Any, at: Any, rows: Any) -> None:
    import torch

    _flat(into)[(at[:, None] + torch.arange(rows.shape[1])).flatten()] = rows.flatten()


def merge_rows(
    kernel: Kernel,
    grid: tuple[int, ...],
    out: Any,
    lse: Any,
    rows: Any,
    members: Any,
    begins: Any,
    into_out: Any,
    into_lse: Any,
    into_before: Any,
    counts: tuple[int, int, int],
    strides: tuple[int, ...],
    heads: int,
    head_dim: int,
    unit: int,
    lse_unit: int,
    at_once: int,
    columns: int,
) -> None:
    """See `triton_kernels.merge_rows`."""
    import torch

    as_cpu, total = kernel.as_cpu, grid[0]
    parts, merged, of_merged = decode(counts)
    strides = decode(strides)
    assert at_once & (at_once - 1) == columns & (columns - 1) == 0
    assert columns >= head_dim
    assert grid[1] * at_once >= heads
    for each in (out, into_out):
        _check_rows(each, heads * head_dim, unit)
        assert each.dtype == out.dtype
    for each in (lse, into_lse):
        _check_rows(each, heads, lse_unit)
        assert each.dtype == torch.float32
    check_index(rows, members, begins, into_before)
    assert (len(rows), len(begins), len(members)) == (total, merged, of_merged)
    within(as_cpu(rows), parts + merged)
    within(as_cpu(members), parts)
    assert parts <= len(out)
    assert parts <= len(lse)
    elements = [each * unit for each in strides[:3]] + [each * lse_unit for each in strides[3:]]
    before = None if into_before is None else as_cpu(into_before)
    at_out = _offsets(total, elements[1], before, elements[2])
    at_lse = _offsets(total, elements[4], before, elements[5])
    _check_apart(at_out, heads * head_dim)
    _check_apart(at_lse, heads)
    writes = [_touched(into_out, at_out, heads * head_dim), _touched(into_lse, at_lse, heads)]
    reads = [out[:parts], lse[:parts], rows, members, begins]
    check_unread(reads, writes)
    reads += [] if into_before is None else [into_before]
    check_placed([*reads, *writes])

    def call(*_: Any) -> None:
        of_out, of_lse, numbers, each_member, begin = map(as_cpu, (out, lse, rows, members, begins))
        found, found_lse = (each[numbers.clamp(max=parts - 1)] for each in (of_out, of_lse))
        for row in (numbers >= parts).nonzero().flatten().tolist():
            number = int(numbers[row]) - parts
            end = int(begin[number + 1]) if number + 1 < merged else of_merged
            some = each_member[int(begin[number]) : end]
            lses = of_lse[some].clamp(min=LEAST)
            weights = torch.exp(lses - lses.amax(0))
            sums = (of_out[some].float() * weights[..., None]).sum(0)
            found[row] = (sums / weights.sum(0)[:, None]).to(found.dtype)
            found_lse[row] = lses.amax(0) + weights.sum(0).log()
        _write(as_cpu(into_out), at_out, found.flatten(1))
        _write(as_cpu(into_lse), at_lse, found_lse)

    kernel.launch("distca::merge_rows", reads, writes, call)


def finish_outputs(
    kernel: Kernel,
    grid: tuple[int, ...],
    found: Any,
    found_lse: Any,
    into: Any,
    into_lse: Any,
    counts: tuple[int],
    strides: tuple[int, ...],
    width: int,
    heads: int,
    unit: int,
    block: int,
    columns: int,
) -> None:
    """See `triton_kernels.finish_outputs`."""
    import torch

    (rows,) = decode(counts)
    strides = decode(strides)
    assert rows > 0
    assert grid[0] * block >= rows
    assert block & (block - 1) == columns & (columns - 1) == 0
    assert found_lse.shape == (heads, rows)
    assert rows == 1 or found_lse.stride(1) == 1
    assert found_lse.dtype == into_lse.dtype == torch.float32
    _check_rows(into_lse, heads, 1)
    assert (found_lse.stride(0), into_lse.stride(0)) == (strides[1], strides[3])
    assert len(into_lse) == rows
    reads, writes = [found_lse], [into_lse]
    assert (found is None) == (into is None)
    if found is not None:
        for each, stride in ((found, strides[0]), (into, strides[2])):
            _check_rows(each, width, unit)
            assert len(each) == rows
            assert each.stride(0) == stride * unit
        assert found.dtype == into.dtype
        reads.append(found)
        writes.append(into)
    check_unread(reads, writes)
    check_placed([*reads, *writes])

    def call(*tensors: Any) -> None:
        source, target = tensors[: len(reads)], tensors[len(reads) :]
        turned = source[0].T
        target[0].copy_(turned.masked_fill(turned == float("inf"), float("-inf")))
        if len(source) > 1:
            target[1].copy_(source[1])

    kernel.launch("distca::finish_outputs", reads, writes, call)


def write_rows(
    kernel: Kernel,
    grid: tuple[int, ...],
    keys: Any,
    values: Any,
    slots: Any,
    into_keys: Any,
    into_values: Any,
    strides: tuple[int, ...],
    width: int,
    unit: int,
    columns: int,
) -> None:
    """See `triton_kernels.write_rows`."""
    strides = decode(strides)
    assert grid == (len(slots), 2)
    assert columns & (columns - 1) == 0
    assert width % unit == 0
    check_index(slots)
    for each, into, stride in ((keys, into_keys, strides[0]), (values, into_values, strides[1])):
        _check_rows(each, width, unit)
        assert into.is_contiguous(), "slots lie apart"
        assert each.shape == (len(slots), *into.shape[1:])
        assert each.dtype == into.dtype
        assert len(slots) == 1 or each.stride(0) == stride * unit
    reads, writes = [keys, values, slots], [into_keys, into_values]
    check_unread(reads, writes)
    check_placed([*reads, *writes])

    def call(keys: Any, values: Any, slots: Any, *into: Any) -> None:
        # In graphs these are other slots each time.
        within(slots, len(into[0]))
        for rows, memory in zip((keys, values), into, strict=True):
            memory.index_copy_(0, slots, rows)
            alone = len(slots.unique()) == len(slots)
            assert alone or memory[slots].equal(rows), "a slot gets two rows that differ"

    kernel.launch("distca::write_rows", reads, writes, call)


def normalize_rows(
    kernel: Kernel,
    grid: tuple[int, ...],
    source: Any,
    weight: Any,
    into: Any,
    counts: tuple[int],
    eps: float,
    width: int,
    rounds: bool,
    added: float,
    block: int,
    columns: int,
) -> None:
    """See `triton_kernels.normalize_rows`."""
    (rows,) = decode(counts)
    assert block & (block - 1) == columns & (columns - 1) == 0
    assert columns >= width == len(weight)
    assert grid[0] * block >= rows > 0
    for each in (source, weight, into):
        assert each.is_contiguous(), "rows lie apart"
    assert source.numel() == into.numel() == rows * width
    assert source.dtype == into.dtype
    check_unread([source, weight], [into])
    check_placed([source, weight, into])

    def call(source: Any, weight: Any, into: Any) -> None:
        found = source.float()
        found = found * (found.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        found = found.to(into.dtype).float() if rounds else found
        into.copy_(found * (weight.float() + added))

    kernel.launch("distca::normalize_rows", [source, weight], [into], call)


def rotate_heads(
    kernel: Kernel,
    grid: tuple[int, ...],
    queries: Any,
    keys: Any,
    cos: Any,
    sin: Any,
    into_queries: Any,
    into_keys: Any,
    strides: tuple[int, ...],
    heads: int,
    kv_heads: int,
    half: int,
    unit: int,
    at_once: int,
    columns: int,
) -> None:
    """See `triton_kernels.rotate_heads`."""
    import torch

    rows, pairs = grid[0], ((queries, into_queries, heads), (keys, into_keys, kv_heads))
    of = [each * unit for each in decode(strides)]
    assert 0 < unit * queries.itemsize <= 16
    assert at_once & (at_once - 1) == columns & (columns - 1) == 0
    assert columns >= half
    assert grid[1] * at_once >= max(heads, kv_heads)
    for number, (source, into, count) in enumerate(pairs):
        assert source.shape == into.shape == (rows, count, 2 * half)
        assert source.stride() == (of[2 * number], of[2 * number + 1], 1)
        assert into.is_contiguous()
        assert source.dtype == into.dtype
    for number, each in enumerate((cos, sin)):
        assert each.shape[0] == rows
        assert each.shape[1] >= half
        assert each.stride() == (of[4 + number], 1)
    reads, writes = [queries, keys, cos, sin], [into_queries, into_keys]
    check_unread(reads, writes)
    check_placed([*reads, *writes])

    def call(q: Any, k: Any, c: Any, s: Any, into_q: Any, into_k: Any) -> None:
        c, s = (each[:, None, :half] for each in (c, s))
        for source, into in ((q, into_q), (k, into_k)):
            first, second = source.split(half, -1)
            into.copy_(torch.cat([first * c - second * s, second * c + first * s], -1))

    kernel.launch("distca::rotate_heads", reads, writes, call)
