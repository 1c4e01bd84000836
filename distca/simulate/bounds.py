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
from dataclasses import replace

import numpy as np

from distca.plan.span import Floats, Int64s
from distca.simulate.baselines import BASELINES
from distca.simulate.bins import GATHERED, VARIABLE, BaselineLayout, Bins, keeps
from distca.simulate.costs import ModelCosts
from distca.simulate.dynamic import DYNAMIC
from distca.simulate.few_parts import (
    break_down_few_parts,
    few_parts,
    has_few_parts,
    largest_micro_batch,
)
from distca.simulate.hybrid import HYBRID
from distca.simulate.one_f_one_b import Passes
from distca.simulate.parts import (
    SAMPLED,
    Part,
    PartFigures,
    RunParts,
    document_seconds,
    glance,
    pair_seconds,
    parts_of_sample,
    sample,
    visible_pairs,
)
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
from distca.simulate.trials import Trial
from distca.simulate.workload import (
    DISTCA_SYSTEMS,
    Candidate,
    Workload,
    layout_of,
    options_of,
)

_ROUNDING = 1 - 1e-6
"""Share of a bound that rounding in the simulation (of bytes to whole ones) cannot undercut."""


_LARGE = 1024
"""Product of servers and micro-batches from which on a part of a pipeline's iteration stands for
all of it."""
_NEARLY = 0.99
"""Share of the seconds that a few parts promise which an iteration takes at least."""


_MINUTES = 2**15
"""Product of servers and ticks above which not all of these are simulated: on one core 34B in two
stages takes 25 seconds at 33,000."""


