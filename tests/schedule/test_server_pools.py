"""Server pools: documents by total work, tasks inside a pool, tokens and bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.cost.link import Links
from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import LayerMasks, Mask, Placement, validate_plan
from distca.plan.span import Floats, Int64s
from distca.schedule import (
    Documents,
    ExecutionOptions,
    GlobalBatchPlanner,
    LinearWork,
    PlannedGlobalBatch,
    ScheduleConfig,
    documents_in_turn,
)
from distca.schedule.tiles import scheduler
from distca.schedule.tiles.packing import Packing, place_balanced
from distca.schedule.training.planned_batch import PADDING
from support.batches import long_tailed_lengths

RANKS, WINDOW, MICRO_BATCHES = 8, 8 * 4096, 4
CONFIG = ScheduleConfig(tolerance=0.05, shape=AttentionShape(8, 2, 64), links=Links(4, 450.0, 50.0))
WORK = LinearWork(3000.0, 100.0)


def windows() -> list[np.ndarray]:
    return [long_tailed_lengths(seed, WINDOW, 600, 16000) for seed in range(MICRO_BATCHES)]


def planner(size: int | None, **changes: object) -> GlobalBatchPlanner:
    options = replace(ExecutionOptions(pool_size=size), **changes)  # type: ignore[arg-type]
    servers = np.arange(RANKS, dtype=np.int64)[None]
    return GlobalBatchPlanner(servers, CONFIG, options, linear_work=WORK, row_multiple=2)


def planned(size: int | None, **changes: object) -> PlannedGlobalBatch:
    return planner(size, **changes).plan(documents_in_turn(windows()))


@pytest.mark.parametrize("ping_pong", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_no_task_leaves_its_pool(size: int, ping_pong: bool) -> None:
    """All plans are valid, all tokens are there once, and padding is small."""
    found = planned(size, ping_pong=ping_pong)
    assert found.pool_size == size
    pool = np.arange(RANKS) // size
    starts, tokens = [], 0
    for tick in found.ticks:
        assert len(tick.plans) == (2 if ping_pong else 1)
        for plan in tick.plans:
            validate_plan(plan)
            for of_phase in plan_bytes(plan, CONFIG.shape).messages.values():
                there = of_phase.sizes > 0
                assert (pool[of_phase.source[there]] == pool[of_phase.destination[there]]).all()
            own = plan.own_tokens_per_rank()
            # Each nano-batch of a pool's ranks has equally many tokens, which two divides.
            assert (own.reshape(-1, size) == own[::size, None]).all()
            assert (own % 2 == 0).all()
    for micro_batch in found.micro_batches:
        for documents in micro_batch.documents:
            real = documents.starts != PADDING
            covered = zip(documents.starts[real], documents.lengths[real], strict=True)
            starts += [np.arange(start, start + length) for start, length in covered]
            tokens += int(documents.lengths.sum())
    every = np.sort(np.concatenate(starts))
    np.testing.assert_array_equal(every, np.arange(MICRO_BATCHES * WINDOW))
    most = MICRO_BATCHES * RANKS * 2 * (2 if ping_pong else 1)
    assert 0 < tokens - len(every) < most


@pytest.mark.parametrize("size", [1, 2])
def test_pools_with_a_pipeline(size: int) -> None:
    """A pool has the same ranks of all stages, which share the attention of its micro-batches."""
    stages = 2
    servers = np.arange(RANKS, dtype=np.int64).reshape(stages, -1)
    made = replace(planner(size), servers=servers)
    found = made.plan(documents_in_turn(windows()))
    pool = np.empty(RANKS, dtype=np.int64)
    assert isinstance(found.pools, np.ndarray)
    for number, members in enumerate(found.pools):
        pool[members] = number
        assert (servers // len(servers[0]) == np.arange(stages)[:, None]).all()
        assert np.isin(servers, members).sum(axis=1).tolist() == [size] * stages
    shared = 0
    for tick in found.ticks:
        for plan in tick.plans:
            validate_plan(plan)
            for of_phase in plan_bytes(plan, CONFIG.shape).messages.values():
                there = of_phase.sizes > 0
                source, destination = of_phase.source[there], of_phase.destination[there]
                assert (pool[source] == pool[destination]).all()
                shared += int(
                    (source // (RANKS // stages) != destination // (RANKS // stages)).sum()
                )
    assert shared, "stages share their servers inside a pool"
    tokens = [
        documents.lengths.sum() for each in found.micro_batches for documents in each.documents
    ]
    assert MICRO_BATCHES * WINDOW <= sum(tokens) < MICRO_BATCHES * (WINDOW + RANKS * 4)


@pytest.mark.parametrize(("stages", "ping_pong"), [(1, True), (1, False), (2, True)])
def test_pools_with_dedicated_servers(stages: int, ping_pong: bool) -> None:
    """Each pool has an equal share of them, which compute attention of that pool alone."""
    size, dedicated = 2, RANKS
    options = replace(ExecutionOptions(pool_size=size), ping_pong=ping_pong)
    servers = np.arange(RANKS, dtype=np.int64).reshape(stages, -1)
    speeds = replace(CONFIG, server_speeds=(1.0,) * RANKS + (2.0,) * dedicated)
    made = GlobalBatchPlanner(servers, speeds, options, dedicated=dedicated, linear_work=WORK)
    found = made.plan(documents_in_turn(windows()))
    assert isinstance(found.pools, np.ndarray)
    pools = RANKS // (stages * size)
    assert found.pools.shape == (pools, (RANKS + dedicated) // pools)
    assert sorted(found.pools.flat) == list(range(RANKS + dedicated))
    pool = np.empty(RANKS + dedicated, dtype=np.int64)
    for number, members in enumerate(found.pools):
        pool[members] = number
    # Neighbours are of one pool.
    assert pool[RANKS:].tolist() == np.repeat(np.arange(pools), dedicated // pools).tolist()
    loads = np.zeros(RANKS + dedicated)
    for tick in found.ticks:
        for plan in tick.plans:
            validate_plan(plan)
            loads += plan.loads()
            assert not plan.own_tokens_per_rank()[RANKS:].any()
            for of_phase in plan_bytes(plan, CONFIG.shape).messages.values():
                there = of_phase.sizes > 0
                assert (pool[of_phase.source[there]] == pool[of_phase.destination[there]]).all()
    # They are twice as fast.
    assert loads[RANKS:].sum() == pytest.approx(2 * loads[:RANKS].sum(), rel=0.1)


def test_dedicated_servers_that_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="3 dedicated servers cannot be divided among 4 server"):
        replace(planner(2), dedicated=3)


def test_pools_have_equal_work_and_different_tokens() -> None:
    found = planned(2)
    loads, tokens = np.zeros(RANKS), np.zeros(RANKS)
    for tick in found.ticks:
        if tick.tick.direction == "forward":
            for plan in tick.plans:
                loads += plan.loads()
                tokens += plan.own_tokens_per_rank()
    work = (loads + (WORK.layer + 2 * WORK.head) * tokens).reshape(-1, 2).sum(axis=1)
    assert work.max() / work.mean() < 1.01
    of_pools = tokens.reshape(-1, 2).sum(axis=1)
    assert of_pools.max() / of_pools.min() > 1.05
    # What is said to be the work of a token counts: here attention is next to nothing.
    heavy = planned(2, token_pairs=1e9)
    tokens = sum(plan.own_tokens_per_rank() for tick in heavy.ticks for plan in tick.plans)
    of_pools = tokens.reshape(-1, 2).sum(axis=1)
    assert of_pools.max() / of_pools.min() < 1.01


@pytest.mark.parametrize("size", [2, RANKS])
def test_any_number_of_micro_batches(size: int) -> None:
    """Pools share out the documents of a global batch over micro-batches of about equal tokens."""
    lengths = np.concatenate(windows())
    every = Documents(lengths, np.cumsum(lengths) - lengths)
    number = 3 * MICRO_BATCHES // 2 + 1
    found = planner(size).plan(every.in_parts(number))
    assert len(found.micro_batches) == number
    starts, tokens = [], np.zeros((number, RANKS // size), dtype=np.int64)
    for n, micro_batch in enumerate(found.micro_batches):
        for pool, part in enumerate(micro_batch.pools):
            for documents in part.documents:
                real = documents.starts != PADDING
                covered = zip(documents.starts[real], documents.lengths[real], strict=True)
                starts += [np.arange(start, start + length) for start, length in covered]
                tokens[n, pool] += documents.lengths.sum()
    np.testing.assert_array_equal(
        np.sort(np.concatenate(starts)), np.arange(len(lengths) and int(lengths.sum()))
    )
    # The longest document alone may take more than its share.
    assert (tokens.max(axis=0) < np.maximum(1.05 * tokens.mean(axis=0), 1.01 * lengths.max())).all()
    for tick in found.ticks:
        for plan in tick.plans:
            validate_plan(plan)


@pytest.mark.parametrize("ping_pong", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_all_ranks_share_wide_documents(size: int, ping_pong: bool) -> None:
    """Wide micro-batches come first; tasks leave their pools in them alone."""
    limit = 8000
    found = planned(size, wide_documents=limit, ping_pong=ping_pong)
    pool, starts = np.arange(RANKS) // size, []
    wide_ones = sum(not each.pools for each in found.micro_batches)
    assert 0 < wide_ones < MICRO_BATCHES
    for number, micro_batch in enumerate(found.micro_batches):
        wide = not micro_batch.pools
        of_pool, rank = micro_batch.of_pool(3)
        assert (rank == 3) == (wide or size > 3)
        assert (of_pool is micro_batch) == wide
        lengths = []
        for documents in micro_batch.documents:
            real = documents.starts != PADDING
            covered = zip(documents.starts[real], documents.lengths[real], strict=True)
            starts += [np.arange(start, start + length) for start, length in covered]
            lengths += documents.lengths[real].tolist()
        assert wide == (number < wide_ones)
        # Ping and pong may each have a part of a document.
        assert max(lengths) >= limit / 2 if wide else max(lengths) < limit
    np.testing.assert_array_equal(
        np.sort(np.concatenate(starts)), np.arange(MICRO_BATCHES * WINDOW)
    )
    moved = 0
    for tick in found.ticks:
        (work,) = tick.tick.work
        assert work is not None
        for plan in tick.plans:
            validate_plan(plan)
            for of_phase in plan_bytes(plan, CONFIG.shape).messages.values():
                there = of_phase.sizes > 0
                leave = pool[of_phase.source[there]] != pool[of_phase.destination[there]]
                assert work.micro_batch < wide_ones or not leave.any()
                moved += int(leave.sum())
    assert moved, "wide documents move between pools"


def test_wide_documents_alone_and_none() -> None:
    """All documents long, none long, and a single micro-batch: all tokens are there."""
    for limit, count, wide in ((1, 3, 3), (10**9, 3, 0), (8000, 1, 1)):
        every = [np.concatenate(windows())]
        parts = documents_in_turn(every)[0].in_parts(count)
        found = planner(2, wide_documents=limit).plan(parts)
        assert sum(not each.pools for each in found.micro_batches) == wide
        tokens = sum(
            int(documents.lengths[documents.starts != PADDING].sum())
            for each in found.micro_batches
            for documents in each.documents
        )
        assert tokens == MICRO_BATCHES * WINDOW


def test_a_document_longer_than_a_micro_batch_is_alone() -> None:
    lengths = np.array([40_000, *[1000] * 24], dtype=np.int64)
    every = Documents(lengths, np.cumsum(lengths) - lengths)
    found = planner(RANKS).plan(every.in_parts(4))
    sizes = [
        sorted(np.concatenate([d.lengths for d in each.documents]).tolist())
        for each in found.micro_batches
    ]
    tokens = sorted(map(sum, sizes))
    assert tokens == [8000, 8000, 8000, 40_000]


def test_each_mask_has_a_plan_in_pools() -> None:
    masks = LayerMasks.of([Mask(), Mask(1000)])
    found = replace(planner(2), masks=masks).plan(documents_in_turn(windows()))
    for tick in found.ticks:
        assert [plan.mask for plan in tick.plans] == [Mask(), Mask(), Mask(1000), Mask(1000)]
        for plan in tick.plans:
            validate_plan(plan)


def test_slow_ranks_have_less_work() -> None:
    speeds = (0.5, 0.5, *[1.0] * 6)
    slow = replace(planner(2), config=replace(CONFIG, server_speeds=speeds))
    found = slow.plan(documents_in_turn(windows()))
    tokens = sum(plan.own_tokens_per_rank() for tick in found.ticks for plan in tick.plans)
    assert tokens[:2].sum() < 0.7 * tokens[2:].sum() / 3


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, "pools of 3 ranks do not divide 8 data-parallel ranks"),
        (2, {"chain": 2}, "do not go together with chains"),
        (2, {"free_placement": False}, "do not go together with a given placement"),
        (2, {"scheduler": "packed"}, "do not go together with the scheduler packed"),
    ],
)
def test_what_is_refused(size: int, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planner(size, **changes)
    with pytest.raises(ValueError, match="an unknown size of linear layers"):
        replace(planner(2), linear_work=None)


@pytest.mark.parametrize(("few", "settings"), [(RANKS, 4), (RANKS - 1, 1)])
def test_many_pools_are_planned_with_less_effort(
    few: int, settings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pool of a large job is packed with one setting, and its plans are valid."""
    packed: list[int] = []

    def counting(lengths: Int64s, loads: Floats, packing: Packing) -> Placement:
        packed.append(len(packing.capacities))
        return place_balanced(lengths, loads, packing)

    monkeypatch.setattr(scheduler, "_FEW_IN_ALL", few)
    monkeypatch.setattr(scheduler, "place_balanced", counting)
    found = planned(2, ping_pong=False)
    assert packed == [2] * (settings * MICRO_BATCHES * RANKS // 2)
    for tick in found.ticks:
        for plan in tick.plans:
            validate_plan(plan)
