"""Lower bounds of an iteration's seconds, by which a search leaves out hopeless configurations.

A bound is the iteration that no configuration can beat, in a fraction of the simulation's time. The
ranks of a group share core attention perfectly, in pairs instead of whole tiles. Exchanges that
kernels can hide end with the kernels, or with the links where these take longer. Gradients are
reduced for nothing. What depends on tokens alone (linear layers, launches, copies, gathers, the
filling of pipelines) is the simulation's own.

DistCA's kernels take whole tiles of whole documents, since cuts only add tiles. Each rank that owns
tokens has one launch in each pass of core attention: its own kernel's, or that of the exchange
which takes its rows elsewhere. What is left out is what balance costs, which a plan may not need:
copies and launches of rows that move, and kernels of a second task shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.plan import Mask
from distca.plan.span import Floats, Int64s
from distca.schedule import BufferBoundError, document_loads
from distca.schedule.training.planned_batch import Documents
from distca.simulate.baselines import BASELINES
from distca.simulate.bins import GATHERED, VARIABLE, BaselineLayout, Bins, keeps
from distca.simulate.costs import ModelCosts
from distca.simulate.disaggregated import simulate_ticks
from distca.simulate.hybrid import HYBRID
from distca.simulate.one_f_one_b import Passes
from distca.simulate.outcome import Outcome
from distca.simulate.sharing import (
    Group,
    Shared,
    all_to_all_launches,
    all_to_all_seconds,
    gather_calls,
    gather_copies,
    gather_seconds,
    hop_seconds,
    ring_copies,
)
from distca.simulate.space import estimate
from distca.simulate.workload import (
    DISTCA_SYSTEMS,
    Candidate,
    Workload,
    incoming_of,
    layout_of,
    options_of,
    planner_of,
    simulate,
)

_ROUNDING = 1 - 1e-6
"""Share of a bound that rounding in the simulation (of bytes to whole ones) cannot undercut."""


_SERVERS, _MANY = 16, 4
"""Servers whose pools are simulated for a bound, two pools at least; and how many times as many
servers the job must have."""
_SAMPLED, _LARGE = 4, 8192
"""Micro-batches of each stage that a sample has. Samples are taken where there are `_MANY` times as
many micro-batches, and where servers times micro-batches are at least `_LARGE`."""
_PROMISED = 0.92
"""Share of the seconds that a sample promises which the whole iteration takes at least: of a 70B
model in 4 stages with 256 micro-batches, six samples promised 1.01 to 1.07 times its seconds."""


class Bounds:
    """Lower bounds of a workload's configurations for one global batch.

    Args:
        workload: model, cluster and sizes.
        sequences: lengths of the documents in each sequence, int64.
    """

    def __init__(self, workload: Workload, sequences: Sequence[Int64s]) -> None:
        self._workload = workload
        self._sequences, self._lengths = sequences, np.concatenate(sequences)
        self._tokens = int(self._lengths.sum())
        self._pairs = _pairs(workload, self._lengths)
        number = np.repeat(np.arange(len(sequences)), [len(each) for each in sequences])
        self._of_sequence = np.bincount(number, self._pairs, minlength=len(sequences))
        self._found: dict[Candidate, float] = {}
        self._iterations: dict[Candidate, Outcome] = {}
        self._micro_batches: dict[Candidate, Outcome] = {}
        self._samples: dict[Candidate, Sample | None] = {}

    def seconds(self, candidate: Candidate) -> float:
        """Returns seconds that an iteration of the batch takes at least."""
        if candidate not in self._found:
            self._found[candidate] = _ROUNDING * self._seconds(candidate)
        return self._found[candidate]

    def _seconds(self, candidate: Candidate) -> float:
        costs = self._workload.costs(candidate.tensor)
        if candidate.system not in BASELINES:
            few = self.few_pools(candidate)
            return self._with_plans(candidate, costs) if few is None else few.seconds
        layout = layout_of(candidate)
        if candidate.system == HYBRID:
            return self._hybrid(layout, costs)
        if candidate.system in VARIABLE:
            return self._variable(candidate.system, layout, costs)
        return self._in_turn(candidate.system, layout, costs)

    def _pair_seconds(self, costs: ModelCosts) -> float:
        """Forward seconds of a pair on one GPU with its heads."""
        return costs.shape.flops_per_pair / (costs.cluster.attention_tflops * 1e12)

    def _document_seconds(self, costs: ModelCosts, lengths: Int64s) -> float:
        """Forward seconds of documents in a mean layer, on one GPU with its heads."""
        if not self._workload.model.sees_all:
            # A task's share of its tiles is an average, so that cuts may save some with windows.
            return float(_pairs(self._workload, lengths).sum()) * self._pair_seconds(costs)
        kernel = costs.cluster.attention_cost(costs.shape)
        return float(document_loads(lengths, Mask(), kernel).sum())

    def _in_turn(self, system: str, layout: BaselineLayout, costs: ModelCosts) -> float:
        """Bound where each bin has equally many whole sequences, one after the other."""
        bins, size = layout.bins, layout.context_parallel
        attention = self._of_sequence.reshape(bins, -1).sum(axis=1) * self._pair_seconds(costs)
        tokens = np.full(bins, self._tokens / (bins * size))
        order = np.arange(bins).reshape(layout.micro_batches, layout.data_parallel).T
        evenly = _evenly(system, tokens, attention / size, layout.group, costs).select(order)
        first, last = (Passes.of(evenly, layout, costs, n) for n in (0, layout.stages - 1))
        # The first micro-batch comes to the last stage through all others, and the last one back.
        ways = first.forward[:, 0] + first.backward[:, -1]
        all_passes = (last.forward + last.backward).sum(axis=1)
        return float((all_passes + (layout.stages - 1) * ways).max())

    def _variable(self, system: str, layout: BaselineLayout, costs: ModelCosts) -> float:
        """Bound where bins hold any number of tokens, with which all that is counted grows
        linearly: all bins are alike, or one has the longest document, and the others nothing."""
        size, others = layout.context_parallel, layout.micro_batches - 1
        pair = self._pair_seconds(costs) / size
        longest = int(np.argmax(self._pairs))
        tokens = np.array([self._tokens / layout.bins, self._lengths[longest], 0.0]) / size
        pairs = np.array([self._pairs.sum() / layout.bins, self._pairs[longest], 0.0])
        evenly = _evenly(system, tokens, pairs * pair, layout.group, costs)
        bins = evenly.select(np.arange(3)[:, None])
        first, last = (Passes.of(bins, layout, costs, n) for n in (0, layout.stages - 1))
        of_first, of_last = ((p.forward + p.backward)[:, 0] for p in (first, last))
        fill = (layout.stages - 1) * of_first
        alike = (others + 1) * of_last[0] + fill[2]
        # In a pipeline other micro-batches may run while the longest document is elsewhere.
        alone = of_last[1] + fill[1] + others * of_last[2] * (layout.stages == 1)
        return float(max(alike, alone))

    def _hybrid(self, layout: BaselineLayout, costs: ModelCosts) -> float:
        """Bound of rounds that leave no rank idle, each document on the best number of ranks."""
        ranks = layout.data_parallel * layout.context_parallel
        most = -(-int(self._lengths.max()) // layout.context_parallel)
        needed = 2.0 ** np.ceil(np.log2(np.maximum(self._lengths / most, 1)))
        attention = self._pairs * self._pair_seconds(costs)
        least = np.full(len(self._lengths), np.inf)
        for size in (2**n for n in range(ranks.bit_length())):
            alone, group = BaselineLayout(1, 1, size, 1), Group(size, 1, ranks)
            bins = _evenly(HYBRID, self._lengths / size, attention / size, group, costs)
            passes = Passes.of(bins.select(np.arange(len(least))[:, None]), alone, costs, 0)
            seconds = size * (passes.forward + passes.backward)[:, 0]
            least = np.where(needed <= size, np.minimum(least, seconds), least)
        return float(least.sum() / ranks)

    def has_many_pools(self, candidate: Candidate) -> bool:
        """Whether the bound is a simulated iteration of a few of the server pools."""
        size = candidate.pool_size
        return size is not None and candidate.data >= _MANY * _few(candidate) * size

    def least_memory(self, candidate: Candidate) -> float:
        """Returns bytes that a GPU needs at least with server pools, which `space.least_memory`
        does not know; 0.0 where that is not known here either.

        Only the largest micro-batch is simulated, unless an iteration was: memory depends on it.
        """
        if not self.has_many_pools(candidate):
            return 0.0
        outcome = self._iterations.get(candidate) or self._largest_micro_batch(candidate)
        costs = self._workload.costs(candidate.tensor)
        ranks = outcome.gpus // candidate.tensor
        # Among all replicas each has less of the optimizer's state than among few.
        few, every = (costs.state_bytes(0, 1, number) for number in (ranks, candidate.data))
        return float(outcome.memory_bytes.max()) - few + every

    def has_many_ticks(self, candidate: Candidate) -> bool:
        """Whether `sample` simulates a part of the configuration's micro-batches."""
        if candidate.system not in DISTCA_SYSTEMS or candidate.pool_size is not None:
            return False
        chains, stages = candidate.micro_batches // candidate.chain, candidate.stages
        large = chains * stages * candidate.data >= _LARGE
        return large and chains >= _MANY * _SAMPLED * stages

    def sample(self, candidate: Candidate) -> Sample | None:
        """Simulates the first micro-batches of a configuration with many ticks; None: it has few,
        or no plan keeps to the configuration's bound of buffers.

        Each tick is planned over all servers, which takes minutes for an iteration on a thousand
        GPUs.
        """
        if candidate not in self._samples:
            self._samples[candidate] = self._sample(candidate)
        return self._samples[candidate]

    def _sample(self, candidate: Candidate) -> Sample | None:
        if not self.has_many_ticks(candidate):
            return None
        whole, chains = self._workload, _SAMPLED * candidate.stages
        sequences = whole.sequences * candidate.chain // candidate.micro_batches * chains
        workload = replace(whole, sequences=sequences)
        few = replace(candidate, micro_batches=chains * candidate.chain)
        some = self._sequences[:sequences]
        try:
            outcome = simulate(few, workload, some)
        except BufferBoundError:
            return None
        ideal = estimate(candidate, whole, self._sequences) / estimate(few, workload, some)
        return Sample(outcome, ideal * outcome.seconds)

    def few_pools(self, candidate: Candidate) -> Outcome | None:
        """Simulates an iteration of a few server pools, where there are many: the one with the
        largest micro-batch, and those with most work.

        Pools of whole nodes share no link, so an iteration of all of them takes at least as long;
        the reduction of gradients takes less among fewer replicas.

        Returns:
            Figures of the iteration; None: without pools, or where they are too few.
        """
        if not self.has_many_pools(candidate):
            return None
        if candidate not in self._iterations:
            costs = self._workload.costs_of(candidate)
            parts = self._pools(candidate)
            of_token = float(costs.passes @ costs.layer_seconds())
            both_ways = float(costs.passes @ [1, costs.cluster.backward_over_forward])
            work = []
            for of_pool in zip(*parts, strict=True):
                lengths = np.concatenate([documents.lengths for documents in of_pool])
                attention = both_ways * self._document_seconds(costs, lengths)
                work.append(attention + of_token * float(lengths.sum()))
            tokens = [[int(each.lengths.sum()) for each in of_pools] for of_pools in parts]
            # Memory depends on the largest micro-batch.
            fullest = int(np.max(tokens, axis=0).argmax())
            order = np.argsort(-np.array(work), kind="stable").tolist()
            chosen = list(dict.fromkeys([fullest, *order]))[: _few(candidate)]
            some = [[of_pools[each] for each in chosen] for of_pools in parts]
            self._iterations[candidate] = self._simulate(candidate, some)
        return self._iterations[candidate]

    def _largest_micro_batch(self, candidate: Candidate) -> Outcome:
        """Simulates the micro-batch with most tokens of a server pool, beside other pools'."""
        if candidate not in self._micro_batches:
            parts = self._pools(candidate)
            tokens = np.array([[each.lengths.sum() for each in of_pools] for of_pools in parts])
            largest = int(tokens.max(axis=1).argmax())
            fullest = np.argsort(-tokens[largest], kind="stable")[: _few(candidate)]
            some = [[parts[largest][each] for each in fullest]]
            self._micro_batches[candidate] = self._simulate(candidate, some)
        return self._micro_batches[candidate]

    def _pools(self, candidate: Candidate) -> list[list[Documents]]:
        """Returns the documents of each micro-batch and server pool."""
        incoming = incoming_of(candidate, self._workload, self._sequences)
        return planner_of(candidate, self._workload).assign(incoming)

    def _simulate(self, candidate: Candidate, parts: list[list[Documents]]) -> Outcome:
        """Simulates an iteration of some micro-batches of some server pools."""
        size = candidate.pool_size or 1
        few = replace(candidate, data=len(parts[0]) * size, micro_batches=len(parts))
        return simulate_ticks(
            planner_of(few, self._workload).plan_assigned(parts),
            self._workload.costs_of(candidate),
            backward="keep" if candidate.keeps_inputs else "resend",
        )

    def _with_plans(self, candidate: Candidate, costs: ModelCosts) -> float:
        """Bound of DistCA: all ranks share all work, and linear layers run tick after tick."""
        cluster = costs.cluster
        stages, many = candidate.stages, candidate.micro_batches
        both_ways = float(costs.passes @ [1, cluster.backward_over_forward])
        attention = both_ways * self._document_seconds(costs, self._lengths)
        shared = self._workload.model.layers * attention / (stages * candidate.data)
        tokens = self._tokens / (candidate.data * many)
        layers = self._workload.model.layers // stages
        # Layers run once for each nano-batch, the output layer once for both.
        launches = np.add(costs.pre_launch_seconds(), costs.post_launch_seconds())
        launches = launches + cluster.launch_seconds
        tick = layers * float(costs.passes @ (tokens * np.array(costs.layer_seconds())))
        tick += (1 + candidate.ping_pong) * layers * float(costs.passes @ launches)
        head = tokens * sum(costs.head_seconds()) + sum(costs.head_launch_seconds())
        ticks = len(options_of(candidate).tick_schedule(many, stages).ticks) / 2
        return max(shared + many * (tick + head / stages), ticks * tick + many * head)


