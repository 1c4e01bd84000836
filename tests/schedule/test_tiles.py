"""The tiles scheduler: random batches, bounds, moves, topology, speeds."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distca.cost.kernel_time import AnalyticCost, CostModel
from distca.cost.link import Links
from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Mask, Placement, Plan, Tasks, place_in_turn, validate_plan
from distca.plan.span import Int64s
from distca.schedule import ScheduleConfig, describe, even_capacities, make_scheduler, move_tiles
from distca.schedule.base import relative_loads, server_loads
from distca.schedule.tiles import scheduler
from distca.schedule.tiles.packing import Packing, _slice_edges, _slice_tokens, place_balanced
from distca.schedule.tiles.recv_bound import _with_given, bound_recv_bytes, received_bytes
from support.batches import SlowStart, documents, long_tailed_lengths, placement_rows, task_rows

SHAPE = AttentionShape(heads=8, kv_heads=2, head_dim=64)
MASKS = st.sampled_from([Mask(), Mask(0), Mask(100), Mask(999), Mask(None, 256)])


def make(
    lengths: Int64s, capacities: Int64s, config: ScheduleConfig, mask: Mask, free: bool
) -> Plan:
    tiles = make_scheduler("tiles", config)
    if free:
        return tiles.plan(lengths, capacities, mask)
    return tiles.schedule(lengths, place_in_turn(lengths, capacities), mask)


def imbalance(plan: Plan, config: ScheduleConfig) -> float:
    loads = server_loads(plan.tasks, plan.mask, plan.world_size, config.cost_model)
    return float(relative_loads(loads, config.speeds_of(plan.world_size)).max())


def received(plan: Plan, shape: AttentionShape = SHAPE) -> int:
    return int(plan_bytes(plan, shape).phases["dispatch"].sum(axis=0).max())


@settings(max_examples=150)
@given(
    documents(most_ranks=64),
    MASKS,
    st.sampled_from([0.0, 0.1, 0.5]),
    st.sampled_from([1, 32, 128]),
    st.sampled_from([None, SlowStart()]),
    st.sampled_from([1, 4]),
    st.booleans(),
)
def test_plans_of_random_batches(
    batch: tuple[Int64s, Int64s],
    mask: Mask,
    tolerance: float,
    block: int,
    cost_model: CostModel | None,
    ranks_per_node: int,
    free: bool,
) -> None:
    lengths, capacities = batch
    config = ScheduleConfig(
        tolerance, SHAPE, cost_model, block, links=Links(ranks_per_node=ranks_per_node)
    )
    plan = make(lengths, capacities, config, mask, free)
    validate_plan(plan)
    assert np.array_equal(plan.lengths, lengths)
    assert np.array_equal(plan.placement.tokens_per_rank(), capacities)
    again = make(lengths, capacities, config, mask, free)
    assert task_rows(again) == task_rows(plan)
    assert placement_rows(again) == placement_rows(plan)
    over = imbalance(plan, config) > 1 + tolerance + 1e-6
    assert over == bool(plan.notes)
    if over:
        assert "above the tolerance" in plan.notes[0]
    elif not free:
        # Nobody gives who need not: within the tolerance all stay at home.
        home = server_loads(
            make_scheduler("packed", config).schedule(lengths, plan.placement, mask).tasks,
            mask,
            len(capacities),
            cost_model,
        )
        if relative_loads(home, np.ones(len(capacities))).max() <= 1 + tolerance:
            assert plan_bytes(plan, SHAPE).phases["combine"].sum() == 0


@settings(max_examples=100)
@given(documents(most_ranks=32), MASKS, st.integers(0, 400), st.booleans())
# Two pieces of the first document touch on a rank.
@example((np.array([128, *[1] * 8, 40]), np.full(22, 8)), Mask(None, 256), 119, True)
def test_no_server_receives_more_than_its_arena_holds(
    batch: tuple[Int64s, Int64s], mask: Mask, rows: int, free: bool
) -> None:
    lengths, capacities = batch
    bound = rows * SHAPE.kv_row_bytes
    config = ScheduleConfig(shape=SHAPE, block=32, max_buffer_bytes=bound)
    unbounded = make(lengths, capacities, replace(config, max_buffer_bytes=None), mask, free)
    try:
        plan = make(lengths, capacities, config, mask, free)
    except ValueError as error:
        if f"keeps to {bound:,} buffer bytes" not in str(error) or received(unbounded) <= bound:
            raise
        return
    validate_plan(plan)
    assert received(plan) <= bound
    if imbalance(plan, config) > 1.1 + 1e-6:
        assert f"within {bound:,} buffer bytes" in plan.notes[0]


def test_a_tighter_arena_costs_balance_and_the_plan_says_so() -> None:
    lengths = long_tailed_lengths(0, 8 * 4096, 300, 8192)
    at = place_in_turn(lengths, even_capacities(8 * 4096, 8))
    config = ScheduleConfig(shape=SHAPE)
    tiles = make_scheduler("tiles", config)
    free = tiles.schedule(lengths, at, Mask())
    at_home = received(make_scheduler("packed", config).schedule(lengths, at, Mask()))
    assert imbalance(free, config) <= 1.1
    assert received(free) > at_home
    tight = replace(config, max_buffer_bytes=at_home)
    plan = make_scheduler("tiles", tight).schedule(lengths, at, Mask())
    assert received(plan) <= at_home
    assert imbalance(plan, tight) > 1.1
    assert f"within {at_home:,} buffer bytes" in plan.notes[0]


def test_queries_go_to_keys_where_keys_do_not_fit() -> None:
    # The second rank owns the last 512 rows of a long document: its keys are many, its rows few.
    lengths = np.array([4096 + 512, 3584])
    at = place_in_turn(lengths, np.array([4096, 4096]))
    config = ScheduleConfig(shape=SHAPE)
    plan = make_scheduler("packed", config).schedule(lengths, at, Mask())
    assert received_bytes(plan, SHAPE).tolist() == [0, 4096 * SHAPE.kv_row_bytes]
    fitted = bound_recv_bytes(plan, SHAPE, 2000 * SHAPE.kv_row_bytes)
    validate_plan(fitted)
    assert received_bytes(fitted, SHAPE).tolist() == [512 * SHAPE.q_row_bytes, 0]
    # A window needs few keys anyway.
    windowed = make_scheduler("packed", config).schedule(lengths, at, Mask(100))
    assert bound_recv_bytes(windowed, SHAPE, 0) is windowed


def test_keys_are_given_over_up_to_the_end_of_a_task() -> None:
    """A server gives two ranges of a task's keys to the other; the second ends with the task."""
    zero, length = np.zeros(1, dtype=np.int64), np.array([64])
    plan = Plan(
        length,
        Placement(zero, zero, length, zero, 2),
        Tasks.from_rows([(0, 0, 64, 0, 64, 0)]),
        Mask(),
        block=16,
        scheduler="by hand",
    )
    plan = replace(plan, tasks=_with_given(plan, [(0, 1, 16, 32), (0, 1, 48, 64)]))
    validate_plan(plan)
    assert sorted(task_rows(plan)) == [
        (0, 0, 16, 0, 16, 0),
        (0, 16, 32, 16, 32, 1),
        (0, 16, 64, 0, 16, 0),
        (0, 32, 48, 32, 48, 0),
        (0, 32, 64, 16, 32, 1),
        (0, 48, 64, 32, 48, 0),
        (0, 48, 64, 48, 64, 1),
    ]


