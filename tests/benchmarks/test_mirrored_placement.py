"""Documents in mirrored pieces, beside which the greedy scheduler's placement is measured."""

from __future__ import annotations

import numpy as np

from benchmarks.plans.mirrored_placement import mirrored_parts, mirrored_plan
from distca.plan import Mask, validate_plan
from distca.schedule import ScheduleConfig, make_scheduler

CONFIG = ScheduleConfig(block=8)


def test_a_document_on_two_ranks_has_a_mirrored_piece_on_each() -> None:
    parts, document, rank = mirrored_parts(np.array([24, 40]), np.array([32, 32]), 8)
    columns = (document, rank, parts.h0, parts.h1, parts.t1, parts.t0)
    assert [tuple(map(int, item)) for item in zip(*columns, strict=True)] == [
        (0, 0, 0, 8, 8, 24),
        # Eight tokens of the second document have room: four from both ends. The rest is one piece.
        (1, 0, 0, 4, 36, 40),
        (1, 1, 4, 16, 16, 36),
    ]
    # Early and late tokens: each rank's pairs are nearer to the mean than in turn.
    placed = mirrored_plan(np.array([64]), np.array([32, 32]), ScheduleConfig(tolerance=0.9))
    in_turn = make_scheduler("greedy", ScheduleConfig(tolerance=0.9)).plan(
        np.array([64]), np.array([32, 32]), Mask()
    )
    spread = [float(np.ptp(plan.loads_at_home())) for plan in (placed, in_turn)]
    assert spread[0] < spread[1] / 10


def test_plans_from_mirrored_pieces_are_whole_and_balanced() -> None:
    generator = np.random.default_rng(0)
    for _ in range(5):
        lengths = np.append(generator.integers(1, 900, 12), 7)
        lengths = np.append(lengths, -int(lengths.sum()) % 4 + 4)
        capacities = np.full(4, int(lengths.sum()) // 4)
        plan = mirrored_plan(lengths, capacities, CONFIG)
        validate_plan(plan)
        assert plan.placement.tokens_per_rank().tolist() == capacities.tolist()
        loads = plan.loads()
        assert loads.max() <= 1.2 * loads.mean()


def test_whole_documents_are_placed_alike() -> None:
    """Where no document spans ranks both are the same plan."""
    lengths = np.array([100, 28, 64, 64, 128])
    capacities = np.full(3, 128)
    mirrored = mirrored_plan(lengths, capacities, CONFIG).tasks
    in_turn = make_scheduler("greedy", CONFIG).plan(lengths, capacities, Mask()).tasks
    for column in ("document", "q_start", "q_end", "kv_start", "kv_end", "server"):
        assert getattr(mirrored, column).tolist() == getattr(in_turn, column).tolist()
