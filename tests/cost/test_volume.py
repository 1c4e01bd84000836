"""The bytes of a plan against sets of rows, and against numbers worked out by hand."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.volume import PHASES, AttentionShape, plan_bytes
from distca.plan import Mask, Plan, Tasks, place_sequentially, validate_plan
from support.random_plans import random_lengths, random_plan

# Six heads' LSE, 24 bytes, is padded to 32.
Q, KV, LSE = 6 * 8 * 2, 2 * 2 * 8 * 2, 32
SHAPE = AttentionShape(heads=6, kv_heads=2, head_dim=8, dtype_bytes=2)


def test_the_rows_of_a_shape() -> None:
    assert (SHAPE.q_row_bytes, SHAPE.kv_row_bytes, SHAPE.lse_row_bytes) == (Q, KV, LSE)
    # Each tensor's row is padded to 16 bytes: 5 heads, as of 40 with TP 8, and a key of 6 bytes.
    odd = AttentionShape(heads=5, kv_heads=1, head_dim=3, dtype_bytes=2)
    assert (odd.q_row_bytes, odd.kv_row_bytes, odd.lse_row_bytes) == (32, 2 * 16, 32)


def test_a_plan_worked_out_by_hand() -> None:
    # Rank 0 owns document 0 and 28 tokens of document 1, rank 1 the rest of it.
    lengths = np.array([100, 156])
    rows = [
        (0, 0, 100, 0, 100, 0),
        (1, 0, 28, 0, 28, 0),
        (1, 28, 156, 0, 28, 0),  # 128 queries of rank 1 to server 0, which has the keys
        (1, 28, 64, 28, 64, 1),
        (1, 64, 156, 28, 64, 0),  # the same queries again, 36 keys of rank 1
        (1, 64, 156, 64, 156, 1),
    ]
    plan = Plan(lengths, place_sequentially([lengths], 2, 128), Tasks.from_rows(rows), block=32)
    validate_plan(plan)
    for backward, resent in (("resend", 128 * Q + 36 * KV), ("keep", 0)):
        moved = plan_bytes(plan, SHAPE, backward)  # type: ignore[arg-type]
        assert tuple(moved.phases) == PHASES
        from_1_to_0 = {
            "dispatch": 128 * Q + 36 * KV,
            "combine": 0,
            "dispatch_backward": 128 * (2 * Q + LSE) + resent,
            "combine_backward": 0,
        }
        from_0_to_1 = {
            "dispatch": 0,
            "combine": 128 * (Q + LSE),
            "dispatch_backward": 0,
            "combine_backward": 128 * Q + 36 * KV,
        }
        for phase in PHASES:
            assert moved.phases[phase].tolist() == [
                [0, from_0_to_1[phase]],
                [from_1_to_0[phase], 0],
            ]
        assert moved.total == sum(from_1_to_0.values()) + sum(from_0_to_1.values())
        assert moved.sent().tolist() == [sum(from_0_to_1.values()), sum(from_1_to_0.values())]
        assert moved.received().tolist() == moved.sent().tolist()[::-1]
        assert moved.forward().total == from_1_to_0["dispatch"] + from_0_to_1["combine"]


@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.sampled_from([Mask(), Mask(0), Mask(50)]),
    st.sampled_from(["resend", "keep"]),
)
def test_bytes_are_those_of_the_sets_of_rows(
    seed: int, mask: Mask, backward: Literal["resend", "keep"]
) -> None:
    rng = np.random.default_rng(seed)
    world_size, tokens = int(rng.integers(1, 5)), int(rng.integers(20, 120))
    lengths = random_lengths(rng, world_size * tokens)
    plan = random_plan(rng, lengths, world_size, tokens, mask, block=32)
    owner = np.repeat(np.arange(world_size), tokens)  # of each token, placed sequentially
    offsets = np.cumsum(lengths) - lengths
    q_rows: list[set[int]] = [set() for _ in range(world_size)]
    kv_rows: list[set[int]] = [set() for _ in range(world_size)]
    t = plan.tasks
    for i in range(len(t)):
        offset, server = offsets[t.document[i]], t.server[i]
        q_rows[server] |= set(range(offset + t.q_start[i], offset + t.q_end[i]))
        kv_rows[server] |= set(range(offset + t.kv_start[i], offset + t.kv_end[i]))
    expected = {phase: np.zeros((world_size, world_size), dtype=np.int64) for phase in PHASES}
    for server in range(world_size):
        for rank in range(world_size):
            if rank == server:
                continue
            q = sum(owner[row] == rank for row in q_rows[server])
            kv = sum(owner[row] == rank for row in kv_rows[server])
            expected["dispatch"][rank, server] = q * Q + kv * KV
            expected["combine"][server, rank] = q * (Q + LSE)
            again = q * Q + kv * KV if backward == "resend" else 0
            expected["dispatch_backward"][rank, server] = q * (2 * Q + LSE) + again
            expected["combine_backward"][server, rank] = q * Q + kv * KV
    moved = plan_bytes(plan, SHAPE, backward)
    for phase in PHASES:
        assert np.array_equal(moved.phases[phase], expected[phase])
    assert moved.total == sum(int(matrix.sum()) for matrix in expected.values())
    assert moved.sent().tolist() == sum(m.sum(axis=1) for m in expected.values()).tolist()
    assert moved.received().tolist() == sum(m.sum(axis=0) for m in expected.values()).tolist()


def test_bad_shapes_and_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="6 query heads are not a multiple of 4 key-value heads"):
        AttentionShape(6, 4, 8)
    with pytest.raises(ValueError, match="at least 1"):
        AttentionShape(6, 2, 0)
    lengths = np.array([4])
    plan = Plan(lengths, place_sequentially([lengths], 1, 4), Tasks.from_rows([(0, 0, 4, 0, 4, 0)]))
    with pytest.raises(ValueError, match='"resend" or "keep"'):
        plan_bytes(plan, SHAPE, "twice")  # type: ignore[arg-type]
