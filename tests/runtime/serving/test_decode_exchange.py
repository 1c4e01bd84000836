"""A decode step's exchange is that of its plan, and runs in the memory that is reserved for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.kernels.host_cost import Nowhere
from distca.attention import select_kernel
from distca.attention.paged import OfPool
from distca.cost.steps import decode_memory
from distca.cost.volume import AttentionShape
from distca.plan import Mask, Placement
from distca.plan.span import Int64s
from distca.runtime import Buffers, CoreAttention, EventCursor, Exchange, build_exchange
from distca.runtime.serving.decode_exchange import build_decode_exchange
from distca.runtime.serving.kv_pool import BlockTables, KVCache
from distca.schedule.program import LayerGroup, tick_program
from distca.schedule.serving import step_plan
from distca.schedule.serving.batches import DecodeBatch
from distca.schedule.serving.iteration import plan_iteration
from distca.schedule.serving.scheduled import ScheduledTokens
from distca.transport import CollectiveTransport
from support.ranks import Ranks
from support.served_rows import taken_rows

CPU, SIZE = torch.device("cpu"), 4
SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=8, dtype_bytes=4)


def tables_of(decode: DecodeBatch, rank: int) -> tuple[BlockTables, Int64s, int]:
    """Tables with blocks for all rows of a rank, the lines of the sequences, and the blocks."""
    tables, block = BlockTables(SIZE, CPU), 0
    # Lines are not in the order of the step.
    numbers = np.random.default_rng(1).permutation(len(decode.sequences))
    for number in numbers.tolist():
        count = -(-int(decode.rows[number, rank]) // SIZE)
        tables.append(decode.sequences[number], range(block, block + count))
        block += count
    return tables, tables.lines(decode.sequences), block


class Sequences:
    """Sequences of odd lengths, in no order, whose blocks of two tokens lie anywhere."""

    def __init__(self, ranks: int, count: int) -> None:
        rng = np.random.default_rng(ranks)
        self._ranks = ranks
        self._lengths = rng.integers(1, 40, count).tolist()
        self._numbers = rng.permutation(count).tolist()
        self._owners = rng.integers(0, ranks, (count, 40))

    def decode(self, masks: list[Mask]) -> DecodeBatch:
        """Plans the step that feeds the next token of each."""
        entries = [
            ScheduledTokens(number, length, 1, owners)
            for number, length, owners in zip(
                self._numbers, self._lengths, self._owners, strict=True
            )
        ]
        decode = plan_iteration(entries, masks, 2, self._ranks, "pass-kv").decode
        assert decode is not None
        return decode

    def placement(self) -> Placement:
        """Who holds the tokens of all, in the order of the step."""
        pieces = [
            (document, start, min(start + 2, length), owners[start // 2])
            for document, (length, owners) in enumerate(
                zip(self._lengths, self._owners.tolist(), strict=True)
            )
            for start in range(0, length, 2)
        ]
        columns = (np.array(column, dtype=np.int64) for column in zip(*pieces, strict=True))
        return Placement(*columns, self._ranks)

    def go_on(self) -> None:
        """Notes that a token of each was decoded."""
        self._lengths = [length + 1 for length in self._lengths]


def same(found: Exchange, expected: Exchange) -> None:
    for name in ("outgoing", "incoming"):
        ours, theirs = getattr(found.q, name), getattr(expected.q, name)
        assert ours.counts.tolist() == theirs.counts.tolist()
        assert ours.before.tolist() == theirs.before.tolist()
        for place, other in zip(ours.place, theirs.place, strict=True):
            assert place.tolist() == other.tolist()
    assert found.q.send.tolist() == expected.q.send.tolist()
    assert (found.q.local, found.q.received) == (expected.q.local, expected.q.received)
    assert found.q.move == expected.q.move
    assert not found.kv.move
    assert not found.kv.received


@pytest.mark.parametrize("mask", [Mask(), Mask(6)], ids=["full", "windowed"])
@pytest.mark.parametrize(("ranks", "count"), [(1, 5), (2, 5), (4, 5), (3, 200)])
def test_rows_travel_as_the_plan_says(ranks: int, count: int, mask: Mask) -> None:
    """Many sequences, too: an unstable sort by owners mixes up those of one rank."""
    sequences = Sequences(ranks, count)
    for _ in range(9):
        decode = sequences.decode([mask])
        plan = step_plan(sequences.placement(), decode.new, "pass-q", mask, block=8).plan
        for rank in range(ranks):
            tables, lines, blocks = tables_of(decode, rank)
            found, keys = build_decode_exchange(decode, mask, rank, tables, lines, blocks * SIZE)
            same(found, build_exchange(plan, rank))
            # Kernels take queries in the order of the tables' lines.
            segments = plan.q_segments.select(plan.q_segments.server == rank)
            arriving = segments.select(segments.owner != rank).start
            served = np.concatenate([segments.select(segments.owner == rank).start, arriving])
            sequence = np.searchsorted(plan.document_offsets, served, side="right") - 1
            assert (
                np.diff(
                    lines[sequence][
                        taken_rows(found.calls[0].q_rows, found.q.local, found.q.received)
                    ]
                )
                > 0
            ).all()
            # Each served query meets the rank's rows of its sequence that it sees.
            visible = (decode.rows - decode.hidden[mask])[:, rank]
            of_lines = dict(zip(lines.tolist(), visible.tolist(), strict=True))
            expected = [of_lines[line] for line in sorted(lines[sequence].tolist())]
            assert (keys.used - keys.first).tolist() == expected
            assert keys.table.tolist() == tables.table[np.sort(lines[sequence])].tolist()
            assert keys.host.tolist() == keys.table.tolist()
            (call,) = found.calls
            assert call.keys == visible.sum() == call.cu_seqlens_kv[-1]
            assert call.cu_seqlens_kv.diff().tolist() == expected
            # Every task has a query: FlashAttention 2 regroups heads by that.
            assert call.cu_seqlens_q.diff().tolist() == [1] * call.queries
            assert call.queries == len(served)
        sequences.go_on()


def rows_of(number: int, length: int) -> list[torch.Tensor]:
    """Queries, keys and values of a sequence."""
    generator = torch.Generator().manual_seed(number)
    return [
        torch.randn(length, heads, SHAPE.head_dim, generator=generator)
        for heads in (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads)
    ]


def farthest_from_dense_attention(ranks: int, count: int, mask: Mask) -> tuple[int, float]:
    """A step's outputs of this rank: how many, and how far they are from the whole sequences'."""
    rank, sequences = dist.get_rank(), Sequences(ranks, count)
    decode, placed = sequences.decode([mask]), sequences.placement()
    tables, lines, blocks = tables_of(decode, rank)
    pool = KVCache(1, blocks, SIZE, SHAPE, torch.float32, CPU)
    queries, expected = [], []
    for number, last in enumerate(decode.positions.tolist()):
        q, *kv = rows_of(number, last + 1)
        mine = placed.select((placed.document == number) & (placed.rank == rank))
        here = np.concatenate([np.arange(0), *map(np.arange, mine.start, mine.end)])
        here.sort()
        if decode.owners[number] == rank:
            here = np.append(here, last)
            first = 0 if mask.window_left is None else max(last - mask.window_left, 0)
            k, v = (each[first:].repeat_interleave(2, dim=1) for each in kv)
            weights = torch.einsum("hd,khd->hk", q[last], k).softmax(dim=1)
            queries.append(q[last])
            expected.append(torch.einsum("hk,khd->hd", weights, v))
        rows = np.arange(len(here))
        slots = tables.host[lines[number], rows // SIZE] * SIZE + rows % SIZE
        for into, each in zip(pool.rows(0), kv, strict=True):
            into[slots] = each[here]
    exchange, keys = build_decode_exchange(decode, mask, rank, tables, lines, pool.slots)
    transport = CollectiveTransport(dist.group.WORLD, CPU)
    core = CoreAttention(transport, OfPool(select_kernel("cpu"), keys), Buffers(CPU, headroom=0.0))
    core.reserve(decode_memory(count, ranks, SHAPE))
    program = tick_program("forward", (LayerGroup(range(1), False),), 1, False, False)
    run = EventCursor(core.buffers.place([exchange]), program)
    with torch.no_grad():
        out = core(torch.stack(queries), *pool.rows(0), run, 1.0)
    transport.close()
    return len(out), float((out - torch.stack(expected)).abs().max())


@pytest.mark.parametrize("mask", [Mask(), Mask(6)], ids=["full", "windowed"])
@pytest.mark.parametrize(("world_size", "count"), [(3, 120), (2, 3), (1, 40)])
def test_a_step_is_dense_attention(ranks: Ranks, world_size: int, count: int, mask: Mask) -> None:
    """Of sequences whose lines in the tables are in no order, on ranks that own some each."""
    found = ranks.run(farthest_from_dense_attention, world_size, count, mask, world_size=world_size)
    assert sum(outputs for outputs, _ in found) == count
    assert max(far for _, far in found) < 1e-5


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_memory_suffices_where_one_rank_has_all(rank: int) -> None:
    """One rank owns all queries and sends them to all others, each of which has keys."""
    count, ranks, mask = 6, 4, Mask()
    owners, before = np.zeros(count, dtype=np.int64), np.full((count, ranks), 3)
    hidden = {mask: np.zeros((count, ranks), dtype=np.int64)}
    decode = DecodeBatch((5, 4, 3, 2, 1, 0), np.full(count, 12), owners, before, hidden)
    tables, lines, blocks = tables_of(decode, rank)
    pool = KVCache(1, blocks, SIZE, SHAPE, torch.float32, CPU)
    exchange, keys = build_decode_exchange(decode, mask, rank, tables, lines, pool.slots)
    buffers = Buffers(CPU, headroom=0.0)
    core = CoreAttention(Nowhere(rank, ranks), OfPool(select_kernel("cpu"), keys), buffers)
    core.reserve(decode_memory(count, ranks, SHAPE))
    placed = core.buffers.place([exchange])
    program = tick_program("forward", (LayerGroup(range(1), False),), 1, False, False)
    q = torch.randn(exchange.q.local, SHAPE.heads, SHAPE.head_dim)
    with torch.no_grad():
        out = core(q, *pool.rows(0), EventCursor(placed, program), 1.0)
    assert out.shape == q.shape
