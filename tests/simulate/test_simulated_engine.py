"""The simulated engine makes the plans of the real one, and counts the same bytes."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from distca.cost.model_sizes import MODELS, ModelSize
from distca.cost.volume import AttentionShape
from distca.inference.models import read_model
from distca.plan.saved import save_plan
from distca.schedule.serving.batches import DecodeBatch
from distca.schedule.serving.blocks import Block
from distca.schedule.serving.cdsp import Coefficients, PrefillModel, Search
from distca.schedule.serving.cdsp.growing import GrowingGroups
from distca.schedule.serving.iteration import BatchPlan, plan_iteration
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.moves import BlockTransfer
from distca.schedule.serving.scheduled import ScheduledTokens
from distca.schedule.serving.steps import step_plan
from distca.simulate import CLUSTERS
from distca.simulate.requests import DecodeTimes, FittedCosts, PlannedCosts, SimulatedEngine
from distca.simulate.serving import InferenceCosts, SteppedCosts
from distca.simulate.serving.iterations import DecodeCosts, simulate_iteration
from support.balanced import eager_tiles
from support.engines import BLOCK, settings_of, tokens
from support.ranks import Ranks
from support.small_models import save_small_model

TIMES = PrefillModel(
    "any", "any", {n: Coefficients(5.0 * (n - 1), 1 / n, 0.0, 0.0) for n in (1, 2, 4)}
)
GROWING = GrowingGroups(Search(TIMES, smallest_chunk=BLOCK))
TILES = eager_tiles(AttentionShape(4, 2, 16, 4))
OWN_PROMPTS = SchedulerConfig(8, 48, BLOCK, 97, equal_shares=True)


@dataclass
class Told:
    """What an engine did in an iteration: what it fed and planned, moved, chose and counted."""

    entries: list[Any]
    plan: list[Any]
    moves: list[Any]
    chosen: dict[int, int]
    nbytes: int


def arrivals() -> dict[int, list[tuple[int, list[int], int]]]:
    """Requests by the iteration before which they arrive: number, prompt and most new tokens."""
    shared = tokens(29, 0)
    lengths = [40, 1, 3, 31, 17, 35, 8, 44]
    prompts = [
        (shared + tokens(60, n + 1))[:length] if n % 2 else tokens(length, n)
        for n, length in enumerate(lengths)
    ]
    found: dict[int, list[tuple[int, list[int], int]]] = {}
    for number, prompt in enumerate(prompts):
        found.setdefault(2 * (number // 3), []).append((number, prompt, 3 + number))
    return found


def said_entries(entries: list[ScheduledTokens]) -> list[Any]:
    return [(e.sequence, e.start, e.count, e.ranks.tolist(), e.dense) for e in entries]


def said(plan: BatchPlan) -> list[Any]:
    """A plan in values that can be compared."""
    found: list[Any] = [plan.new_tokens.tolist(), sorted(plan.members)]
    for part in plan.parts:
        found += [list(part.sequences), part.before.tolist()]
        if isinstance(part, DecodeBatch):
            found += [part.positions.tolist(), part.owners.tolist()]
            found += sorted((str(mask), rows.tolist()) for mask, rows in part.hidden.items())
            continue
        for mask, stepped in sorted(part.plans.by_mask.items(), key=str):
            with tempfile.TemporaryDirectory() as folder:
                save_plan(stepped, Path(folder) / "plan.json")
                found += [str(mask), json.loads((Path(folder) / "plan.json").read_text())]
    return found


def run_on_a_rank(settings: Any, blocks: int) -> tuple[list[Told], int]:
    """Runs the real engine; returns what it did, and the bytes that transports counted."""
    import torch.distributed as dist

    from distca.inference import worker as workers
    from distca.inference.engine import Engine
    from distca.inference.messages import AddRequest
    from distca.inference.sampling import SamplingParams
    from distca.inference.worker import Worker
    from support.engines import _run

    settings = replace(settings, counts_bytes=True)
    worker = Worker(settings, torch.device("cpu"))
    worker.runner.resize_pool(blocks)
    engine, coming, told = Engine(settings, blocks), arrivals(), []
    seen: list[tuple[Any, BatchPlan]] = []

    def recording(parts: Any, *rest: Any) -> BatchPlan:
        seen.append((said_entries(parts), plan := plan_iteration(parts, *rest)))
        return plan

    with mock.patch.object(workers, "plan_iteration", recording):
        while True:
            for number, prompt, most in coming.pop(len(told), ()):
                engine.add(AddRequest(number, prompt, SamplingParams(max_tokens=most)))
            begun = engine.schedule()
            if begun is None:
                break
            seen.clear()
            done = _run(worker, begun)
            nbytes = len(begun.batch.moves) * worker.runner.block_bytes
            nbytes += sum(sum(each.planned_bytes.values()) for each in done.values())
            chosen = {c.number: c.token for each in done.values() for c in each.chosen}
            moves = [
                (move.sequence, move.index, *move.source, *move.to) for move in begun.batch.moves
            ]
            # A rank without a part in an iteration plans nothing.
            entries, plan = (seen[0][0], said(seen[0][1])) if seen else ([], [])
            told.append(Told(entries, plan, moves, chosen, nbytes))
            engine.finish(done)
    sent = [0] * dist.get_world_size()
    dist.all_gather_object(sent, worker.runner.bytes_sent)
    return told, sum(sent)


@pytest.mark.parametrize(
    ("family", "world_size", "chunk", "blocks", "changes"),
    [
        ("llama", 2, 16, 7, {}),
        ("llama", 2, 64, 60, {"strategy": "pass-q"}),
        ("gemma3_text", 4, 32, 60, {}),
        ("llama", 4, 48, 60, {"scheduler": SchedulerConfig(8, 48, BLOCK, 12, growing=GROWING)}),
        ("gemma3_text", 2, 32, 9, {"scheduler": SchedulerConfig(8, 32, BLOCK, 0, growing=GROWING)}),
        ("llama", 2, 16, 60, {"scheduler": SchedulerConfig(8, 16, BLOCK, 12, evens_out=True)}),
        ("llama", 2, 32, 60, {"prefix_caching": False}),
        ("gemma3_text", 3, 48, 60, {"strategy": TILES, "scheduler": OWN_PROMPTS}),
        ("llama", 3, 48, 7, {"strategy": TILES, "scheduler": OWN_PROMPTS}),
    ],
    ids=[
        *("preempted", "pass-q", "windows", "growing", "growing, preempted", "even", "no cache"),
        *("tiles", "tiles, preempted"),
    ],
)
def test_the_simulated_engine_plans_as_the_real_one(
    ranks: Ranks, tmp_path: Path, family: str, world_size: int, chunk: int, blocks: int, changes
) -> None:
    path = str(save_small_model(family, tmp_path))
    settings, model = (
        settings_of(path, world_size, chunk, **changes),
        read_model(path, torch.float32),
    )
    found = ranks.run(run_on_a_rank, settings, blocks, world_size=world_size)
    real, sent = found[0]
    costs = PlannedCosts(
        InferenceCosts(size_of(model), CLUSTERS["dgx-h100"], dtype_bytes=4),
        world_size,
        BLOCK,
        settings.parallel.strategy,
    )
    engine = SimulatedEngine(settings.scheduler, costs, world_size, blocks, BLOCK)
    coming, number, nbytes = arrivals(), 0, 0
    while True:
        for request in coming.pop(number, ()):
            engine.add(*request)
        begun = engine.begin()
        if begun is None:
            break
        # All ranks that took part planned the same.
        of_ranks = [told[number] for told, _ in found if told[number].plan]
        assert of_ranks, "nobody ran it"
        for told in of_ranks:
            assert said_entries(list(begun.batch.feeds)) == told.entries, number
            assert said(costs.plan(begun.batch.feeds)) == told.plan, number
        moves = [(m.sequence, m.index, *m.source, *m.to) for m in begun.batch.moves]
        assert moves == real[number].moves
        moved = costs.bytes_moved(begun.batch.feeds, begun.batch.moves)
        assert moved == real[number].nbytes, number
        assert begun.seconds > 0
        nbytes, number = nbytes + moved, number + 1
        engine.end(real[number - 1].chosen)
    assert number == len(real) > 10
    assert nbytes == sent > 0
    assert (engine.scheduler.preemptions > 0) == (blocks < 10)


def size_of(model: Any) -> ModelSize:
    """Sizes of a model's attention; the rest decides seconds alone."""
    shape, windows = model.shape, model.windows
    different = dict.fromkeys(windows)
    left = next((window for window in different if window is not None), None)
    skip = windows.index(None) + 1 if len(different) > 1 else None
    hidden = shape.heads * shape.head_dim
    size = ModelSize(
        len(windows), hidden, shape.heads, shape.kv_heads, shape.head_dim, 4 * hidden, 97,
        window_left=left, window_attn_skip_freq=skip,
    )  # fmt: skip
    assert [size.masks.of_layer(n).window_left for n in range(len(windows))] == list(windows)
    return size


