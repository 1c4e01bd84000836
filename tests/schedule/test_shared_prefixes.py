"""Plans of documents that share prefixes: every pair once, balanced, each key sent once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distca.cost.memory import plan_memory
from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Mask, Plan, validate_plan
from distca.plan.paths import Paths
from distca.plan.saved import load_plan, save_plan
from distca.runtime import build_exchange
from distca.schedule import ScheduleConfig, TilesScheduler, even_capacities
from distca.schedule.base import shared_prefixes
from support.random_trees import met, random_family, random_shift, visible

MASKS = (Mask(), Mask(window_left=40), Mask(attention_chunk=64))
SHAPE = AttentionShape(8, 2, 16)


def plan_of(
    lengths,
    parents,
    ranks: int,
    mask: Mask = MASKS[0],
    tolerance: float = 0.1,
    block: int = 16,
    prefix=None,
    shift=None,
) -> Plan:
    config = ScheduleConfig(tolerance, SHAPE, block=block)
    own = lengths - shared_prefixes(lengths, parents, prefix)
    scheduler = TilesScheduler(config)
    plan = scheduler.plan(
        lengths, even_capacities(int(own.sum()), ranks), mask, parents, prefix, shift
    )
    again = scheduler.schedule(lengths, plan.placement, mask, parents, prefix, shift)
    validate_plan(plan)
    validate_plan(again)
    return plan


def test_every_visible_pair_is_in_one_task(full: bool) -> None:
    """Of random trees: chains, stars, nodes of one token, more ranks than tokens."""
    for seed in range(1000 if full else 60):
        random = np.random.default_rng(seed)
        lengths, parents, prefix = random_family(random)
        mask = MASKS[seed % len(MASKS)]
        plan = plan_of(lengths, parents, int(random.integers(1, 6)), mask, prefix=prefix)
        np.testing.assert_array_equal(met(plan), visible(plan, mask), err_msg=str(seed))
        assert int(plan.loads().sum()) == int(visible(plan, mask).sum())
        assert int(plan.loads_at_home().sum()) == int(plan.loads().sum())


def test_tokens_of_two_way_nodes_see_all_of_their_node(full: bool, tmp_path: Path) -> None:
    """Images, prompts of prefix language models: full rectangles, balanced as all others."""
    for seed in range(1000 if full else 60):
        random = np.random.default_rng(seed)
        lengths, parents, prefix = random_family(random)
        shift = random_shift(random, lengths - prefix)
        ranks = int(random.integers(1, 6))
        plan = plan_of(lengths, parents, ranks, prefix=prefix, shift=shift)
        np.testing.assert_array_equal(met(plan), visible(plan, Mask()), err_msg=str(seed))
        assert int(plan.loads().sum()) == int(visible(plan, Mask()).sum())
        assert int(plan.loads_at_home().sum()) == int(plan.loads().sum())
        two_way = shift[plan.tasks.document] > 0
        assert not plan.tasks.ends_on_diagonal[two_way].any()
    save_plan(plan, tmp_path / "plan.json")
    np.testing.assert_array_equal(met(load_plan(tmp_path / "plan.json")[0]), met(plan))
    with pytest.raises(ValueError, match="queries are not behind all own keys"):
        validate_plan(replace(plan, query_shift=shift + 1))
    with pytest.raises(ValueError, match="under a causal mask without window"):
        validate_plan(replace(plan, mask=Mask(7)))


@pytest.mark.parametrize("ranks", [2, 8])
def test_two_way_nodes_are_balanced(ranks: int) -> None:
    """Images in a text, and a long document of an encoder."""
    own = np.array([3000, 9000, 512, 900, 512, 400, 512, 700])
    parents = np.array([-1, -1, 1, 2, 3, 4, 5, 6])
    paths = Paths.of(own, parents, np.array([1, 0, 1, 0, 1, 0, 1, 0], dtype=bool))
    plan = plan_of(paths.lengths, paths.parents, ranks, MASKS[0], 0.05, 64, *paths.family[1:])
    assert plan.loads().max() <= 1.06 * plan.loads().mean()
    assert plan.placement.tokens_per_rank().max() <= -(-own.sum() // ranks)


def test_a_plan_without_parents_is_the_same(tmp_path: Path) -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        lengths = random.integers(1, 900, 20)
        none = np.full(20, -1)
        plan = plan_of(lengths, none, 4)
        scheduler = TilesScheduler(ScheduleConfig(0.1, SHAPE, block=16))
        usual = scheduler.plan(lengths, even_capacities(int(lengths.sum()), 4), Mask())
        for name in ("placement", "tasks"):
            mine, other = (vars(getattr(each, name)) for each in (plan, usual))
            assert all(np.array_equal(mine[key], other[key]) for key in mine)


def test_a_server_gets_a_shared_key_once() -> None:
    """Eight answers to a prompt, which is on other ranks than most of them."""
    lengths = np.array([4096, *[4096 + 512] * 8])
    parents = np.array([-1, *[0] * 8])
    plan = plan_of(lengths, parents, 4, tolerance=0.05)
    prompt = plan.placement.select(plan.placement.document == 0)
    owned = np.zeros(4, dtype=np.int64)
    np.add.at(owned, prompt.rank, prompt.end - prompt.start)
    _, received = plan.kv_segments.moved_per_rank(4)
    # All keys of the prompt that a rank does not own, and of answers that are cut.
    assert (received <= 4096 - owned + 8 * 512).all()
    # Not once for each answer.
    rows = plan_bytes(plan, SHAPE).messages["dispatch"].received()
    q_rows = plan.q_segments.moved_per_rank(4)[1]
    assert (rows == received * SHAPE.kv_row_bytes + q_rows * SHAPE.q_row_bytes).all()


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_load_is_within_the_tolerance(ranks: int) -> None:
    """Groups of rollouts: prompts of very different lengths, eight responses each."""
    random = np.random.default_rng(ranks)
    lengths: list[int] = []
    parents: list[int] = []
    for prompt in random.lognormal(8.0, 1.2, 8).astype(int) + 64:
        root = len(lengths)
        lengths += [int(prompt)]
        lengths += [int(prompt) + int(n) for n in random.lognormal(6, 0.6, 8) + 16]
        parents += [-1, *[root] * 8]
    plan = plan_of(np.array(lengths), np.array(parents), ranks, tolerance=0.05, block=64)
    loads = plan.loads()
    assert loads.max() <= 1.05 * loads.mean() + 1 or plan.notes
    tokens = plan.placement.tokens_per_rank()
    assert tokens.max() - tokens.min() <= 1


def test_memory_and_exchange_count_the_same_rows() -> None:
    for seed in range(30):
        random = np.random.default_rng(seed)
        lengths, parents, prefix = random_family(random, 8)
        plan = plan_of(lengths, parents, 3, prefix=prefix)
        memory = plan_memory(plan, SHAPE)
        assert memory.indices >= 0
        for rank in range(3):
            exchange = build_exchange(plan, rank)
            mine = plan.tasks[plan.tasks.server == rank]
            assert sum(call.queries for call in exchange.calls) == (mine.q_end - mine.q_start).sum()
            assert sum(call.keys for call in exchange.calls) == (mine.kv_end - mine.kv_start).sum()
            assert exchange.kv.parts == sum(call.keys for call in exchange.calls)


def test_a_plan_is_saved_with_its_parents(tmp_path: Path) -> None:
    plan = plan_of(np.array([300, 350, 420, 90]), np.array([-1, 0, 1, -1]), 2)
    save_plan(plan, tmp_path / "plan.json")
    loaded, _ = load_plan(tmp_path / "plan.json")
    assert loaded.parents is not None
    np.testing.assert_array_equal(loaded.parents, [-1, 0, 1, -1])
    np.testing.assert_array_equal(met(loaded), met(plan))


def test_a_plan_without_tasks_has_no_keys() -> None:
    plan = plan_of(np.array([300, 350]), np.array([-1, 0]), 2)
    empty = replace(plan, tasks=plan.tasks[:0])
    assert len(empty.key_ranges.task) == len(empty.kv_segments.start) == 0


def test_wrong_plans_are_refused() -> None:
    plan = plan_of(np.array([300, 350, 420, 90]), np.array([-1, 0, 1, -1]), 2)
    prefix = plan.cached_prefix
    assert prefix is not None
    with pytest.raises(ValueError, match="a parent is no earlier document"):
        validate_plan(replace(plan, parents=np.array([-1, 2, 1, -1])))
    with pytest.raises(ValueError, match="does not end among the parent's own tokens"):
        validate_plan(replace(plan, parents=np.array([-1, 0, 0, -1])))
    with pytest.raises(ValueError, match="not one prefix for each document"):
        validate_plan(replace(plan, cached_prefix=None))
    with pytest.raises(ValueError, match="not all covered"):
        validate_plan(replace(plan, tasks=plan.tasks[1:]))
    with pytest.raises(ValueError, match="give an earlier document"):
        plan_of(np.array([300, 350]), np.array([1, -1]), 2)
    with pytest.raises(ValueError, match="at least one of its own"):
        plan_of(np.array([300, 300]), np.array([-1, 0]), 2)
    family = np.array([300, 350, 420]), np.array([-1, 0, 1])
    with pytest.raises(ValueError, match="tokens of its parent: give 301 to 350"):
        plan_of(*family, 2, prefix=np.array([0, 300, 300]))


def test_seconds_of_a_cost_model_balance_too() -> None:
    class Launches:
        """A kernel with a launch for each task."""

        def seconds(self, queries, keys, pairs):
            return 1e-5 + pairs * 1e-9

    lengths = np.array([3000, *[3000 + 200 * n for n in range(1, 9)]])
    parents = np.array([-1, *[0] * 8])
    config = ScheduleConfig(0.1, SHAPE, Launches(), block=16)
    own = lengths - np.where(parents < 0, 0, 3000)
    capacities = even_capacities(int(own.sum()), 4)
    plan = TilesScheduler(config).plan(lengths, capacities, Mask(), parents)
    validate_plan(plan)
    loads = plan.loads()
    assert loads.max() < 1.25 * loads.mean()
