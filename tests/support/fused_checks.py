"""What fused kernels compute, by Triton's interpreter, as functions for a process of their own.

The interpreter is chosen by `TRITON_INTERPRET=1` before triton is imported. Every launch is done by
the simulated GPUs' stand-ins, too, on copies, and must write the same bytes but for roundings.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from distca.attention import select_kernel_of_heads
from distca.attention.fused import (
    ClampedGate,
    ExpertKernels,
    FusedKernels,
    RowJob,
    RowMemory,
    triton_experts,
    triton_kernels,
)
from distca.attention.merge import Sums, lse_merge, merge_shared, sum_parts, sums_by_row
from distca.cost import rows as cost_rows
from distca.cost.memory import plan_memory
from distca.cost.volume import AttentionShape
from distca.plan import Mask, Plan
from distca.runtime import Buffers, CoreAttention, EventCursor, SentLatents, build_exchange
from distca.runtime.exchange import find_call_rows
from distca.runtime.fused_rows import FusedRowKernels
from distca.runtime.messages import WORD, PackedRows, QAndKV, message_layout, peer_rows
from distca.runtime.row_kernels import RowKernels, TorchRowKernels
from distca.runtime.row_sources import MergedRows, SummedRows, WrittenRows
from distca.runtime.workspace import Workspace
from distca.transport.virtual import VirtualTransport
from support.both_kernels import both_of
from support.random_plans import random_lengths, random_plan
from support.served_rows import numbered_rows
from support.simgpu import fused_experts

CPU = torch.device("cpu")
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def fused() -> FusedKernels:
    """The fused kernels, as the interpreter runs them."""
    return FusedKernels(both_of(triton_kernels))


def _experts() -> ExpertKernels:
    return ExpertKernels(both_of(triton_experts, fused_experts))


def _rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


DTYPES = torch.float32, torch.bfloat16, torch.float16
WIDTHS = 1, 3, 24, 100, 2050
"""The last is wider than what a program handles at a time."""


@check
def rows_are_copied_as_they_are() -> None:
    """With an index and without, from rows that lie apart, several tensors at once."""
    kernels, index = fused(), torch.tensor([2, 0, 0])
    for dtype in DTYPES:
        jobs, expected = [], []
        for width in WIDTHS:
            # Those of 100 elements take two programs.
            total = 21 if width == 100 else 3
            source = _rows(total, width + 5, dtype=dtype)[:, :width]
            for sums, rows in ((None, total), (Sums(index, None), 3), (None, 0)):
                into = torch.full((rows + 1, width), 7.0, dtype=dtype)
                jobs.append(RowJob(RowMemory(source), RowMemory(into), rows, sums))
                expected.append((source if sums is None else source[index])[:rows])
        kernels.make_rows(jobs)
        for job, wanted in zip(jobs, expected, strict=True):
            assert torch.equal(job.into.rows[: job.rows], wanted)
            assert (job.into.rows[job.rows :] == 7).all(), "written beyond the end"
    assert kernels._kernels.make_rows.launches == len(DTYPES)


@check
def nothing_is_launched_for_no_rows() -> None:
    kernels = fused()
    empty = RowMemory(torch.empty(0, 8))
    kernels.make_rows([])
    kernels.make_rows([RowJob(empty, empty, 0)])
    assert kernels._kernels.make_rows.launches == 0


@check
def sums_have_the_bits_of_the_reference() -> None:
    """Also where rows have no part, and where small parts beside large ones hang on the order.

    The interpreter cuts bfloat16 off, which compiled kernels round to the nearest.
    """
    rng = np.random.default_rng(0)
    factors = 10.0 ** torch.arange(60).remainder(4)[:, None]
    for dtype in DTYPES:
        for width, total in ((3, 1), (24, 17), (100, 40), (2050, 3)):
            parts = (_rows(60, width) * factors).to(dtype)
            sums = sums_by_row(rng.integers(-1, total, 60), total)
            found = torch.full((total, width), 7.0, dtype=dtype)
            fused().make_rows([RowJob(RowMemory(parts), RowMemory(found), total, sums)])
            expected = sum_parts(parts.float(), sums)
            if dtype == torch.bfloat16:
                expected = (expected.view(torch.int32) & -(2**16)).view(torch.float32)
            assert torch.equal(found, expected.to(dtype)), (dtype, width)


@check
def merges_are_those_of_the_reference() -> None:
    """Odd numbers of heads, head sizes of MLA, rows without keys; one rounding apart at most."""
    rng = np.random.default_rng(1)
    for dtype in DTYPES:
        for heads, size in ((1, 16), (3, 12), (5, 128), (2, 192), (20, 128)):
            total, of = 9, rng.integers(-1, 9, 31)
            merge = lse_merge(of, total)
            assert merge.merges is not None
            out = _rows(merge.with_merged, heads, size, dtype=dtype)
            lse = 4 * _rows(merge.with_merged, heads, seed=1)
            lse[_rows(*lse.shape, seed=2) < -0.8] = -torch.inf
            out[lse == -torch.inf] = 0
            into = torch.empty(total, heads, size, dtype=dtype), torch.empty(total, heads)
            fused().merge_rows(out[:31], lse[:31], merge, *(RowMemory(each) for each in into))
            taken = lambda shape, dtype: torch.empty(shape, dtype=dtype)  # noqa: E731
            gather = lambda rows, both=(out, lse): tuple(each[rows] for each in both)  # noqa: E731
            merge_shared(out, lse, merge.merges, gather, taken)
            rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
            has = torch.from_numpy(np.isin(np.arange(total), of))
            expected = [each[merge.rows][has] for each in (out, lse)]
            torch.testing.assert_close(into[0][has], expected[0], rtol=rounding, atol=1e-6)
            torch.testing.assert_close(into[1][has], expected[1])


@check
def a_merge_lets_what_is_no_number_through() -> None:
    """As what an exchange that failed has received."""
    merge = lse_merge(np.array([0, 0, 1]), 2)
    for broken in (0, 1):
        out, lse = _rows(4, 2, 8), _rows(4, 2)
        (out if broken == 0 else lse)[1] = torch.nan
        found = torch.empty(2, 2, 8), torch.empty(2, 2)
        fused().merge_rows(out[:3], lse[:3], merge, *(RowMemory(each) for each in found))
        assert found[broken][0].isnan().all()
        assert found[0][0].isnan().all()
        assert torch.equal(found[0][1], out[2])


@check
def outputs_are_finished() -> None:
    """LSE of plus infinity are of rows without keys; outputs are copied unless they are there."""
    for rows, heads, size in ((1, 1, 8), (5, 3, 12), (130, 20, 16)):
        found, lse = _rows(rows, heads, size, dtype=torch.bfloat16), _rows(heads, rows)
        lse[:, ::4] = torch.inf
        packed = torch.full((rows, heads * size + 8), 7.0).bfloat16()
        into, into_lse = packed[:, :-8].view(rows, heads, size), torch.empty(rows, heads)
        fused().finish_outputs(found, lse, into, into_lse)
        assert torch.equal(into, found)
        assert (packed[:, -8:] == 7).all()
        assert torch.equal(into_lse, lse.T.masked_fill(torch.inf == lse.T, -torch.inf))
        fused().finish_outputs(found, lse, found, into_lse)


@check
def keys_and_values_are_written_to_their_slots() -> None:
    """From rows that lie apart; rows that are equal may have one slot."""
    for rows, heads, size in ((0, 2, 8), (1, 1, 16), (5, 3, 24), (2, 8, 320)):
        both = _rows(rows, 2 * heads + 1, size, dtype=torch.bfloat16)
        both[3:] = both[2:3] if rows > 3 else 0
        k, v = both[:, :heads], both[:, heads:-1]
        slots = torch.tensor([4, 0, 7, 7, 7])[:rows]
        pools = [_rows(9, heads, size, dtype=torch.bfloat16, seed=seed) for seed in (1, 2)]
        expected = [each.index_copy(0, slots, its) for each, its in zip(pools, (k, v), strict=True)]
        fused().write_rows(k, v, slots, *pools)
        assert all(map(torch.equal, pools, expected))


ROUNDED = torch.float32, torch.float16
"""Dtypes to which the interpreter rounds as GPUs do; it cuts bfloat16 off."""


@check
def rows_are_normalized() -> None:
    """As by torch's operators, within a rounding: single rows and many, of any width."""
    for dtype in ROUNDED:
        for shape in ((1, 5), (3, 64), (2, 70, 96), (1, 3000), (0, 8)):
            rows, weight = _rows(*shape, dtype=dtype), _rows(shape[-1], dtype=dtype, seed=1)
            for rounds, added in ((True, 0.0), (False, 1.0)):
                found = fused().normalize_rows(rows, weight, 1e-5, rounds, added)
                normed = rows.float()
                normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + 1e-5)
                normed = normed.to(dtype).float() if rounds else normed
                expected = (normed * (weight.float() + added)).to(dtype)
                rounding = 1e-5 if dtype == torch.float32 else 2**-9
                torch.testing.assert_close(found, expected, rtol=rounding, atol=1e-6)