@dataclass(frozen=True)
class Sample:
    """Figures of a configuration's first micro-batches.

    Attributes:
        outcome: figures of an iteration with these alone.
        promised: seconds of the whole iteration, if the sample's ratio to its `estimate` holds.
    """

    outcome: Outcome
    promised: float

    @property
    def least(self) -> float:
        """Seconds that the whole iteration takes at least, by experience."""
        return _PROMISED * self.promised


def _few(candidate: Candidate) -> int:
    """Server pools that are simulated for a bound."""
    return max(_SERVERS // (candidate.pool_size or 1), 2)


def _pairs(workload: Workload, lengths: Int64s) -> Floats:
    """Visible pairs of each document in a mean layer, `[documents]`."""
    model, zeros = workload.model, np.zeros_like(lengths)
    masks: list[Mask] = [model.masks.of_layer(number) for number in range(model.layers)]
    pairs: Floats = np.zeros(len(lengths))
    for mask in dict.fromkeys(masks):
        share = masks.count(mask) / len(masks)
        pairs = pairs + share * mask.pairs(zeros, lengths, zeros, lengths)
    return pairs


def _evenly(
    system: str, tokens: Floats, attention: Floats, group: Group, costs: ModelCosts
) -> Bins:
    """Returns bins with one rank each, which stands for all of a group that share all alike.

    Args:
        system: a baseline.
        tokens: tokens of a rank, `[bins]`.
        attention: forward seconds of a rank's kernels, `[bins]`.
        group: sizes of the groups.
        costs: costs of the model on the cluster.
    """
    cluster, size, many = costs.cluster, group.size, len(tokens)
    launch = cluster.launch_seconds
    exposed, per_token, calls = np.zeros((many, 2)), np.zeros(2), 1
    if size > 1 and system in GATHERED:
        kept = keeps(system, costs)
        exposed, calls = gather_seconds(size * tokens, group, costs, kept), gather_calls(costs)
        per_token = np.array(gather_copies(size, costs, kept))
    elif size > 1:
        calls = group.ring
        hops = (calls - 1) * hop_seconds(tokens, group, costs)[:, None] * np.array([1, 2])
        kernels = attention[:, None] * np.array([1, cluster.backward_over_forward])
        exposed = np.maximum(hops - (kernels + calls * launch), 0.0)
        exposed += tokens[:, None] * np.array(all_to_all_seconds(group, costs))
        exposed += all_to_all_launches(group) * launch
        per_token = ring_copies(np.ones((1, size), dtype=np.int64), group, costs)[0].mean(
            axis=(0, 1)
        )
    none = np.zeros((many, 2))
    shared = Shared(
        attention[:, None],
        exposed,
        none,
        none.astype(np.int64),
        (tokens[:, None] * per_token)[:, None],
        np.zeros((many, 1)),
        none[:, None],
        np.full(many, calls),
    )
    return Bins(tokens[:, None], shared)