def test_decoded_tokens_cost_what_their_plan_in_steps_does() -> None:
    """`DecodeBatch` is the pass-Q plan, told by numbers of rows."""
    ranks, size = 4, 16
    drawn = np.random.default_rng(0)
    entries = [
        ScheduledTokens(n, int(start), 1, drawn.integers(0, ranks, start // size + 1))
        for n, start in enumerate(drawn.integers(1, 900, 7))
    ]
    model = replace(MODELS["llama-8b"], layers=3)
    costs = InferenceCosts(model, CLUSTERS["dgx-h100"])
    plan = PlannedCosts(costs, ranks, size).plan(entries)
    assert plan.decode is not None
    assert plan.prefill is None
    cost_model = costs.cluster.inference_cost(costs.shape)
    (mask,) = model.masks.masks
    batch = DecodeCosts(plan.decode, mask, costs.shape, cost_model, costs.links).steps
    stepped = step_plan(held_of(entries, size, ranks), plan.decode.new, "pass-q", mask)
    told = SteppedCosts(stepped, costs.shape, cost_model, costs.links).steps
    assert len(told) == len(batch) == 1
    for name, value in vars(told[0]).items():
        mine = getattr(batch[0], name)
        if name in ("dispatch", "combine"):
            assert mine.packed.tolist() == value.packed.tolist()
            assert mine.unpacked.tolist() == value.unpacked.tolist()
            assert mine.transfer.seconds.tolist() == value.transfer.seconds.tolist()
        else:
            assert mine == pytest.approx(value), name
    sent = simulate_iteration(plan, costs).sent
    moved = PlannedCosts(costs, ranks, size).bytes_moved(entries, [])
    assert sum(int(each.sum()) for each in sent.values()) == moved


def held_of(entries: list[ScheduledTokens], size: int, ranks: int):
    from distca.schedule.serving.iteration import _Blocks

    starts = np.array([each.start for each in entries])
    return _Blocks(entries, size, ranks).placed(np.zeros_like(starts), starts)


def test_fitted_seconds_add_up_on_shared_ranks() -> None:
    costs = FittedCosts(TIMES, DecodeTimes(0.5, 0.001), 4, BLOCK)
    blocks = {ranks: np.array(sorted(ranks) * 2) for ranks in ((0,), (1,), (0, 1), (2, 3))}
    alone = ScheduledTokens(0, 0, 8, blocks[0,]), ScheduledTokens(1, 0, 6, blocks[1,])
    assert costs.seconds(alone, []) == pytest.approx(8.0), "on different ranks at once"
    both = ScheduledTokens(2, 8, 8, blocks[0, 1])
    assert costs.seconds([*alone, both], []) == pytest.approx(8.0 + 5.0 + 4.0)
    apart = ScheduledTokens(3, 0, 6, blocks[2, 3])
    assert costs.seconds([both, apart], []) == pytest.approx(9.0)
    # Three ranks were not measured: two were.
    three = ScheduledTokens(4, 0, 12, np.array([0, 1, 2]))
    assert costs.seconds([three], []) == pytest.approx(5.0 + 6.0)
    decoded = ScheduledTokens(5, 7, 1, np.array([0, 3]))
    assert costs.seconds([decoded], []) == pytest.approx(0.5 + 0.004)


def test_moves_of_blocks_take_their_bytes() -> None:
    costs = PlannedCosts(InferenceCosts(MODELS["llama-8b"], CLUSTERS["dgx-h100"]), 2, 16)
    entry = ScheduledTokens(0, 64, 64, np.array([0, 1] * 4))
    moves = [BlockTransfer(0, n, Block(0, n), Block(1, n)) for n in range(3)]
    assert costs.seconds([entry], moves) > costs.seconds([entry], [])
    shape: AttentionShape = costs.costs.shape
    more = costs.bytes_moved([entry], moves) - costs.bytes_moved([entry], [])
    assert more == 3 * 16 * shape.kv_row_bytes * 32