@check
def heads_are_rotated() -> None:
    """To the bit, of heads that lie apart, too."""
    for dtype in ROUNDED:
        for rows, heads, kv_heads, size in ((1, 4, 2, 16), (5, 3, 3, 24), (2, 40, 8, 128)):
            q, k = (
                _rows(rows, 2 * count, size, dtype=dtype)[:, ::2] for count in (heads, kv_heads)
            )
            cos, sin = (_rows(rows, size, dtype=dtype, seed=seed) for seed in (2, 3))
            found = fused().rotate_heads(q, k, cos, sin)
            for mine, source in zip(found, (q, k), strict=True):
                first, second = source.split(size // 2, -1)
                c, s = (each[:, None, : size // 2] for each in (cos, sin))
                expected = torch.cat([first * c - second * s, second * c + first * s], -1)
                assert torch.equal(mine, expected), dtype


def _chosen(rows: int, chosen: int, number: int) -> torch.Tensor:
    """Experts of each row; few of many, so that some have no rows."""
    drawn = torch.rand(rows, number, generator=torch.Generator().manual_seed(rows))
    return drawn.argsort(1)[:, :chosen].clamp(1, max(1, number - 2))


@check
def rows_are_sorted_by_their_experts() -> None:
    """Where the first, the last and some between have no rows; wider than a program, too."""
    for rows, chosen, number, width in (
        (1, 1, 1, 8),
        (1, 4, 9, 24),
        (37, 2, 5, 100),
        (3, 2, 40, 1500),
    ):
        source, of_row = _rows(rows, width, dtype=torch.bfloat16), _chosen(rows, chosen, number)
        experts, order = torch.sort(of_row.clamp(max=number - 1).flatten())
        found = _experts().sort_rows(source, experts, order, number)
        assert torch.equal(found.rows, source[order // chosen])
        assert torch.equal(found.places[order], torch.arange(rows * chosen))
        counts = torch.bincount(experts, minlength=number)
        assert torch.equal(found.ends, counts.cumsum(0).int())


@check
def rows_are_gated() -> None:
    """By either activation, with biases and without; within a rounding of torch's operators."""
    for dtype in ROUNDED:
        for rows, width in ((1, 8), (5, 100), (2, 1500)):
            source, bias = _rows(rows, 2 * width, dtype=dtype), _rows(3, 2 * width, dtype=dtype)
            experts = torch.arange(rows).clamp(max=2)
            for of_row, its in ((None, None), (experts, bias)):
                inputs = source if its is None else source + its[experts]
                gate, up = inputs.chunk(2, -1)
                silu = torch.nn.functional.silu(gate) * up
                gate, up = inputs[:, ::2].clamp(max=0.5), inputs[:, 1::2].clamp(-0.5, 0.5)
                clamped = (up + 1) * (gate * torch.sigmoid(gate * 1.7))
                for way, expected in ((None, silu), (ClampedGate(1.7, 0.5), clamped)):
                    found = _experts().gate_rows(source, way, of_row, its)
                    rounding = 1e-5 if dtype == torch.float32 else 2**-8
                    torch.testing.assert_close(found, expected, rtol=rounding, atol=1e-5)


@check
def what_experts_made_is_combined() -> None:
    for dtype in ROUNDED:
        for rows, chosen, width in ((1, 1, 8), (4, 3, 100), (2, 8, 1500)):
            pairs, of_row = rows * chosen, _chosen(rows, chosen, 12)
            source, weights = _rows(pairs, width, dtype=dtype), _rows(rows, chosen, dtype=dtype)
            places, bias = torch.arange(pairs).flip(0), _rows(12, width, dtype=dtype, seed=1)
            for experts, its in ((None, None), (of_row, bias)):
                found = _experts().combine_rows(source, places, weights, experts, its)
                parts = source[places] if its is None else source[places] + its[of_row.flatten()]
                parts = (parts * weights.reshape(-1, 1)).view(rows, chosen, width)
                expected = parts.float().sum(1).to(dtype)
                rounding = 1e-5 if dtype == torch.float32 else 2**-9
                torch.testing.assert_close(found, expected, rtol=rounding, atol=1e-5)


def _messages(width: int, keys: bool) -> tuple[Any, QAndKV, torch.Tensor]:
    q_counts, kv_counts = np.array([2, 0, 3]), np.array([0, 1, 1])
    rows = peer_rows(q_counts, np.array([1, 0, 4]), kv_counts, np.array([0, 2, 1]))
    tensors = QAndKV(
        [_rows(9, width).bfloat16(), _rows(9, 5)],
        [_rows(4, 2, width, seed=1), _rows(4, 4, seed=2)] if keys else [],
    )
    layout = message_layout(rows, rows, tensors.row_types)
    messages = torch.zeros(16 + layout.sizes.sent, dtype=torch.uint8)[16:].view(WORD)
    return layout, tensors, messages


def _scratch() -> Workspace:
    scratch = Workspace(CPU)
    scratch.reserve(2**20)
    return scratch


@check
def messages_are_those_of_the_reference() -> None:
    """Packed of copies, sums, merges and computed rows; unpacked to either kind of memory; with
    empty peers, and with one kind of rows or two. All in one launch."""
    copies = Sums(torch.tensor([8, 0, 3, 3, 1]), None)
    for width in (3, 6, 16):
        for keys in (False, True):
            layout, tensors, expected = _messages(width, keys)
            sources = [SummedRows(tensors.q, copies)]
            sources.append(SummedRows(tensors.kv, sums_by_row(np.array([1, 0, -1, 1]), 2)))
            computed = WrittenRows(lambda into, piece: [each.fill_(3) for each in into.tensors])
            for of_kv in (sources[1], computed):
                kinds = list(zip(layout.send, (sources[0], of_kv), strict=True))
                found, kernels = torch.zeros_like(expected), fused()
                expected.zero_()
                TorchRowKernels().pack(expected, kinds, _scratch())
                FusedRowKernels(kernels).pack(found, kinds, _scratch())
                assert kernels._kernels.make_rows.launches == 1
                _assert_messages(layout, found, expected)
            _check_unpacking(layout, tensors, expected)


def _assert_messages(layout: Any, found: torch.Tensor, expected: torch.Tensor) -> None:
    for of in layout.receive:
        if of.rows:
            apart = [
                [torch.empty((of.rows, *shape), dtype=dtype) for shape, dtype in of.format.types]
                for _ in range(2)
            ]
            of.take_apart(found, apart[0])
            of.take_apart(expected, apart[1])
            assert all(torch.equal(*pair) for pair in zip(*apart, strict=True))


def _check_unpacking(layout: Any, tensors: QAndKV, messages: torch.Tensor) -> None:
    results = []
    for kernels in (TorchRowKernels(), FusedRowKernels(fused())):
        memory = _scratch()
        q, kv = layout.receive
        words = PackedRows.take(memory, q.format, q.rows).words.zero_()
        apart = [torch.zeros((kv.rows, *each.shape[1:]), dtype=each.dtype) for each in tensors.kv]
        kernels.unpack(messages, [(q, words), (kv, apart or None)])
        results.append([torch.view_as_real(words), *apart])
    for pair in zip(*results, strict=True):
        assert torch.equal(*(each.contiguous().view(torch.uint8) for each in pair))


@check
def merged_rows_go_into_messages() -> None:
    rows = peer_rows(*[np.array([2, 0, 3])] * 2, *[np.array([0, 1, 1])] * 2)
    types = ((torch.Size((3, 4)), torch.bfloat16), (torch.Size((3,)), torch.float32))
    keys = ((torch.Size((7,)), torch.float32),)
    zeros = WrittenRows(lambda into, piece: [each.zero_() for each in into.tensors])
    rows_of_parts = [0, 4, 1, 0, 2, 3, 1], [4, 3, 0, 1, 2, -1, -1]
    merges = [*(lse_merge(np.array(each), 5) for each in rows_of_parts), None]
    for of_kv in ((), keys):
        layout = message_layout(rows, rows, (types, of_kv))
        for merge in merges:
            found = []
            for kernels in (TorchRowKernels(), FusedRowKernels(fused())):
                scratch = _scratch()
                parts = PackedRows.take(scratch, layout.send[0].format, 12)
                parts.tensors[0].copy_(_rows(12, 3, 4))
                parts.tensors[1].copy_(_rows(12, 3, seed=1))
                source = MergedRows(parts, merge, slice(2, 7))
                messages = torch.zeros(layout.sizes.sent, dtype=torch.uint8).view(WORD)
                kernels.pack(
                    messages, list(zip(layout.send, (source, zeros), strict=True)), scratch
                )
                made = [torch.empty((5, *shape), dtype=dtype) for shape, dtype in types]
                layout.receive[0].take_apart(messages, made)
                mine = source if merge else MergedRows(parts, None, slice(0, 5))
                found.append([*made, *kernels.merge(mine, scratch)])
            for pair in zip(*found, strict=True):
                rounding = 2**-7 if pair[0].dtype == torch.bfloat16 else 1e-5
                torch.testing.assert_close(*pair, rtol=rounding, atol=1e-6)


@check
def rows_of_calls_are_those_of_the_reference() -> None:
    """Of random spans of both memories, in few pieces and in many."""
    rng, before = np.random.default_rng(0), cost_rows.PIECE_ROWS
    try:
        for trial in range(60):
            cost_rows.PIECE_ROWS = (1, 512)[trial % 2]
            local, received = (int(rng.integers(0, 40)) for _ in range(2))
            served = [np.zeros(0, dtype=np.int64)]
            for _ in range(int(rng.integers(0, 8)) if local + received else 0):
                begin = int(rng.integers(0, local + received))
                end = min(begin + int(rng.integers(1, 20)), local + received)
                served.append(np.arange(begin, end))
            rows, kernels = find_call_rows(np.concatenate(served), local), fused()
            pair = [(numbered_rows(local, received), rows)]
            found = FusedRowKernels(kernels).take(pair, _scratch())
            expected = TorchRowKernels().take(pair, _scratch())
            assert all(torch.equal(*each) for each in zip(found, expected, strict=True))
            assert kernels._kernels.make_rows.launches <= 1
    finally:
        cost_rows.PIECE_ROWS = before


def _attend(
    plan: Plan, shape: AttentionShape, make: Callable[[], RowKernels], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Outputs and gradients of all ranks, one after the other."""
    others: list[VirtualTransport] = []
    calls, inputs, douts = [], [], []
    kernel = select_kernel_of_heads("cpu", shape.head_dim, shape.value_dim)
    latents = shape.kv_rank is not None
    for rank in range(plan.world_size):
        transport = VirtualTransport(rank, others, plan.world_size, CPU)
        buffers = Buffers(CPU, headroom=0.0, rows=make())
        attention = CoreAttention(transport, kernel, buffers)
        attention.reserve(plan_memory(plan, shape))
        exchange = buffers.place([build_exchange(plan, rank, latents)])
        calls.append(attention._call(EventCursor(exchange), 0, 0.3, {}))
        tokens, seed = int(plan.placement.tokens_per_rank()[rank]), 10 * rank
        q, k, v, dout = (
            _rows(tokens, heads, size, dtype=dtype, seed=seed + number)
            for number, (heads, size) in enumerate(
                (
                    (shape.heads, shape.head_dim),
                    (shape.kv_heads, shape.head_dim),
                    (shape.kv_heads, shape.value_dim),
                    (shape.heads, shape.value_dim),
                )
            )
        )
        sent = None
        if shape.kv_rank is not None:
            own = shape.head_dim - shape.rotated_dim
            weight = _rows(shape.kv_heads * (own + shape.value_dim), shape.kv_rank, dtype=dtype)
            latent = _rows(tokens, shape.kv_rank, dtype=dtype, seed=seed + 5)
            both = (latent @ weight.t()).view(tokens, shape.kv_heads, -1)
            shared = k[:, :1, own:].expand(-1, shape.kv_heads, -1)
            k, v = torch.cat([both[..., :own], shared], dim=-1), both[..., own:].contiguous()
            sent = SentLatents(latent, shape.rotated_dim, weight)
        inputs.append((q, k, v, sent))
        douts.append(dout)
    for call, mine in zip(calls, inputs, strict=True):
        call.dispatch(*mine)
    for call in calls:
        call.compute()
    found = [call.combine() for call in calls]
    for call, dout in zip(calls, douts, strict=True):
        call.dispatch_backward(dout)
    for call in calls:
        call.compute_backward()
    return [*found, *(each for call in calls for each in call.combine_backward())]


SHAPES = (
    (AttentionShape(4, 2, 16, 4), torch.float32),
    (AttentionShape(4, 1, 8), torch.bfloat16),
    (AttentionShape(3, 3, 13, 4, 5, 9, 6), torch.float32),
)
"""GQA; one head of keys, in bfloat16; heads of unlike sizes as in MLA, with its latents."""


@check
def core_attention_is_that_of_the_reference() -> None:
    """On ranks of random plans, forward and backward."""
    for seed, (shape, dtype) in enumerate(SHAPES):
        rng = np.random.default_rng(seed)
        mask = Mask() if seed % 2 else Mask(20)
        plan = random_plan(rng, random_lengths(rng, 3 * 12), 3, 12, mask, block=4)
        expected = _attend(plan, shape, TorchRowKernels, dtype)
        found = _attend(plan, shape, lambda: FusedRowKernels(fused()), dtype)
        # A rounding of an output may come back in gradients.
        off = 1e-5 if dtype == torch.float32 else 0.03
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=off, atol=off)


def main(names: Sequence[str]) -> dict[str, str | None]:
    """Runs the checks; returns how each failed, or None."""
    results: dict[str, str | None] = {}
    for name in names or CHECKS:
        try:
            CHECKS[name]()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    return results


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1:])))