def test_documents_stay_whole_where_nothing_may_be_received() -> None:
    """Balanced placements would spread the long one, and in turn it would lie on both ranks."""
    lengths, capacities = np.array([256, 256, 1024, 256, 256]), np.array([1024, 1024])
    config = ScheduleConfig(shape=SHAPE, max_buffer_bytes=0)
    plan = make(lengths, capacities, config, Mask(), True)
    validate_plan(plan)
    assert received(plan) == 0
    assert len(plan.placement.document) == 5
    assert "within 0 buffer bytes" in plan.notes[0]


@pytest.mark.parametrize(
    ("number", "seed", "median", "longest", "most"),
    [
        (0, 0, 500, 32768, 0.88),
        (1, 6, 300, 8192, 0.78),
        (2, 3, 300, 8192, 0.70),
        (3, 1, 300, 8192, 0.88),
    ],
)
def test_each_setting_of_the_packing_is_the_best_for_some_batch(
    number: int, seed: int, median: int, longest: int, most: float, monkeypatch
) -> None:
    """Without it the busiest link is busy for longer."""
    lengths = long_tailed_lengths(seed, 8 * 4096, median, longest)
    config, every = ScheduleConfig(shape=SHAPE), scheduler._SETTINGS

    def busiest() -> float:
        plan = make(lengths, even_capacities(8 * 4096, 8), config, Mask(), True)
        return describe(plan, config).link_seconds_max

    with_it = busiest()
    monkeypatch.setattr(scheduler, "_SETTINGS", every[:number] + every[number + 1 :])
    # Seen: 0.02 less.
    assert with_it < most * busiest()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cost_model", [None, AnalyticCost.of_shape(SHAPE), SlowStart(10**5)])
