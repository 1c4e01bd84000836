"""DistCA beside what Megatron has: context parallelism, and hybrid and dynamic ones.

    python benchmarks/plans/hybrid_cp.py --published DIR --output results/

Batches of 64 x 64K tokens, from distributions of `distca/documents/lengths.py` or from published
lists (see `schedulers.py`), are planned by per-document context parallelism, by megatron-core's own
scheduler of hybrid context parallelism, by the rules of dynamic context parallelism, which no
release of Megatron has (`distca/schedule/baselines/dynamic_cp.py` says which), by WLB-LLM and by
`tiles`. All know the kernel's times, and WLB-LLM those of all work, which it packs by. *CP* is the
size of groups, and how many ranks hybrid and dynamic context parallelism give to the longest
document (`--max-seqlen-per-dp-cp-rank` is its length over that); "default" is the fewest that hold
it with 64K tokens each.

*Layer time* is the busiest rank's for a layer, forward and backward, without communication, over
the mean rank's if all work were shared out equally and documents were whole. Linear layers take it
where tokens are, core attention where it is computed. After each round of hybrid context
parallelism all ranks wait, in a micro-batch of dynamic context parallelism those of a group.
Overheads of more rounds are left out. Writes `hybrid_cp.md`, and prints it.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.plans.schedulers import TOKENS_PER_SERVER, document_sets
from distca.cost.kernel_time import CostModel
from distca.cost.model_sizes import MODELS
from distca.cost.volume import plan_bytes
from distca.plan import Mask, validate_plan
from distca.plan.span import Floats, Int64s
from distca.progress import track
from distca.schedule import (
    DynamicContextParallel,
    HybridContextParallel,
    ScheduleConfig,
    document_loads,
    even_capacities,
    make_scheduler,
)
from distca.schedule.base import task_loads
from distca.schedule.baselines.rounds import RoundScheduler, RoundsPlan
from distca.simulate import CLUSTERS, ModelCosts
from distca.simulate.bins import AllWork

SERVERS = 64
TENSOR_PARALLEL = 8
WAYS: tuple[tuple[str, tuple[int | None, ...]], ...] = (
    ("per-document-cp", (None, 4, 8, 16)),
    ("hybrid-cp", (None, 4, 8, 16)),
    ("dynamic-cp", (None, 4, 8, 16)),
    ("wlb-llm", (None, 4, 8, 16)),
    ("tiles", (None,)),
)
IN_ROUNDS: dict[str, Callable[[ScheduleConfig], RoundScheduler]] = {
    "hybrid-cp": HybridContextParallel,
    "dynamic-cp": DynamicContextParallel,
}


@dataclass(frozen=True)
class Row:
    """Figures of a plan; bytes of a layer on one GPU, forward."""

    layer_time: float
    tokens: float
    rounds: int
    gb_total: float
    gb_busiest: float


def plan_way(
    name: str, lengths: Int64s, servers: int, config: ScheduleConfig, work: CostModel
) -> RoundsPlan:
    """Makes a plan; a scheduler without rounds has one.

    Args:
        name: name of the scheduler.
        lengths: tokens of each document, int64 `[documents]`.
        servers: number of servers, which own equally many tokens where the scheduler lets them.
        config: configuration of the scheduler.
        work: cost of all work, by which WLB-LLM packs.
    """
    capacities = even_capacities(int(lengths.sum()), servers)
    if name in IN_ROUNDS:
        return IN_ROUNDS[name](config).plan_rounds(lengths, capacities, Mask())
    if name == "wlb-llm":
        config = replace(config, cost_model=work)
    plan = make_scheduler(name, config).plan(lengths, capacities, Mask())
    none = np.zeros(len(lengths), dtype=np.int64)
    return RoundsPlan(plan, none, np.arange(servers)[None], waits_for_all=True)


def measure(name: str, size: int | None, lengths: Int64s, costs: ModelCosts) -> Row:
    """Makes a plan, and counts its work and bytes."""
    kernel = costs.cluster.attention_cost(costs.shape)
    per_token = sum(costs.layer_seconds())
    work = AllWork(kernel, 1 + costs.cluster.backward_over_forward, per_token)
    config = ScheduleConfig(shape=costs.shape, cost_model=kernel, context_parallel_size=size)
    found = plan_way(name, lengths, SERVERS, config, work)
    plan, round_of = found.plan, found.round_of_document
    validate_plan(plan)
    at, tasks = plan.placement, plan.tasks
    seconds = np.zeros((found.rounds, SERVERS))
    np.add.at(seconds, (round_of[at.document], at.rank), (at.end - at.start) * per_token)
    attention: Floats = work.with_backward * task_loads(tasks, Mask(), kernel)
    np.add.at(seconds, (round_of[tasks.document], tasks.server), attention)
    tokens = at.tokens_per_rank()
    moved = plan_bytes(plan, costs.shape).forward()
    return Row(
        float(found.end(seconds) * SERVERS / document_loads(lengths, Mask(), work).sum()),
        float(tokens.max() / tokens.mean()),
        len(seconds),
        moved.total / 1e9,
        max(int(moved.sent().max()), int(moved.received().max())) / 1e9,
    )


def table(
    sets: dict[str, Callable[[int, int, int], Int64s]], batches: int, costs: ModelCosts
) -> str:
    """The rows of all sets of documents: means over batches, and the worst of them."""
    head = ["documents", "scheduler", "CP", "layer time", "worst", "tokens", "worst", "rounds"]
    lines = []
    cases = [(title, name, size) for title in sets for name, sizes in WAYS for size in sizes]
    for title, name, size in track(cases, "hybrid_cp", "rows"):
        rows = [
            measure(name, size, sets[title](SERVERS * TOKENS_PER_SERVER, 131_072, seed), costs)
            for seed in range(batches)
        ]
        time, tokens = [r.layer_time for r in rows], [r.tokens for r in rows]
        rounds = np.mean([r.rounds for r in rows])
        total, busiest = np.mean([(r.gb_total, r.gb_busiest) for r in rows], axis=0)
        figures = (np.mean(time), max(time), np.mean(tokens), max(tokens))
        lines.append(
            [
                *(title, name, size or ("-" if name == "tiles" else "default")),
                *(f"{figure:.2f}" for figure in figures),
                *(f"{rounds:.1f}", f"{total:.2f}", f"{busiest:.3f}"),
            ]
        )
    return pages.table([*head, "GB", "GB busiest"], lines)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--published", type=Path, metavar="DIR")
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--model", default="llama-34b", choices=[*MODELS])
    args = parser.parse_args()
    costs = ModelCosts(MODELS[args.model], CLUSTERS["dgx-h200"], TENSOR_PARALLEL)
    rows = table(document_sets(args.published), args.batches, costs)
    published_flag = "--published DIR " if args.published else ""
    report = "\n".join(
        [
            "# Hybrid and dynamic context parallelism of Megatron beside DistCA",
            "",
            f"`python benchmarks/plans/hybrid_cp.py {published_flag}--output DIR`; "
            f"megatron-core {version('megatron-core')}, Python {platform.python_version()}. The "
            "work and bytes of plans are counted; nothing was measured.",
            "",
            f"{args.model}, bf16, tensor parallelism of {TENSOR_PARALLEL}, {SERVERS} servers of "
            f"{costs.cluster.name} with {TOKENS_PER_SERVER:,} tokens each, documents up to 128K; "
            f"{args.batches} batches of each kind: means, and the worst batch. Layer time: the "
            "busiest rank's time for a layer, without communication, over that of an equal share. "
            "Tokens: the most tokens of a rank over the mean. Rounds: ranks wait for each other "
            "after each. GB: bytes of a layer's forward pass on one GPU of a server.",
            "",
            rows,
        ]
    )
    pages.save(args.output, "hybrid_cp", report, __file__)


if __name__ == "__main__":
    main()