class Bounds:
    """Lower bounds of a workload's configurations for one global batch.

    Args:
        workload: model, cluster and sizes.
        sequences: lengths of the documents in each sequence, int64.
        run_parts: simulates parts of the batch's iterations; None: this process.
    """

    def __init__(
        self,
        workload: Workload,
        sequences: Sequence[Int64s],
        run_parts: RunParts | None = None,
    ) -> None:
        self._workload = workload
        self._sequences, self._lengths = sequences, np.concatenate(sequences)
        self._tokens = int(self._lengths.sum())
        self._pairs = visible_pairs(workload, self._lengths)
        number = np.repeat(np.arange(len(sequences)), [len(each) for each in sequences])
        self._of_sequence = np.bincount(number, self._pairs, minlength=len(sequences))
        self._found: dict[Candidate, float] = {}
        self._run_parts = run_parts or self._here
        self._parts: dict[tuple[object, Candidate], object] = {}

    def seconds(self, candidate: Candidate) -> float:
        """Returns seconds that an iteration of the batch takes at least."""
        if candidate not in self._found:
            self._found[candidate] = _ROUNDING * self._seconds(candidate)
        return self._found[candidate]

    def _seconds(self, candidate: Candidate) -> float:
        costs = self._workload.costs(candidate.tensor)
        if candidate.system not in BASELINES:
            if candidate.pool_size is None or not has_few_parts(candidate):
                return self._with_plans(candidate, costs)
            of_few = self._part(few_parts, candidate)
            return np.inf if of_few is None else _NEARLY * of_few.seconds
        layout = layout_of(candidate)
        if candidate.system == HYBRID:
            return self._hybrid(layout, costs)
        if candidate.system == DYNAMIC:
            return self._dynamic(layout, costs)
        if candidate.system in VARIABLE:
            return self._variable(candidate.system, layout, costs)
        return self._in_turn(candidate.system, layout, costs)

    def _in_turn(self, system: str, layout: BaselineLayout, costs: ModelCosts) -> float:
        """Bound where each bin has equally many whole sequences, one after the other."""
        bins, size = layout.bins, layout.context_parallel
        attention = self._of_sequence.reshape(bins, -1).sum(axis=1) * pair_seconds(costs)
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
        linearly: all bins are equal, or one has the longest document, and the others nothing."""
        size, others = layout.context_parallel, layout.micro_batches - 1
        pair = pair_seconds(costs) / size
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
        attention = self._pairs * pair_seconds(costs)
        least = np.full(len(self._lengths), np.inf)
        for size in (2**n for n in range(ranks.bit_length())):
            alone, group = BaselineLayout(1, 1, size, 1), Group(size, 1, ranks)
            bins = _evenly(HYBRID, self._lengths / size, attention / size, group, costs)
            passes = Passes.of(bins.select(np.arange(len(least))[:, None]), alone, costs, 0)
            seconds = size * (passes.forward + passes.backward)[:, 0]
            least = np.where(needed <= size, np.minimum(least, seconds), least)
        return float(least.sum() / ranks)

    def _dynamic(self, layout: BaselineLayout, costs: ModelCosts) -> float:
        """Bound of one micro-batch in which all ranks have equal shares, and nothing is sent."""
        ranks = layout.data_parallel * layout.context_parallel
        tokens = np.array([self._tokens / ranks])
        attention = np.array([self._pairs.sum() * pair_seconds(costs) / ranks])
        bins = _evenly(DYNAMIC, tokens, attention, Group(1, 1, ranks), costs)
        alone = BaselineLayout(layout.stages, 0, 1, 1)
        last = Passes.of(bins.select(np.zeros((1, 1), int)), alone, costs, layout.stages - 1)
        return float((last.forward + last.backward).sum())

    def least_memory(self, candidate: Candidate) -> float:
        """Returns bytes that a GPU needs at least where a few parts stand for an iteration, which
        `space.least_memory` does not know; 0.0 elsewhere.

        Only the largest micro-batch is simulated, unless more was: memory depends on it.
        """
        if not has_few_parts(candidate):
            return 0.0
        costs = self._workload.costs(candidate.tensor)
        if self.holds_no_document(candidate):
            return self._longest_document(candidate, costs)
        known = (few_parts, candidate) in self._parts
        outcome = self._part(few_parts if known else largest_micro_batch, candidate)
        if outcome is None:
            return np.inf
        ranks = outcome.gpus // (candidate.tensor * candidate.stages)
        # Among all replicas each has less of the optimizer's state than among few.
        few, every = (
            costs.state_bytes(0, candidate.stages, number) for number in (ranks, candidate.data)
        )
        return float(outcome.memory_bytes.max()) - few + every

    def holds_no_document(self, candidate: Candidate) -> bool:
        """Whether a GPU's memory is too small for the longest document alone in its server pool:
        more micro-batches do not help."""
        if candidate.pool_size is None or candidate.wide_documents is not None:
            return False
        costs = self._workload.costs(candidate.tensor)
        least = self._longest_document(candidate, costs)
        return least > self._workload.cluster.usable_bytes

    def _longest_document(self, candidate: Candidate, costs: ModelCosts) -> float:
        """Bytes that the first stage's ranks of the longest document's server pool need for it on
        average."""
        tokens, stages = int(self._lengths.max()) / (candidate.pool_size or 1), candidate.stages
        kept = self._workload.model.layers // stages * tokens * costs.activation_bytes()
        return kept + costs.state_bytes(0, stages, candidate.data)

    def has_many_ticks(self, candidate: Candidate) -> bool:
        """Whether a sample and a glance tell of the configuration's ticks in a fraction of the
        time: each is planned over all servers, which takes minutes on a thousand GPUs."""
        if candidate.system not in DISTCA_SYSTEMS or candidate.pool_size is not None:
            return False
        chains, stages = candidate.micro_batches // candidate.chain, candidate.stages
        if has_few_parts(candidate):
            return False
        large = chains * stages * candidate.servers_of_stage >= _LARGE
        return large and chains >= 2 * SAMPLED * stages

    def promised(self, candidate: Candidate) -> float:
        """Seconds that two of many ticks promise; 0.0: there are few, or no plan."""
        found = self._part(glance, candidate) if self.has_many_ticks(candidate) else None
        return 0.0 if found is None else found.seconds

    def stands_in(self, candidate: Candidate) -> bool:
        """Whether a part of the configuration's iteration can stand for all of it."""
        return has_few_parts(candidate) or self.has_many_ticks(candidate)

    def stand_in(self, candidate: Candidate) -> Trial:
        """Returns the figures of an iteration, as far as a part of it tells them."""
        usable = self._workload.cluster.usable_bytes
        tokens = self._workload.sequences * self._workload.context
        if has_few_parts(candidate):
            if (of_few := self._part(few_parts, candidate)) is None:
                return Trial.impossible(self._workload)
            least = self.least_memory(candidate)
            trial = replace(Trial.of(of_few), fits=least <= usable, memory_gb=least / 1e9)
            return replace(trial, tokens=tokens, from_part=True)
        first, two = self._part(sample, candidate), self._part(glance, candidate)
        if first is None or two is None:
            return Trial.impossible(self._workload)
        trial = replace(Trial.of(first.outcome), seconds=two.goes_on(first), tokens=tokens)
        return replace(trial, from_part=True)

    def broken_down(self, candidate: Candidate) -> Trial:
        """Returns the same with what the time is spent on."""
        part = break_down_few_parts if has_few_parts(candidate) else parts_of_sample
        trial, parts = self.stand_in(candidate), self._part(part, candidate)
        return replace(trial, parts=parts.scaled(trial.seconds / parts.seconds))

    def takes_minutes(self, candidate: Candidate) -> bool:
        """Whether all ticks would take minutes to plan. Then a part of them stands for all of them
        in the result, too."""
        if not self.stands_in(candidate):
            return False
        options = options_of(candidate)
        schedule = options.tick_schedule(candidate.micro_batches, candidate.stages)
        servers = candidate.stages * candidate.servers_of_stage
        return len(schedule.ticks) * servers > _MINUTES

    def prepare(self, part: Part[PartFigures], some: Sequence[Candidate]) -> None:
        """Simulates a part of iterations of several configurations, at a time where that can be.

        Args:
            part: one of the functions of `distca.simulate.parts`; what is known of it stays.
            some: configurations that have such a part.
        """
        missing = [each for each in dict.fromkeys(some) if (part, each) not in self._parts]
        if missing:
            found = self._run_parts(part, missing)
            self._parts.update(
                ((part, each), one) for each, one in zip(missing, found, strict=True)
            )

    def _part(self, part: Part[PartFigures], candidate: Candidate) -> PartFigures:
        self.prepare(part, [candidate])
        found: PartFigures = self._parts[part, candidate]  # type: ignore[assignment]
        return found

    def _here(self, part: Part[PartFigures], some: Sequence[Candidate]) -> list[PartFigures]:
        return [part(each, self._workload, self._sequences) for each in some]

    def _with_plans(self, candidate: Candidate, costs: ModelCosts) -> float:
        """Bound of DistCA: all ranks share all work, and linear layers run tick after tick."""
        cluster = costs.cluster
        stages, many = candidate.stages, candidate.micro_batches
        both_ways = float(costs.passes @ [1, cluster.backward_over_forward])
        attention = both_ways * document_seconds(self._workload, costs, self._lengths)
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


def _evenly(
    system: str, tokens: Floats, attention: Floats, group: Group, costs: ModelCosts
) -> Bins:
    """Returns bins with one rank each, which stands for a group whose ranks have equal shares.

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
