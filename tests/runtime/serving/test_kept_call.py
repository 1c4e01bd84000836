"""Plans that drop rows, on virtual ranks: outputs by the rows that are kept, and planned bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from distca.attention import select_kernel
from distca.attention.reference import attend, document_visibility
from distca.cost.link import Links
from distca.cost.steps import STEP_SLOTS, step_memory, stepped_bytes
from distca.cost.volume import AttentionShape
from distca.plan import KeptRows, Mask, Placement, SteppedPlan, validate_stepped_plan
from distca.runtime import Buffers, CoreAttention
from distca.runtime.messages import QAndKV
from distca.runtime.serving.importance import OBSERVERS, Importance
from distca.runtime.serving.kept_call import SparseCall
from distca.runtime.serving.kept_exchange import build_kept_exchange
from distca.schedule.serving import nobody_holds
from distca.schedule.serving.csps import NODE_PARTS, Levels, Sparsity
from distca.schedule.serving.csps.pipeline import NearToFar
from distca.schedule.serving.steps import step_program
from distca.transport.virtual import VirtualTransport
from support.sparse_reference import importance_of, kept_pairs
from support.stepped import CPU, SCALE, inputs, rows_of, run_virtually

SHAPE = AttentionShape(heads=6, kv_heads=2, head_dim=8, dtype_bytes=4)
BLOCK = 8


def kept_plans(seed: int, ranks: int, per_node: int) -> tuple[SteppedPlan, SteppedPlan]:
    """A dense plan of a few sequences, in contiguous parts, some behind cached tokens that lie
    anywhere; and one that drops rows."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, 60, size=3) * rng.integers(0, 2, size=3)
    ends = starts + rng.integers(1, 90, size=3)
    lying = rng.integers(0, ranks, size=int(starts.sum()))
    document = np.repeat(np.arange(3), starts)
    position = np.concatenate([np.arange(each) for each in starts])
    held = Placement(document, position, position + 1, lying, ranks) if len(lying) else None
    links = Links(per_node, nodes_per_rack=None if ranks % per_node else 1)
    levels = Levels(links, ranks, NODE_PARTS[seed % 2])
    new = levels.shard(starts, ends)
    kept = tuple(
        tuple((1.0, *rng.uniform(0.05, 1, size=3)) for _ in range(SHAPE.kv_heads)) for _ in "kq"
    )
    all_kept = Sparsity.nothing_dropped(3, SHAPE.kv_heads)
    sparsity = Sparsity(
        *((of[0], each, of[2]) for each, of in zip(kept, (all_kept.keys,) * 2, strict=True))
    )
    strategy = NearToFar(levels, sparsity, (None,) * 3, tuple(rng.integers(1, 4, size=2)))
    dense = strategy.plan(held or nobody_holds(ranks), new, Mask(), BLOCK)
    (layer,) = strategy.sparse_plans(dense)
    assert layer == 1
    return dense, strategy.sparse_plans(dense)[1]


class SparseRank:
    """A rank of a plan that drops rows, its keys scattered over a larger tensor."""

    def __init__(
        self, plan: SteppedPlan, transport: VirtualTransport, tensors: list[torch.Tensor]
    ) -> None:
        self.plan, self.transport, rank = plan, transport, transport.rank
        self.core = CoreAttention(transport, select_kernel("cpu"), Buffers(CPU, STEP_SLOTS))
        self.core.reserve(step_memory(plan, SHAPE))
        self.queries, self.keys = rows_of(plan.plan, rank)
        rng = np.random.default_rng(rank)
        places = rng.permutation(len(self.keys) + 3)[: len(self.keys)]
        q, *kv = tensors
        rows = [each.new_full((len(self.keys) + 3, *each.shape[1:]), 9e9) for each in kv]
        for tensor, each in zip(rows, kv, strict=True):
            tensor[places] = each[self.keys]
        self.tensors = QAndKV([q[self.queries]], rows)
        self.exchange = build_kept_exchange(plan, rank, places)
        self.importance = Importance(plan.plan, rank, places, SHAPE.kv_heads, CPU)

    def call(self) -> SparseCall:
        """A call of core attention."""
        table = self.importance.table
        return SparseCall(self.core, self.exchange, self.tensors, SCALE, table)