def test_fewer_bytes_than_greedy_on_long_tails(seed: int, cost_model: CostModel | None) -> None:
    ranks, tokens = 16, 16384
    lengths = long_tailed_lengths(seed, ranks * tokens, tokens // 16, 2 * tokens)
    capacities = even_capacities(ranks * tokens, ranks)
    config = ScheduleConfig(shape=SHAPE, cost_model=cost_model)
    summaries = {}
    for name in ("greedy", "tiles"):
        plan = make_scheduler(name, config).plan(lengths, capacities, Mask())
        validate_plan(plan)
        summaries[name] = describe(plan, config)
        assert summaries[name].load_max_over_mean <= 1.1
    tiles, greedy = summaries["tiles"], summaries["greedy"]
    assert tiles.bytes_total < 0.6 * greedy.bytes_total
    busiest = [max(s.bytes_max_sent, s.bytes_max_received) for s in (tiles, greedy)]
    assert busiest[0] < 0.5 * busiest[1]


def test_short_documents_stay_whole_and_at_home() -> None:
    lengths = np.array([8192] + [64] * 1024)
    plan = make_scheduler("tiles", ScheduleConfig(shape=SHAPE)).plan(
        lengths, even_capacities(int(lengths.sum()), 8), Mask()
    )
    at = plan.placement
    short = at.document > 0
    # At most one document is cut at the edge between two ranks.
    assert np.unique(at.document[short]).size >= short.sum() - 7
    owners = {(d, s): r for d, s, _, r in placement_rows(plan)}
    for document, q_start, _, _, _, server in task_rows(plan):
        if document:
            assert owners[document, q_start] == server


def test_documents_stay_in_nodes_that_can_take_them() -> None:
    flat, nodes = (ScheduleConfig(shape=SHAPE, links=Links(ranks_per_node=n)) for n in (1, 8))
    across = np.zeros(2)
    for seed in range(4):
        lengths = long_tailed_lengths(seed, 64 * 8192, 900, 16384)
        for column, config in enumerate((flat, nodes)):
            plan = make(lengths, even_capacities(64 * 8192, 64), config, Mask(), True)
            assert imbalance(plan, config) <= 1.1
            forward = plan_bytes(plan, SHAPE).forward()
            across[column] += nodes.links.between_nodes(forward)
    # Seen: about a fifth.
    assert across[1] < 0.4 * across[0]


def moved_on_two(
    length: int,
    block: int,
    speeds: tuple[float, float],
    pieces: list[tuple[int, int, int]],
    tasks: list[tuple[int, int, int, int, int]],
) -> set[tuple[int, ...]]:
    """The tasks of a document on two ranks after moves, that were none before."""
    document, start, end, rank = np.array([(0, *piece) for piece in pieces]).T
    before = Plan(
        np.array([length]),
        Placement(document, start, end, rank, 2),
        Tasks.from_rows([(0, *task) for task in tasks]),
        Mask(),
        block,
        scheduler="by hand",
    )
    validate_plan(before)
    after = move_tiles(before, ScheduleConfig(shape=SHAPE, block=block, server_speeds=speeds))
    validate_plan(after)
    return {row[1:] for row in task_rows(after)} - set(tasks)


def test_the_flattest_tile_below_the_diagonal_of_late_keys() -> None:
    """The task on the diagonal sees the last 1024 keys, the other server has the first ones."""
    tasks = [(1024, 2048, 1024, 2048, 0), (0, 1024, 0, 1024, 1), (1024, 2048, 0, 1024, 1)]
    pairs = [1024 * 1025 // 2, 1024 * 1025 // 2, 1024 * 1024]
    # One server is seven times as fast; givers go half a percent below the tolerance of 10%.
    wanted = pairs[0] - 0.995 * 1.1 * sum(pairs) / 8
    rows = next(rows for rows in range(1, 1024) if rows * (1024 - rows) >= wanted)
    cut = 2048 - rows
    assert moved_on_two(2048, 1, (1.0, 7.0), [(0, 1024, 1), (1024, 2048, 0)], tasks) == {
        (cut, 2048, 1024, cut, 1),
        (1024, cut, 1024, cut, 0),
        (cut, 2048, cut, 2048, 0),
    }


def test_tiles_over_keys_that_begin_off_the_blocks() -> None:
    """Keys that the recipient holds are cut on blocks, but not where the task's begin anyway."""
    # The other server owns keys from 1000 to 3000: 1984 on whole blocks, 752 rows move.
    pieces = [(0, 1000, 0), (3000, 4096, 0), (1000, 3000, 1)]
    assert moved_on_two(4096, 16, (3.0, 1.0), pieces, [(0, 4096, 0, 4096, 0)]) == {
        (3344, 4096, 1008, 2992, 1),
        (0, 3344, 0, 3344, 0),
        (3344, 4096, 0, 1008, 0),
        (3344, 4096, 2992, 4096, 0),
    }
    # The giver owns them, and has later queries over them.
    pieces = [(0, 1000, 1), (3000, 4096, 1), (1000, 3000, 0)]
    tasks = [(1000, 3000, 1000, 3000, 0), (3000, 4096, 1000, 3000, 0), (0, 1000, 0, 1000, 1)]
    tasks += [(1000, 4096, 0, 1000, 1), (3000, 4096, 3000, 4096, 1)]
    assert moved_on_two(4096, 16, (1.0, 1.5), pieces, tasks) == {
        (3744, 4096, 1000, 2448, 1),
        (3000, 3744, 1000, 3000, 0),
        (3744, 4096, 2448, 3000, 0),
    }


def test_cheap_links_are_preferred_for_moves() -> None:
    lengths = np.array([16384] + [256] * 64 + [16384] + [256] * 64)
    capacities = even_capacities(int(lengths.sum()), 4)
    at = place_in_turn(lengths, capacities)
    flat, nodes = (ScheduleConfig(shape=SHAPE, links=Links(ranks_per_node=n)) for n in (1, 2))
    plans = [make_scheduler("tiles", c).schedule(lengths, at, Mask()) for c in (flat, nodes)]
    across = [nodes.links.between_nodes(plan_bytes(plan, SHAPE).forward()) for plan in plans]
    assert across[1] <= across[0]
    assert all(imbalance(plan, flat) <= 1.1 for plan in plans)
    assert across[1] == 0


def test_slow_servers_get_less() -> None:
    lengths = long_tailed_lengths(3, 8 * 8192, 500, 16384)
    capacities = even_capacities(8 * 8192, 8)
    config = ScheduleConfig(shape=SHAPE, server_speeds=(1.0,) * 4 + (0.5,) * 4)
    for free in (True, False):
        plan = make(lengths, capacities, config, Mask(), free)
        validate_plan(plan)
        assert imbalance(plan, config) <= 1.1
        loads = plan.loads()
        assert loads[4:].sum() < 0.6 * loads[:4].sum()
    with pytest.raises(ValueError, match="8 server speeds are given for 4 servers"):
        make(lengths, even_capacities(8 * 8192, 4), config, Mask(), True)


@pytest.mark.parametrize("slow", [(), (0.5,) * 4])
def test_givers_stop_at_the_tolerance(slow: tuple[float, ...]) -> None:
    """What they gave beyond it would travel for nothing: a server at the mean is no faster than the
    busiest."""
    speeds = (1.0,) * (8 - len(slow)) + slow
    moved = {}
    for tolerance in (0.0, 0.1, 0.3):
        config = ScheduleConfig(tolerance, SHAPE, block=32, server_speeds=speeds)
        moved[tolerance] = 0
        for seed in range(4):
            lengths = long_tailed_lengths(seed, 8 * 8192, 500, 16384)
            at = place_in_turn(lengths, even_capacities(8 * 8192, 8))
            home = make_scheduler("packed", config).schedule(lengths, at, Mask())
            plan = move_tiles(home, config)
            before, after = (
                relative_loads(server_loads(p.tasks, p.mask, 8, None), np.array(speeds))
                for p in (home, plan)
            )
            givers = before > 1 + tolerance
            assert givers.sum() > 1
            # Cut on blocks, tiles are a little larger or smaller than they should be.
            assert (after[givers] > 0.98 * (1 + tolerance)).all(), (seed, after)
            assert (after < 1.01 * (1 + tolerance)).all(), (seed, after)
            added = (plan_bytes(p, SHAPE).phases for p in (plan, home))
            there, here = (phases["dispatch"] + phases["combine"] for phases in added)
            moved[tolerance] += int(there.sum() - here.sum())
    # Seen: 0.83 and 0.60; 0.84 and 0.62 with slow servers. To the mean: 0.94 and 0.79.
    assert moved[0.1] < 0.88 * moved[0.0]
    assert moved[0.3] < 0.66 * moved[0.0]


def test_nothing_is_cut_smaller_than_the_kernel_runs_well() -> None:
    model = SlowStart(10**6)
    config = ScheduleConfig(shape=SHAPE, cost_model=model)
    assert config.least_rows() == 1024
    assert ScheduleConfig(shape=SHAPE, cost_model=SlowStart(1)).least_rows() == 128
    lengths = np.array([16384] + [512] * 32)
    at = place_in_turn(lengths, even_capacities(int(lengths.sum()), 4))
    plan = make_scheduler("tiles", config).schedule(lengths, at, Mask())
    validate_plan(plan)
    moved = plan.tasks[plan.tasks.document == 0]
    assert len(moved) > 2
    assert (moved.q_end - moved.q_start).min() >= 1024
    assert (moved.kv_end - moved.kv_start).min() >= 1024


def test_one_document_on_more_ranks_than_blocks() -> None:
    plan = make(
        np.array([300]), even_capacities(300, 64), ScheduleConfig(shape=SHAPE), Mask(), True
    )
    validate_plan(plan)
    assert plan.notes


@pytest.mark.parametrize("share", [0.3, 0.98])
def test_short_documents_beside_one_that_has_nearly_all_work(share: float) -> None:
    total = 16 * 65_536
    longest = int(total * share)
    lengths = np.array([longest, *long_tailed_lengths(0, total - longest, 20_000, total)])
    plan = make(lengths, even_capacities(total, 16), ScheduleConfig(shape=SHAPE), Mask(), True)
    validate_plan(plan)


def test_many_short_documents() -> None:
    lengths = np.random.default_rng(0).integers(1, 700, size=100_000)
    capacities = even_capacities(int(lengths.sum()), 512)
    config = ScheduleConfig(shape=SHAPE)
    plan = make(lengths, capacities, config, Mask(), True)
    validate_plan(plan)
    assert imbalance(plan, config) <= 1.1
    # Only documents at the edges of ranks are cut.
    assert len(plan.placement.document) <= 100_000 + 511


def test_the_same_plan_in_another_process() -> None:
    """The plan is a pure function: no hash seeds, no order of sets."""
    code = """
import sys, zlib
sys.path[:0] = ['tests']
from support.batches import long_tailed_lengths, placement_rows, task_rows
from distca.plan import Mask
from distca.schedule import ScheduleConfig, even_capacities, make_scheduler
lengths = long_tailed_lengths(7, 32 * 8192, 600, 65536)
capacities = even_capacities(32 * 8192, 32)
plan = make_scheduler('tiles', ScheduleConfig()).plan(lengths, capacities, Mask())
print(zlib.crc32(repr((task_rows(plan), placement_rows(plan))).encode()))
"""
    root = Path(__file__).parents[2]
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    ("counts", "shares"),
    [({1: 63, 2: 44, 7: 43}, [3, 1, 3]), ({2: 26, 10: 33}, [3, 2, 3])],
    ids=["many", "few in a stratum"],
)
def test_filler_brings_each_rank_its_load(counts: dict[int, int], shares: list[int]) -> None:
    """Where all ranks have the same room, those that should have more get the longer documents."""
    lengths = np.repeat(list(counts), list(counts.values()))
    loads = lengths * (lengths + 1) / 2
    targets = loads.sum() * np.array(shares) / sum(shares)
    capacities = even_capacities(int(lengths.sum()), 3)
    at = place_balanced(lengths, loads, Packing(capacities, targets, 0.2, 0.0, 0.02, 3, 1))
    assert at.tokens_per_rank().tolist() == capacities.tolist()
    pairs = Mask().pairs(at.start, at.end, 0 * at.start, at.end)
    # Seen: 1.046 and 1.031.
    assert (np.bincount(at.rank, weights=pairs) / targets).max() < 1.05


def test_slices_mirror_each_other_by_whole_blocks() -> None:
    """A document of 128.5 blocks over two ranks: 32 + 32.5 blocks, and the 64 between them."""
    block, capacities = 16, np.array([4096, 4096])
    tokens = np.array([64 * block + 8, 64 * block])
    heads, tails = _slice_edges(tokens, capacities, block)
    assert (heads.tolist(), tails.tolist()) == ([512, 1024], [1536, 1024])
    # The first has what is left of the document after its last whole block.
    assert _slice_tokens(heads, tails, int(tokens.sum())).tolist() == tokens.tolist()
    # Where capacities forbid it, edges are where the tokens say.
    tight = np.array([64 * block + 1, 64 * block])
    heads, tails = _slice_edges(tight, tight, block)
    assert _slice_tokens(heads, tails, int(tight.sum())).tolist() == tight.tolist()
