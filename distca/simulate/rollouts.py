"""Iterations on rollouts that share prompts, as trees: over all ranks, or each on some of them.

Systems that compute rollouts one by one are simulated as any job whose documents are the rollouts
(`one_by_one`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from distca.cost.volume import BackwardInputs
from distca.plan import Mask, Placement, Plan, Tasks
from distca.plan.paths import Paths
from distca.plan.span import Int64s
from distca.schedule import (
    ExecutionOptions,
    PlannedGlobalBatch,
    PlannedTick,
    ScheduleConfig,
    TilesScheduler,
    document_loads,
    even_capacities,
)
from distca.simulate.breakdown import Breakdown, in_parts
from distca.simulate.costs import ModelCosts
from distca.simulate.disaggregated import simulate_ticks
from distca.simulate.groups import Group
from distca.simulate.layer_mean import LayerMean
from distca.simulate.outcome import Outcome
from distca.simulate.workload import Candidate, Workload, token_pairs

_CONTEXT_MULTIPLE = 512
"""Number that divides the length of sequences in which rollouts are packed one by one."""
_LONGEST_IN_SEQUENCE = 4
"""Rollouts as long as the longest that a sequence has room for."""
_FILLER = 256
"""Tokens of the documents that fill sequences up: so few have hardly any attention."""
_MOST_FILLERS = 4096
"""Documents that fill a sequence up at most; where it lacks more tokens they are longer."""


def shared(groups: Sequence[Group], least: int) -> list[Group]:
    """Returns what trees have of groups: a prompt that is too short is not shared, so that its
    rollouts are groups of their own.

    Args:
        groups: groups of a global batch.
        least: fewest tokens of a prompt that is shared.
    """
    found = []
    for group in groups:
        alone = [Group(each, ()) for each in group.rollouts]
        found += [group] if group.prompt >= least else alone
    return found


def one_by_one(batches: Sequence[Sequence[Group]], gpus: int) -> tuple[int, list[list[Int64s]]]:
    """Packs the rollouts, as documents that share nothing, whole into sequences of equal length.

    Their number is a power of two times the odd part of the number of GPUs, so that parallel sizes
    divide it. Each is as long as a few of the longest rollouts, so that sums are about equal. Short
    documents fill sequences up.

    Args:
        batches: groups of each global batch.
        gpus: GPUs of the job.

    Returns:
        Tokens of a sequence, and the lengths of the documents in each sequence of each batch.
    """
    lengths = [
        sorted((length for group in groups for length in group.rollouts), reverse=True)
        for groups in batches
    ]
    longest, least = max(each[0] for each in lengths), min(map(sum, lengths))
    odd = gpus // (gpus & -gpus)
    twos = max(least // (_LONGEST_IN_SEQUENCE * longest * odd), 1)
    sequences = odd << (twos.bit_length() - 1)
    packed = [_into(each, sequences) for each in lengths]
    most = max(sum(each) for some in packed for each in some)
    context = -(-most // _CONTEXT_MULTIPLE) * _CONTEXT_MULTIPLE
    return context, [[_filled(each, context) for each in some] for some in packed]


def _into(lengths: Sequence[int], sequences: int) -> list[list[int]]:
    """Deals documents out, the longest first, each to the sequence with fewest tokens."""
    found: list[list[int]] = [[] for _ in range(sequences)]
    tokens = [(0, number) for number in range(sequences)]
    for length in lengths:
        held, number = heapq.heappop(tokens)
        found[number].append(length)
        heapq.heappush(tokens, (held + length, number))
    return found


def _filled(lengths: Sequence[int], context: int) -> Int64s:
    """Returns documents with short ones added that fill a sequence up."""
    left = context - sum(lengths)
    each = max(_FILLER, -(-left // _MOST_FILLERS))
    short = [each] * (left // each)
    short += [left % each] * (left % each > 0)
    return np.array([*lengths, *short], dtype=np.int64)


@dataclass(frozen=True)
class TreeLayout:
    """A way to train on trees.

    Attributes:
        tensor: tensor-parallel size.
        micro_batches: micro-batches of a global batch.
        ranks_of_tree: ranks among which a tree's tokens and attention are shared out; None: all.
        ping_pong: whether micro-batches run as two nano-batches.
        keeps_inputs: whether servers keep the kernels' inputs for the backward pass.
    """

    tensor: int
    micro_batches: int
    ranks_of_tree: int | None = None
    ping_pong: bool = True
    keeps_inputs: bool = False

    def __str__(self) -> str:
        where = "all ranks" if self.ranks_of_tree is None else f"{self.ranks_of_tree} ranks each"
        halves = "" if self.ping_pong else ", no ping-pong"
        halves += ", inputs kept" if self.keeps_inputs else ""
        return f"TP{self.tensor}, trees over {where}, {self.micro_batches} micro-batch(es){halves}"


def layouts(groups: int, workload: Workload, tensor: Sequence[int]) -> list[TreeLayout]:
    """Lists layouts: over all ranks, and over each number of ranks that divides them.

    Args:
        groups: number of groups in a global batch.
        workload: model, cluster and GPUs.
        tensor: tensor-parallel sizes.
    """
    found, node = [], workload.cluster.gpus_per_node
    for tp in tensor:
        heads = workload.model.heads % tp or workload.model.kv_heads % tp
        if heads or node % tp or workload.gpus % tp:
            continue
        ranks = workload.gpus // tp
        for number in range(1, groups + 1):
            each = groups // number
            if groups % number:
                continue
            sizes = [n for n in range(1, ranks) if ranks % n == 0 and each >= ranks // n]
            for size in (None, *sizes):
                of_ranks = each // (ranks // (size or ranks))
                halves = (True, False) if of_ranks > 1 else (False,)
                found += [TreeLayout(tp, number, size, ping_pong) for ping_pong in halves]
    return found


def least_memory(groups: Sequence[Group], workload: Workload, layout: TreeLayout) -> float:
    """Returns bytes that a GPU needs at least: without buffers, and with equal shares."""
    costs, ranks = workload.costs(layout.tensor), workload.gpus // layout.tensor
    mean = sum(group.tokens for group in groups) / layout.micro_batches / ranks
    largest = max(group.tokens for group in groups) / (layout.ranks_of_tree or ranks)
    tokens = max(mean, largest)
    kept = tokens * workload.model.layers * costs.activation_bytes()
    return kept + costs.state_bytes(0, 1, ranks)


def simulate_trees(groups: Sequence[Group], workload: Workload, layout: TreeLayout) -> Outcome:
    """Simulates an iteration on trees.

    Groups are dealt to micro-batches, to ranks of trees and to nano-batches, the largest first to
    the one with least work.

    Args:
        groups: groups of a global batch.
        workload: model, cluster and GPUs.
        layout: way to train.

    Raises:
        ValueError: the model's layers are on experts or have latents.
    """
    run, costs = _runner(groups, workload, layout)
    return run(costs)


def break_down_trees(
    groups: Sequence[Group], workload: Workload, layout: TreeLayout
) -> tuple[Outcome, Breakdown]:
    """Simulates an iteration as `simulate_trees` does, and says what its time is spent on."""
    run, costs = _runner(groups, workload, layout)
    ranks = workload.gpus // layout.tensor
    attention = _attention_seconds(groups, costs, ranks)
    return in_parts(run, costs, lambda costs: _linear_seconds(groups, costs, ranks), attention)


def least_seconds(groups: Sequence[Group], workload: Workload, layout: TreeLayout) -> float:
    """Returns seconds that an iteration takes at least: those of the ranks with most work in each
    micro-batch, if nothing else took time. Quick, since nothing is planned."""
    costs, ranks = workload.costs(layout.tensor), workload.gpus // layout.tensor
    ideal = _linear_seconds(groups, costs, ranks) + _attention_seconds(groups, costs, ranks)
    parts, pairs = ranks // (layout.ranks_of_tree or ranks), token_pairs(costs)
    busiest = 0.0
    for some in _dealt(groups, layout.micro_batches, pairs):
        each = (sum(_work(group, pairs) for group in mine) for mine in _dealt(some, parts, pairs))
        busiest += max(each)
    return ideal * busiest * parts / sum(_work(group, pairs) for group in groups)


def _linear_seconds(groups: Sequence[Group], costs: ModelCosts, ranks: int) -> float:
    """Returns the seconds of all layers but core attention on the mean rank."""
    each = costs.model.layers * float(costs.passes @ costs.layer_seconds())
    return sum(group.tokens for group in groups) / ranks * (each + sum(costs.head_seconds()))


def _attention_seconds(groups: Sequence[Group], costs: ModelCosts, ranks: int) -> float:
    """Returns the seconds of core attention on the mean rank."""
    kernel = LayerMean.of(costs.cluster.attention_cost(costs.shape), costs.model)
    lengths, _, prefix = _family(groups)
    loads = float(document_loads(lengths, Mask(), kernel, prefix).sum())
    both_ways = float(costs.passes @ [1, costs.cluster.backward_over_forward])
    return costs.model.layers * both_ways * loads / ranks


def _runner(
    groups: Sequence[Group], workload: Workload, layout: TreeLayout
) -> tuple[Callable[[ModelCosts], Outcome], ModelCosts]:
    """Returns a function that simulates an iteration with other costs, and the costs as they
    are."""
    if workload.model.experts is not None or workload.model.latents is not None:
        raise ValueError("trees are simulated for models without experts and latents (MLA)")
    ranks = workload.gpus // layout.tensor
    candidate = Candidate("tiles", layout.tensor, 1, ranks, 1, layout.micro_batches)
    costs = workload.costs(layout.tensor)
    config = ScheduleConfig(
        workload.tolerance,
        costs.shape,
        costs.cluster.attention_cost(costs.shape),
        links=workload.planned_links(candidate),
    )
    schedule = ExecutionOptions("tiles").tick_schedule(layout.micro_batches, 1)
    masks = workload.model.masks
    pairs = token_pairs(costs)
    of_micro_batches = [
        _plans(some, layout, ranks, config, masks.masks, pairs)
        for some in _dealt(groups, layout.micro_batches, pairs)
    ]
    ticks = []
    for tick in schedule.ticks:
        work = tick.work[0]
        assert work is not None
        ticks.append(PlannedTick(tick, of_micro_batches[work.micro_batch], work.micro_batch))
    servers = np.arange(ranks)[None]
    planned = PlannedGlobalBatch(schedule, servers, (), tuple(ticks), masks)
    kept: BackwardInputs = "keep" if layout.keeps_inputs else "resend"
    # What the same rollouts have one by one.
    tokens = sum(sum(group.rollouts) for group in groups)
    return lambda costs: replace(
        simulate_ticks(planned, costs, backward=kept), tokens=tokens
    ), costs


def _dealt(groups: Sequence[Group], parts: int, token_pairs: float) -> list[list[Group]]:
    """Deals groups out to some parts, the largest first to the one with least work."""
    found: list[list[Group]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    work = {group: _work(group, token_pairs) for group in groups}
    for group in sorted(groups, key=work.__getitem__, reverse=True):
        # Of equally loaded ones that with fewest groups.
        part = min(range(parts), key=lambda n: (loads[n], len(found[n])))
        found[part].append(group)
        loads[part] += work[group]
    return found


@lru_cache(maxsize=1 << 14)
def _work(group: Group, token_pairs: float) -> float:
    """Returns a group's work, in visible pairs."""
    lengths, _, prefix = _family([group])
    pairs = Mask().pairs(prefix, lengths, np.zeros_like(prefix), lengths)
    return float(pairs.sum()) + token_pairs * group.tokens


