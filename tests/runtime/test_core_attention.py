"""Disaggregated core attention on real ranks against dense attention in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distca.attention import select_kernel, select_kernel_of_heads
from distca.cost import volume
from distca.cost.memory import plan_memory
from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Mask, Placement, Plan, Tasks, place_in_turn, validate_plan
from distca.runtime import Buffers, CoreAttention, build_exchange
from distca.transport import CollectiveTransport, Transport
from distca.transport.shared_memory import SharedMemoryTransport
from support.programs import there_and_back
from support.random_plans import dense_attention, random_lengths, random_plan
from support.ranks import chosen

SCALE = 0.3
CPU = torch.device("cpu")


Shape = tuple[int, ...]
"""Query heads, key-value heads, elements of a head, and of a value's head where that is other."""


def inputs(seed: int, tokens: int, shape: Shape) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, size, of_value = *shape[:3], shape[-1]
    return [
        torch.randn(tokens, *head, generator=generator, dtype=torch.float64)
        for head in ((heads, size), (kv_heads, size), (kv_heads, of_value), (heads, of_value))
    ]


def attention_shape(shape: Shape, element: int) -> AttentionShape:
    return AttentionShape(*shape[:3], element, shape[-1])


def transport_over(name: str | None) -> Transport:
    """A transport between all ranks: of this name, or the one that was chosen for all tests."""
    if (name or chosen().transport) == "shm":
        return SharedMemoryTransport(dist.group.WORLD)
    return CollectiveTransport(dist.group.WORLD, CPU)


def core_attention_for(
    plan: Plan,
    shape: Shape,
    backward: str,
    dtype: str,
    over: str | None = None,
) -> CoreAttention:
    """Core attention in just the memory that the plan is said to need. Collective."""
    buffers = Buffers(CPU, headroom=0.0)
    kernel = select_kernel_of_heads("cpu", shape[2], shape[-1])
    attention = CoreAttention(transport_over(over), kernel, buffers, backward)
    heads = attention_shape(shape, getattr(torch, dtype).itemsize)
    attention.reserve(plan_memory(plan, heads, backward))
    return attention


