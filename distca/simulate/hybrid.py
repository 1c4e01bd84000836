"""An iteration of Megatron's hybrid context parallelism: rounds of samples, each by itself.

megatron-core's own scheduler says which ranks train on which documents in which round
(`distca.schedule.baselines.hybrid_cp`). In a round a rank runs its documents one after the other,
each forward and backward as a micro-batch of its own, in a ring with the others of its subgroup;
then all ranks wait for each other. There is no pipeline. A rank keeps one document's activations.
"""

from __future__ import annotations

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.cost.volume import AttentionShape
from distca.plan import Mask
from distca.plan.span import Floats, Int64s
from distca.schedule import ScheduleConfig
from distca.schedule.baselines.hybrid_cp import HybridContextParallel
from distca.schedule.baselines.rounds import RoundsPlan
from distca.simulate.charges import exposed_reduction
from distca.simulate.costs import ModelCosts
from distca.simulate.outcome import Outcome
from distca.simulate.sharing import Group, Shared, alone, ring

HYBRID = "hybrid-cp"


def plan_hybrid(lengths: Int64s, ranks: int, size: int, shape: AttentionShape) -> RoundsPlan | None:
    """Asks Megatron's scheduler for the rounds of a global batch; None: it makes no plan.

    Args:
        lengths: tokens of each document, int64.
        ranks: data- and context-parallel ranks, one pool.
        size: ranks that the longest document is to have.
        shape: heads of core attention.

    Raises:
        ImportError: megatron-core is not installed.
    """
    config = ScheduleConfig(shape=shape, context_parallel_size=size)
    capacities = np.full(ranks, int(lengths.sum()) // ranks, dtype=np.int64)
    scheduler = HybridContextParallel(config)
    try:
        return scheduler.plan_rounds(lengths, capacities, Mask())
    except ValueError:
        return None


def simulate_hybrid(
    lengths: Int64s,
    ranks: int,
    planned: RoundsPlan | None,
    costs: ModelCosts,
    attention: CostModel,
) -> Outcome:
    """Simulates a global batch.

    Args:
        lengths: tokens of each document, int64.
        ranks: data- and context-parallel ranks, one pool.
        planned: the rounds; None: the iteration does not fit, and never ends.
        costs: costs of the model on the cluster.
        attention: forward seconds of tasks.
    """
    if planned is None:
        return no_plan(int(lengths.sum()), ranks, costs)
    placement = planned.plan.placement
    pairs = np.unique(placement.document * ranks + placement.rank)
    document, rank = pairs // ranks, pairs % ranks
    sizes = np.bincount(document, minlength=len(lengths))
    busy, exposed, held, most, sent = _documents(lengths, sizes, ranks, costs, attention)
    rounds = planned.rounds

    def by_round(seconds: Floats) -> Floats:
        slot = planned.round_of_document[document] * ranks + rank
        sums = np.bincount(slot, seconds[document], minlength=rounds * ranks)
        return sums.astype(np.float64).reshape(rounds, ranks)

    computed, waits = by_round(busy), by_round(exposed)
    whole = computed + waits
    ends = float(whole.max(axis=1).sum())
    last = document[planned.round_of_document[document] == rounds - 1]
    hidden = float(busy[last].max() + exposed[last].max()) * _backward_share(costs)
    needed = costs.gradient_seconds(0, 1, ranks)
    reduced = exposed_reduction(hidden, needed, float(held[last].max()), costs.cluster.charges)
    waited = waits.sum(axis=0) + (whole.max(axis=1, keepdims=True) - whole).sum(axis=0)
    memory = np.zeros(ranks)
    np.maximum.at(memory, rank, most[document])
    return Outcome(
        ends + reduced,
        int(lengths.sum()),
        ranks * costs.tensor_parallel,
        memory + costs.state_bytes(0, 1, ranks),
        costs.cluster.usable_bytes,
        computed.sum(axis=0),
        waited,
        waits.sum(axis=0),
        {
            name: np.bincount(rank, sent[document, number], minlength=ranks).astype(np.int64)
            for number, name in enumerate(("shared forward", "shared backward"))
        },
    )


def no_plan(tokens: int, ranks: int, costs: ModelCosts) -> Outcome:
    """Returns the outcome of an iteration for which Megatron makes no plan."""
    never, zeros = np.full(ranks, np.inf), np.zeros(ranks)
    gpus = ranks * costs.tensor_parallel
    return Outcome(
        float("inf"), tokens, gpus, never, costs.cluster.usable_bytes, zeros, zeros, zeros, {}
    )


def _backward_share(costs: ModelCosts) -> float:
    """Share of a document's seconds that its backward pass has, about."""
    both = costs.cluster.backward_over_forward
    return both / (1 + both)


def _documents(
    lengths: Int64s, sizes: Int64s, ranks: int, costs: ModelCosts, attention: CostModel
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Returns the seconds that each document's ranks compute, and wait; seconds that it holds links
    in the backward pass; bytes of memory; and bytes sent, `[documents, both]`."""
    layers, cluster = costs.model.layers, costs.cluster
    busy, exposed, held, most = (np.zeros(len(lengths)) for _ in range(4))
    sent = np.zeros((len(lengths), 2))
    times = costs.passes
    for size in np.unique(sizes).tolist():
        mine = np.flatnonzero(sizes == size)
        tokens = -(-lengths[mine] // size)
        shared = _share(lengths[mine], tokens, size, ranks, costs, attention)
        both = np.zeros((len(mine), 2))
        for direction, factor in ((0, 1.0), (1, cluster.backward_over_forward)):
            linear = costs.layer_seconds()[direction]
            each = factor * shared.attention + shared.copied[:, :, direction] / (
                cluster.copied_bytes_per_second
            )
            launch = cluster.launch_seconds * shared.calls
            launch = launch + costs.pre_launch_seconds()[direction]
            launch = launch + costs.post_launch_seconds()[direction]
            both[:, direction] = layers * (tokens * linear + each.max(axis=1) + launch)
        head = tokens * sum(costs.head_seconds()) + sum(costs.head_launch_seconds())
        busy[mine] = both @ times + head
        exposed[mine] = layers * shared.exposed @ times
        held[mine] = layers * shared.held[:, 1]
        sent[mine] = layers * times * shared.sent
        more = shared.transient.max(axis=(1, 2)) + tokens * costs.recomputed_bytes()
        kept = tokens * layers * costs.activation_bytes()
        most[mine] = kept + np.maximum(more, tokens * costs.logit_bytes())
    return busy, exposed, held, most, sent


def _share(
    lengths: Int64s,
    tokens: Int64s,
    size: int,
    ranks: int,
    costs: ModelCosts,
    attention: CostModel,
) -> Shared:
    """Core attention of documents, each alone on `size` ranks."""
    if size == 1:
        pairs = lengths * (lengths + 1) // 2
        seconds = attention.seconds(lengths, lengths, pairs)[:, None]
        return alone(lengths[:, None], seconds, costs)
    each = np.repeat(tokens[:, None], size, axis=1)
    bins = [lengths[number : number + 1] for number in range(len(lengths))]
    return ring(bins, each, attention, Group(size, 1, ranks), costs)