@pytest.mark.parametrize(("ranks", "per_node"), [(2, 1), (3, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("scale_of_logits", [1.0, 1000.0])
def test_kept_rows_are_attended_to(ranks: int, per_node: int, scale_of_logits: float) -> None:
    for seed in range(4):
        _, plan = kept_plans(seed, ranks, per_node)
        validate_stepped_plan(plan)
        tensors = [each.float() for each in inputs(plan.plan, SHAPE)]
        tensors[0] *= scale_of_logits
        others: list[VirtualTransport] = []
        transports = [VirtualTransport(n, others, ranks, CPU) for n in range(ranks)]
        workers = [SparseRank(plan, each, tensors) for each in transports]
        # Few values, so that many tokens are equally important.
        generator = torch.Generator().manual_seed(seed)
        importance = torch.randint(0, 6, (len(tensors[0]), 2), generator=generator).float()
        for worker in workers:
            worker.importance.table = importance[worker.keys]
        calls = [worker.call() for worker in workers]
        for event in step_program(plan.steps):
            for call in calls:
                call.do(event)
        visible = kept_pairs(plan, importance)
        expected, lse = attend(*(each.double() for each in tensors), visible, SCALE)
        moved = stepped_bytes(plan, SHAPE)
        computed = 0
        for worker, call in zip(workers, calls, strict=True):
            (out, found), rank = call.outputs(), worker.transport.rank
            assert torch.isfinite(found).all()
            tolerance = 1e-5 if scale_of_logits == 1 else 5e-3
            assert torch.allclose(out.double(), expected[worker.queries], rtol=0, atol=tolerance)
            assert torch.allclose(found.double(), lse[worker.queries], rtol=1e-6, atol=tolerance)
            for phase, messages in moved.messages.items():
                assert worker.transport.bytes_sent[phase] == messages.sent()[rank]
                assert worker.transport.bytes_received[phase] == messages.received()[rank]
            computed += int(visible[:, worker.queries].sum())
        assert computed == plan.kept_pairs().sum()


@pytest.mark.parametrize("ranks", [2, 4])
def test_nothing_dropped_is_dense(ranks: int) -> None:
    dense, _ = kept_plans(5, ranks, 2)
    validate_stepped_plan(dense)
    run_virtually(dense, SHAPE, torch.float32)


def test_importance_is_what_the_last_queries_give() -> None:
    """Of many queries the last ones, behind cached tokens; of few all."""
    starts, ends = np.array([30, 0]), np.array([300, 20])
    held = Placement(*np.array([[0, 0], [0, 10], [10, 30], [2, 0]]), 3)
    levels, whole = Levels(Links(2), 3), Sparsity.nothing_dropped(3, SHAPE.kv_heads)
    strategy = NearToFar(levels, whole, (None,) * 3)
    plan = strategy.plan(held, strategy.shard(starts, ends), Mask(), BLOCK).plan
    assert plan.own_tokens_per_rank().min() > OBSERVERS
    q, k, v = (each.float() for each in inputs(plan, SHAPE))
    _, lse = attend(q, k, v, document_visibility(plan.lengths.tolist()), SCALE)
    expected = importance_of(plan, q, k, lse, SCALE, 3)
    for rank in range(3):
        queries, keys = rows_of(plan, rank)
        found = Importance(plan, rank, np.arange(len(keys)), SHAPE.kv_heads, CPU)
        found.update(q[queries], k[keys], lse[queries], SCALE)
        assert torch.allclose(found.table, expected[keys], atol=1e-5)


def test_levels_that_overlap_are_not_exact() -> None:
    """The paper's levels are nested: near keys count in each, even where nothing is dropped. On two
    servers of two ranks, as in its Figure 7, that is .37 off."""
    tokens, ranks, scale = 64, 4, 8**-0.5
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    rank = torch.arange(tokens) * ranks // tokens
    same = [rank[:, None] // size == rank[None] // size for size in (1, 2, 4)]
    disjoint = [same[0], same[1] & ~same[0], same[2] & ~same[1]]
    off = []
    for seed in range(24):
        torch.manual_seed(seed)
        tensors = [torch.randn(tokens, 1, 8, dtype=torch.float64) for _ in range(3)]
        dense, _ = attend(*tensors, causal, scale)
        found = []
        for levels in (disjoint, same):
            parts = [attend(*tensors, causal & level, scale) for level in levels]
            weights = torch.softmax(torch.stack([lse for _, lse in parts]), dim=0)
            out = torch.stack([out for out, _ in parts])
            merged = (weights[..., None] * out).sum(0)
            found.append(float((merged - dense).abs().max()))
        assert found[0] < 1e-6
        off.append(found[1])
    assert np.mean(off) == pytest.approx(0.37, abs=0.01)
    assert min(off) > 0.2


def test_other_plans_are_refused() -> None:
    _, stepped = kept_plans(1, 3, 2)
    plan, t, kept = stepped.plan, stepped.plan.tasks, stepped.kept
    assert kept is not None
    away = np.flatnonzero(
        plan.owners(plan.document_offsets[t.document] + t.kv_start).rank != t.server
    )
    home = np.flatnonzero(t.ends_on_diagonal & (t.kv_end - t.kv_start > 1))

    def changed(column: np.ndarray, row: int, value: int) -> np.ndarray:
        column = column.copy()
        column[row, 1] = value
        return column

    one, own = int(away[0]), int(home[0])
    for other, message in (
        (KeptRows(kept.q[1:], kept.kv[1:]), "tasks it says how many rows"),
        (KeptRows(kept.q[:, 1:], kept.kv), "tasks it says how many rows"),
        (kept._replace(kv=changed(kept.kv, one, 0)), "keeps no such rows"),
        (kept._replace(q=changed(kept.q, one, 10**6)), "keeps no such rows"),
        (kept._replace(kv=changed(kept.kv, own, 1)), "drops a rank's own rows"),
    ):
        with pytest.raises(ValueError, match=message):
            validate_stepped_plan(replace(stepped, kept=other))
    with pytest.raises(ValueError, match="in part dropped are passed on"):
        validate_stepped_plan(replace(stepped, relays=True))
    with pytest.raises(ValueError, match="tasks in the steps of"):
        validate_stepped_plan(replace(stepped, step=stepped.step[1:]))