def run_on_rank(
    plan: Plan,
    seed: int,
    shape: Shape,
    backward: str,
    dtype: str,
    over: str | None = None,
    piece_bytes: int = 2**18,
):
    """One rank's rows of output and gradients, and the bytes that it sent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(volume, "PIECE_BYTES", piece_bytes)
        return _run_on_rank(plan, seed, shape, backward, dtype, over)


def _run_on_rank(plan, seed, shape, backward, dtype, over):
    rank = dist.get_rank()
    attention = core_attention_for(plan, shape, backward, dtype, over)
    mine = plan.placement.of_rank(rank)
    rows = np.concatenate(
        [np.arange(0)]
        + [
            plan.document_offsets[d] + np.arange(s, e)
            for d, s, e in zip(mine.document, mine.start, mine.end, strict=True)
        ]
    )
    q, k, v, dout = (
        x[rows].to(getattr(torch, dtype)) for x in inputs(seed, int(plan.lengths.sum()), shape)
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    (exchange,) = attention.buffers.place([build_exchange(plan, rank)])
    out = attention(q, k, v, there_and_back([exchange]), SCALE)
    out.backward(dout)
    figures = [out.detach(), q.grad, k.grad, v.grad]
    moved = attention.transport.bytes_sent, attention.transport.bytes_received
    attention.transport.close()
    return rows, [x.double() for x in figures], *moved


def check(
    ranks,
    plan: Plan,
    shape,
    backward="resend",
    dtype="float32",
    tolerance=2e-5,
    over=None,
    piece_bytes=2**18,
):
    validate_plan(plan)
    world_size = plan.world_size
    tokens = int(plan.lengths.sum())
    q, k, v, dout = inputs(7, tokens, shape)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = dense_attention(q, k, v, plan.lengths, plan.mask, SCALE)
    out.backward(dout)
    expected = [out.detach(), q.grad, k.grad, v.grad]
    how = shape, backward, dtype, over, piece_bytes
    results = ranks.run(run_on_rank, plan, 7, *how, world_size=world_size)
    for rows, figures, _, _ in results:
        for name, mine, all_rows in zip(("out", "dq", "dk", "dv"), figures, expected, strict=True):
            difference = (mine - all_rows[rows]).abs().max() if len(rows) else 0
            assert difference <= tolerance * all_rows.abs().max(), (name, difference)
    element = {"float32": 4, "bfloat16": 2}[dtype]
    for phase, matrix in plan_bytes(plan, attention_shape(shape, element), backward).phases.items():
        for rank, (_, _, sent, received) in enumerate(results):
            assert sent[phase] == matrix[rank].sum(), (phase, rank)
            assert received[phase] == matrix[:, rank].sum(), (phase, rank)


@pytest.mark.parametrize("seed", range(6))
def test_random_plans(ranks, seed: int) -> None:
    rng = np.random.default_rng(seed)
    world_size = int(rng.integers(1, 5))
    # In steps of the block and odd ones; chunks end on ranks that their document does not.
    masks = Mask(), Mask(int(rng.integers(0, 100))), Mask(None, (50, 64)[seed // 3])
    mask = masks[seed % 3]
    lengths = random_lengths(rng, world_size * 160)
    plan = random_plan(rng, lengths, world_size, 160, mask)
    # Rows of odd sizes are padded in messages; values may be of other sizes than keys.
    shape = [(5, 5, 6, 10), (4, 2, 16), (6, 1, 8, 4)][seed % 3]
    # Rows are put together on their way into messages and out, or copied in pieces.
    pieces = (2**18, 0)[seed // 2 % 2]
    check(ranks, plan, shape, backward=("resend", "keep")[seed // 3], piece_bytes=pieces)


@pytest.mark.parametrize("over", [None, "shm"])
def test_bfloat16(ranks, over: str | None) -> None:
    rng = np.random.default_rng(11)
    plan = random_plan(rng, random_lengths(rng, 3 * 160), 3, 160, Mask())
    check(ranks, plan, (4, 2, 16), dtype="bfloat16", tolerance=3e-2, over=over)


@pytest.mark.parametrize("over", [None, "shm"])
@pytest.mark.parametrize("backward", ["resend", "keep"])
def test_rank_without_tokens_and_rank_without_tasks(ranks, backward: str, over: str | None) -> None:
    """Rank 1 owns nothing and serves; rank 2 owns tokens and serves nobody."""
    lengths = np.array([200, 1, 55])
    placement = Placement(
        document=np.array([0, 0, 1, 2]),
        start=np.array([0, 128, 0, 0]),
        end=np.array([128, 200, 1, 55]),
        rank=np.array([0, 2, 2, 2]),
        world_size=3,
    )
    tasks = Tasks.from_rows(
        [
            (0, 0, 128, 0, 128, 0),
            (0, 128, 200, 0, 128, 1),
            (0, 128, 200, 128, 200, 0),
            (1, 0, 1, 0, 1, 1),
            (2, 0, 55, 0, 55, 1),
        ]
    )
    check(ranks, Plan(lengths, placement, tasks), (4, 2, 8, 12), backward=backward, over=over)


@pytest.mark.parametrize("server", [0, 1, 2])
def test_exchanges_in_which_nothing_moves_are_left_out(ranks, server: int) -> None:
    """Two documents; the second's queries are computed at home, or beside the first, or neither."""
    lengths = np.array([128, 128])
    placement = Placement(
        document=np.array([0, 1, 1]),
        start=np.array([0, 0, 64]),
        end=np.array([128, 64, 128]),
        rank=np.array([0, 1, 1 if server == 1 else 2]),
        world_size=3,
    )
    tasks = Tasks.from_rows(
        [(0, 0, 128, 0, 128, 0), (1, 0, 64, 0, 64, 1), (1, 64, 128, 0, 128, server)]
    )
    plan = Plan(lengths, placement, tasks)
    found = ranks.run(exchanges_of, plan, world_size=3)
    assert found == 3 * [
        [
            # Queries, keys and values travel; keys and values alone; nothing.
            ["dispatch", "combine", "dispatch_backward", "combine_backward"],
            [],
            ["dispatch", "dispatch_backward", "combine_backward"],
        ][server]
    ]


