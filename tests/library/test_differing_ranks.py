"""Ranks that differ are refused on all ranks, where they would exchange wrong numbers."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest

from distca.library.plans import PlanDocuments
from distca.plan import Mask
from distca.schedule import ScheduleConfig
from support.differing_ranks import (
    DTYPES,
    LENGTHS,
    OTHER,
    SHAPE,
    WRONG,
    gathered,
    other_arguments,
    other_batches,
    other_calls,
    other_tensors,
)
from support.library_loops import documents

BATCHES = {
    "tokens": "rank 1 places other documents than rank 0: read the same ones",
    "lengths": "rank 1 places other documents than rank 0: read the same ones",
    "more": "rank 1 places other documents than rank 0: read the same ones",
    "plans": "rank 1 plans the same documents differently from rank 0",
}
CALLS = {
    "forward": "call 0 of core attention since the last micro-batch, rank 1 made the forward pass "
    "of batch 14 in torch.float32 with a scale of 0.25, but rank 0 the forward pass of batch 13",
    "backward": "call 2 of core attention since the last micro-batch, rank 1 made the backward ",
    "scale": "call 0 of core attention since .* a scale of 0.5, but rank 0 .* a scale of 0.25",
}


def test_planners_of_other_arguments_are_refused(ranks: Any) -> None:
    first, second = ranks.run(other_arguments, world_size=2)
    for name in OTHER:
        message = f"rank 1 makes its planner with {name}="
        assert message in first[name]
        assert f", but rank 0 with {name}=" in first[name]
        assert first[name] == second[name]
    for name, (_, message) in WRONG.items():
        assert first[f"wrong {name}"] == "rank 1 cannot make its planner, and says why"
        assert re.match(message, second[f"wrong {name}"]), second[f"wrong {name}"]
    assert first["order"] == second["order"]
    assert "with a planner of other arguments than rank 0" in first["order"]


def test_other_batches_are_refused_after_many(ranks: Any) -> None:
    first, second = ranks.run(other_batches, True, world_size=2)
    for name, message in BATCHES.items():
        assert message in first[name]
        assert first[name] == second[name]
    assert "rank 1 cannot place its documents, and says why" in first["floats"]
    assert "tokens are torch.float32" in second["floats"]
    assert first["after all"] == second["after all"] == "no error"


def test_where_nothing_waits_they_are_refused_at_the_next_one(ranks: Any) -> None:
    """As on GPUs."""
    first, second = ranks.run(other_batches, False, world_size=2)
    for name, message in BATCHES.items():
        assert first[name] == second[name] == "no error"
        assert message in first[f"{name}, later"]
        assert first[f"{name}, later"] == second[f"{name}, later"]
    assert "tokens are torch.float32" in second["floats"]
    assert "rank 1 cannot place its documents, and says why" in first["floats, later"]
    assert first["after all"] == second["after all"] == "no error"


@pytest.mark.parametrize("waits", [True, False])
def test_calls_in_other_orders_are_named_at_the_next_batch(ranks: Any, waits: bool) -> None:
    first, second = ranks.run(other_calls, waits, world_size=2)
    assert first == second
    assert first.pop("none") == "no error"
    for name, message in CALLS.items():
        said = first[name] if waits else first[f"{name}, later"]
        if name == "forward":
            message = re.sub(r"batch \d+", r"batch \\d+", message)
        assert re.search(message, said), said
        assert "start again from a checkpoint" in said
        if not waits:
            assert first[name] == "no error"


def test_a_dtype_of_one_rank_is_refused_in_the_first_call(ranks: Any) -> None:
    first, second = ranks.run(other_tensors, world_size=2)
    assert first["dtype"] == second["dtype"]
    other, of_first = "torch.float16 [rows, 4, 16]", "torch.bfloat16 [rows, 4, 16]"
    expected = f"rank 1 gives core_attention values of {other}, but rank 0 of {of_first}"
    assert expected in first["dtype"]
    assert "rank 1 gives core_attention values that cannot be used" in first["wrong"]
    assert "q is torch.float64: q, k and v need one dtype of 2 bytes" in second["wrong"]
    for name in ("dtype", "wrong"):
        assert first[f"{name}, then"] == second[f"{name}, then"] == "no error"


def test_values_of_any_dtype_are_gathered_and_others_refused(ranks: Any) -> None:
    (first, equal), (second, equal_there) = ranks.run(gathered, world_size=2)
    assert [dtype for dtype, same in equal if same] == [dtype for dtype in DTYPES for _ in LENGTHS]
    assert equal == equal_there
    for name, operation in (("sparse", "gather"), ("meta", "gather"), ("sparse sums", "sum_roll")):
        assert f"rank 1 gives {operation}" in first[name]
        assert "values that cannot be used, and says why" in first[name]
    assert "values are a nested or sparse tensor: give a dense one" in second["sparse"]
    assert "values are a nested or sparse tensor: give a dense one" in second["sparse sums"]
    assert "values are on the meta device" in second["meta"]
    assert "of 2 bytes or more" in first["sums of a byte"]


def test_a_loaders_worker_makes_the_digests() -> None:
    plan = PlanDocuments("tiles", ScheduleConfig(shape=SHAPE), (Mask(),), 2)
    made = plan(documents(0, LENGTHS))
    assert vars(pickle.loads(pickle.dumps(made)))["digests"] == made.digests
    assert made.digests != plan(documents(1, LENGTHS)).digests
