"""Long prompts whose chunks drop rows, beside short ones that don't: blocks and plans are apart."""

from __future__ import annotations

import numpy as np
import pytest

from distca.cost.link import Links
from distca.cost.volume import AttentionShape
from distca.plan import Mask, validate_stepped_plan
from distca.schedule.serving.blocks import BlockPool, PrefixCache
from distca.schedule.serving.csps import Levels, Sparsity
from distca.schedule.serving.csps.pipeline import NearToFar
from distca.schedule.serving.iteration import plan_iteration
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.report import describe_steps
from distca.schedule.serving.request import Request
from distca.schedule.serving.scheduled import ScheduledTokens
from distca.schedule.serving.scheduler import Scheduler
from support.engines import changed
from support.token_engine import token_settings

SIZE = 4
LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, stripe=SIZE, threshold=20)


def found(
    lengths: list[int], sparse_salt: bytes | None, pool: int = 40
) -> tuple[list[int], list[set[bool]]]:
    """Answers prompts in turn, which have the same beginning; answers are long.

    Returns:
        The tokens that each prompt finds in the cache, and whether its feeds are dense.
    """
    cache = PrefixCache(BlockPool(2, pool, SIZE))
    scheduler, before, each = Scheduler(cache, LIMITS, b"model", sparse_salt), 0, []
    dense: list[set[bool]] = []
    for number, length in enumerate(lengths):
        scheduler.add(Request(number, [7] * length, 12))
        dense.append(set())
        while (batch := scheduler.schedule()) is not None:
            dense[-1] |= {feed.dense for feed in batch.feeds}
            scheduler.advance(batch, {feed.sequence: 7 for feed in batch.feeds if feed.samples})
        each.append(scheduler.found - before)
        before = scheduler.found
    return each, dense


def test_sparse_prompts_share_blocks_with_sparse_ones_alone() -> None:
    # A short prompt's answer makes it long, which changes nothing.
    lengths = [19, 30, 31, 18, 20]
    dense = [{True}, {False}, {False}, {True}, {False}]
    assert found(lengths, None) == ([0, 28, 28, 16, 16], dense)
    assert found(lengths, b"sparse") == ([0, 0, 28, 16, 16], dense)
    assert found([30, 19, 30], b"sparse")[0] == [0, 0, 28]


def test_salts_follow_what_is_dropped() -> None:
    dense, other = (Sparsity.of_drop_ratio(drop, 3, 2) for drop in (0.0, 0.3))
    salts = []
    for sparsity, ranks in ((dense, 4), (other, 4), (other, 2)):
        strategy = NearToFar(Levels(Links(2), ranks), sparsity, (None,) * 3)
        settings = changed(token_settings(), strategy=strategy)
        salts.append(settings.sparse_salt)
    assert salts[0] == settings.model.salt == token_settings().sparse_salt
    assert len({*salts}) == 3


@pytest.mark.parametrize("dense", [(False, True), (True, True), (False, False)])
def test_nothing_is_dropped_of_short_prompts(dense: tuple[bool, bool]) -> None:
    """Wherever their blocks are; chunks come after others', and decoding beside them."""
    sparsity = Sparsity.of_drop_ratio(0.5, 3, 2, drop_of_queries=0.2)
    strategy = NearToFar(Levels(Links(2), 4), sparsity, (None,) * 3, (2, 1))
    random = np.random.default_rng(0)
    sizes = [(0, 90, dense[0]), (33, 40, dense[1]), (41, 1, False)]
    parts = [
        ScheduledTokens(
            number, start, count, random.integers(0, 4, -(-(start + count) // SIZE)), whole
        )
        for number, (start, count, whole) in enumerate(sizes)
    ]
    made = plan_iteration(parts, [Mask()], SIZE, 4, strategy)
    assert made.decode is not None
    assert made.prefill is not None
    assert made.prefill.members() <= made.members
    assert made.prefill.rows.sum(axis=1).tolist() == [90, 73]
    plans = made.prefill.plans
    validate_stepped_plan(plans.by_mask[Mask()])
    assert [*plans.sparse] == ([] if all(dense) else [1])
    for plan in plans.sparse.values():
        validate_stepped_plan(plan)
        tasks = plan.plan.tasks
        dropped = tasks.pairs(plan.plan.mask)[:, None] - plan.kept_pairs()
        assert [bool(dropped[tasks.document == n].any()) for n in (0, 1)] == [not n for n in dense]
        steps = describe_steps(plan, AttentionShape(4, 2, 16, 4))
        visible = np.bincount(plan.step, weights=tasks.pairs(plan.plan.mask))
        kept = sum(share.kept_pairs * pairs for share, pairs in zip(steps, visible, strict=True))
        assert kept == pytest.approx(plan.kept_pairs().mean(axis=1).sum())