def exchanges_of(plan: Plan) -> list[str]:
    """The phases of the exchanges that a rank starts, there and back."""
    rank = dist.get_rank()
    attention = core_attention_for(plan, (2, 2, 8), "resend", "float32")
    start, phases = attention.transport.start, []
    attention.transport.start = lambda phase, *more: phases.append(phase) or start(phase, *more)
    rows = int(plan.placement.tokens_per_rank()[rank])
    q, k, v = (torch.randn(rows, 2, 8, requires_grad=True) for _ in range(3))
    (exchange,) = attention.buffers.place([build_exchange(plan, rank)])
    attention(q, k, v, there_and_back([exchange]), SCALE).sum().backward()
    return phases


@pytest.mark.parametrize("over", [None, "shm"])
@pytest.mark.parametrize("backward", ["resend", "keep"])
def test_keys_sent_ahead(ranks, backward: str, over: str | None) -> None:
    """Three layers' gradients are those without it, to the bit, and so are the bytes."""
    lengths = np.array([300, 1, 83])
    placement = place_in_turn(lengths, np.array([128, 128, 128]))
    at = placement
    zeros = np.zeros_like(at.end)
    rows = list(zip(at.document, at.start, at.end, zeros, at.end, at.rank, strict=True))
    plan = Plan(lengths, placement, Tasks.from_rows(rows))
    validate_plan(plan)
    for plain, ahead in ranks.run(three_layers, plan, backward, over, world_size=3):
        assert plain[1] == ahead[1]
        for one, other in zip(plain[0], ahead[0], strict=True):
            assert torch.equal(one, other)
        assert plain[2] != ahead[2] or backward == "keep"


def three_layers(plan: Plan, backward: str, over: str | None) -> list[Any]:
    """Gradients, bytes sent and events of three layers, without and with keys sent ahead."""
    rank = dist.get_rank()
    results = []
    for ahead in (False, True):
        attention = core_attention_for(plan, (4, 2, 8), backward, "float32", over)
        attention.trace.recording = True
        exchanges = attention.buffers.place([build_exchange(plan, rank)])
        run = there_and_back(exchanges, 3, at_home=ahead)
        generator = torch.Generator().manual_seed(rank)
        made = [torch.randn(128, heads, 8, generator=generator) for heads in (4, 2, 2)]
        q, k, v = (x.requires_grad_() for x in made)
        out = q
        for layer in range(3):
            out = attention(out, k * (1 + layer), v, run, SCALE)
        out.sum().backward()
        events = [event["name"] for event in attention.trace.take(0)]
        sent = attention.transport.bytes_sent
        results.append(([x.grad for x in (q, k, v)], dict(sent), events))
        attention.transport.close()
    return results