def _family(groups: Sequence[Group]) -> tuple[Int64s, Int64s, Int64s]:
    """Returns lengths, parents and prefixes of the groups' documents, as `TilesScheduler.plan`
    takes them."""
    own: list[int] = []
    parents: list[int] = []
    for group in groups:
        root = len(own)
        own += [group.prompt, *group.responses]
        parents += [-1, *[root] * len(group.responses)]
    paths = Paths.of(np.array(own, dtype=np.int64), np.array(parents, dtype=np.int64))
    return paths.lengths, paths.parents, paths.prefix


def _plans(
    groups: Sequence[Group],
    layout: TreeLayout,
    ranks: int,
    config: ScheduleConfig,
    masks: Sequence[Mask],
    token_pairs: float,
) -> tuple[Plan, ...]:
    """Plans a micro-batch: mask by mask, each ping then pong."""
    size = layout.ranks_of_tree or ranks
    halves = 2 if layout.ping_pong else 1
    scheduler = TilesScheduler(config)
    found: dict[tuple[int, int], list[Plan]] = {}
    for some in _dealt(groups, ranks // size, token_pairs):
        for half, of_half in enumerate(_dealt(some, halves, token_pairs)):
            if not of_half:
                for other, mask in enumerate(masks):
                    found.setdefault((other, half), []).append(_nothing(size, mask))
                continue
            lengths, parents, prefix = _family(of_half)
            family = parents, prefix
            capacities = even_capacities(sum(group.tokens for group in of_half), size)
            first = scheduler.plan(lengths, capacities, masks[0], *family)
            found.setdefault((0, half), []).append(first)
            for other, mask in enumerate(masks[1:], 1):
                plan = scheduler.schedule(lengths, first.placement, mask, *family)
                found.setdefault((other, half), []).append(plan)
    return tuple(_beside(found[key]) for key in sorted(found))


def _nothing(ranks: int, mask: Mask) -> Plan:
    """Returns the plan of no documents."""
    none = np.zeros(0, dtype=np.int64)
    placement = Placement(none, none, none, none, ranks)
    return Plan(none, placement, Tasks.from_rows([]), mask, cached_prefix=none, parents=none)


def _beside(plans: Sequence[Plan]) -> Plan:
    """Puts the plans of groups of ranks together. Each has documents of its own."""
    if len(plans) == 1:
        return plans[0]
    documents = np.cumsum([0, *(len(each.lengths) for each in plans)])
    servers = np.cumsum([0, *(each.world_size for each in plans)])
    placements, tasks, parents, prefixes = [], [], [], []
    for plan, document, server in zip(plans, documents, servers, strict=False):
        assert plan.parents is not None
        assert plan.cached_prefix is not None
        p, t = plan.placement, plan.tasks
        placements.append(replace(p, document=p.document + document, rank=p.rank + server))
        tasks.append(replace(t, document=t.document + document, server=t.server + server))
        parents.append(np.where(plan.parents < 0, -1, plan.parents + document))
        prefixes.append(plan.cached_prefix)
    placement = replace(Placement.concatenate(placements), world_size=int(servers[-1]))
    return replace(
        plans[0],
        lengths=np.concatenate([each.lengths for each in plans]),
        placement=placement,
        tasks=Tasks.concatenate(tasks),
        cached_prefix=np.concatenate(prefixes),
        parents=np.concatenate(parents),
    )