def test_wrong_number_of_rows_is_refused() -> None:
    lengths = np.array([4])
    placement = Placement(*(np.array([x]) for x in (0, 0, 4, 0)), world_size=1)
    plan = Plan(lengths, placement, Tasks.from_rows([(0, 0, 4, 0, 4, 0)]))
    attention = CoreAttention(None, select_kernel("cpu"), Buffers(CPU))  # type: ignore[arg-type]
    run = there_and_back([build_exchange(plan, 0)])
    with pytest.raises(ValueError, match="3 rows, but the plan places 4"):
        attention(*(torch.zeros(3, 1, 8) for _ in range(3)), run, 1.0)


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("backward", ["resend", "keep"])
def test_keys_of_a_cached_prefix(ranks, backward: str, window: int | None) -> None:
    """A plan for a document's later queries; its earlier keys lie before or among other rows."""
    mask = Mask(window)
    lengths = np.array([300, 1, 83])
    # The first 140 tokens of the first document are cached.
    placement = Placement(
        document=np.array([0, 0, 0, 1, 0, 2]),
        start=np.array([0, 140, 70, 0, 200, 0]),
        end=np.array([70, 200, 140, 1, 300, 83]),
        rank=np.array([2, 0, 0, 0, 1, 2]),
        world_size=3,
    )
    tasks = Tasks.from_rows(
        [
            (0, 140, 200, int(mask.first_key(140)), 200, 1),
            (0, 200, 300, int(mask.first_key(200)), 300, 2),
            (1, 0, 1, 0, 1, 0),
            (2, 0, 83, 0, 83, 0),
        ]
    )
    plan = Plan(lengths, placement, tasks, mask, cached_prefix=np.array([140, 0, 0]))
    validate_plan(plan)
    tokens, shape = int(lengths.sum()), (4, 2, 8)
    q, k, v, dout = inputs(7, tokens, shape)
    dout[:140] = 0
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = dense_attention(q, k, v, lengths, mask, SCALE)
    out.backward(dout)
    results = ranks.run(run_later_queries, plan, shape, backward, world_size=3)
    sums = [torch.zeros_like(x) for x in (out, q, k, v)]
    for (q_rows, kv_rows), figures, sent in results:
        for total, rows, mine in zip(
            sums, (q_rows, q_rows, kv_rows, kv_rows), figures, strict=True
        ):
            total[rows] += mine
        assert sent
    for total, expected in zip(sums, (out, q.grad, k.grad, v.grad), strict=True):
        assert expected is not None
        expected = expected.detach().clone()
        if total is sums[0] or total is sums[1]:
            expected[:140] = 0
        assert (total - expected).abs().max() < 2e-5 * expected.abs().max()


def run_later_queries(plan: Plan, shape: Shape, backward: str):
    """One rank's queries and all of its keys; and whether it counted what the plan says."""
    rank = dist.get_rank()
    attention = core_attention_for(plan, shape, backward, "float32")
    at = plan.placement
    mine = np.flatnonzero(at.rank == rank)
    own = mine[plan.own_pieces[mine]]
    q_rows, kv_rows = (
        np.concatenate(
            [np.arange(0)]
            + [plan.document_offsets[at.document[n]] + np.arange(at.start[n], at.end[n]) for n in p]
        )
        for p in (own, mine)
    )
    q, k, v, dout = inputs(7, int(plan.lengths.sum()), shape)
    q, dout = (x[q_rows].float() for x in (q, dout))
    k, v = (x[kv_rows].float() for x in (k, v))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, there_and_back([build_exchange(plan, rank)]), SCALE)
    out.backward(dout)
    planned = plan_bytes(plan, attention_shape(shape, 4), backward).phases
    sent = all(
        attention.transport.bytes_sent[phase] == matrix[rank].sum()
        for phase, matrix in planned.items()
    )
    attention.transport.close()
    figures = [x.double() for x in (out.detach(), q.grad, k.grad, v.grad)]
    return (q_rows, kv_rows), figures, sent


def results_of_two_calls(plan: Plan) -> list[bool]:
    """Whether the first call's output and gradients are the same after a second one."""
    shape = (4, 2, 16)
    attention = core_attention_for(plan, shape, "resend", "float32")
    (exchange,) = attention.buffers.place([build_exchange(plan, dist.get_rank())])
    rows = int(plan.placement.tokens_per_rank()[dist.get_rank()])
    kept, copies = [], []
    for seed in range(2):
        q, k, v, dout = (x[:rows].float().requires_grad_() for x in inputs(seed, rows, shape))
        out = attention(q, k, v, there_and_back([exchange]), SCALE)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        if seed == 0:
            kept = [out, *gradients]
            copies = [each.detach().clone() for each in kept]
    attention.transport.close()
    return [torch.equal(each, copy) for each, copy in zip(kept, copies, strict=True)]


def test_results_are_not_overwritten_by_the_next_call(ranks) -> None:
    """Buffers are used again; what the model is given is its own."""
    rng = np.random.default_rng(5)
    plan = random_plan(rng, random_lengths(rng, 2 * 160), 2, 160, Mask())
    for same in ranks.run(results_of_two_calls, plan, world_size=2):
        assert same == [True] * 4
