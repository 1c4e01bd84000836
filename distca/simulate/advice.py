"""The search for each system's best configuration, which `distca simulate` and benchmarks run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from distca.plan.span import Int64s
from distca.simulate.choice import Choice
from distca.simulate.effort import Effort, Evaluate
from distca.simulate.hybrid import HYBRID
from distca.simulate.parts import RunParts
from distca.simulate.search import find_best
from distca.simulate.space import pooled_pipelines
from distca.simulate.trials import Trials
from distca.simulate.variants import (
    with_chains,
    with_kept_inputs,
    with_near_micro_batches,
    with_or_without_ping_pong,
    with_other_micro_batches,
    with_pools,
    with_pools_or_shared_heads,
    with_shared_heads,
    with_slower_links,
    with_wide_documents,
    without_latents,
)
from distca.simulate.workload import DISTCA_SYSTEMS, Candidate, Workload

_FIRST_SEQUENCES, _COMPARED_SEQUENCES = 8, 96
"""Sequences of the batches that all configurations run which may be fastest, and of those by which
a search chooses among these and their variants: large batches differ less, so fewer are enough."""
_MANY_TOKENS, _MANY_TOKENS_WITH_PLANS = 2**24, 2**23
"""Tokens of a batch from which on it alone chooses, however few its sequences are: among a
baseline's configurations, and with `--distca`."""
_KEPT, _KEPT_WITH_PLANS = 12, 3
"""Configurations of a baseline, which a search compares by all batches, and with `--distca`, by the
batches above. With 6 of a baseline in 3 batches WLB-LLM was 0.9% slower in the README's job than
its best."""
_LAST_TOLERANCE = 0.2
"""Tolerance that is tried where nothing fits with the others."""
_WORTH_IT = 1.01
"""Ratio up to which steps count as equally long: smaller micro-batches cost a little that is not
simulated, such as smaller kernels."""


@dataclass(frozen=True)
class Extent:
    """Configurations that a search tries.

    Attributes:
        tensor: tensor-parallel sizes.
        stages: pipeline sizes.
        finalists: configurations with `--distca` that are to fit in the first batch.
        tolerances: values of `Candidate.tolerance` to try beside the workload's; with some, a loose
            one is tried, too, where nothing fits.
        in_the_papers_way: whether DistCA has what its paper has, and no variants beyond: neither
            server pools, chains, inputs that servers keep, nor plans for slower networks.
        whole_iterations: as for `Effort`.
    """

    tensor: Sequence[int]
    stages: Sequence[int]
    finalists: int = 4
    tolerances: Sequence[float] = ()
    in_the_papers_way: bool = False
    whole_iterations: bool = False

    def effort(self, system: str, workload: Workload, batches: int) -> Effort:
        """Returns the effort of the search for a system's best configuration.

        Args:
            system: one of `SYSTEMS`.
            workload: model, cluster and sizes.
            batches: number of all batches.
        """
        first, several = (
            min(-(-sequences // workload.sequences), batches)
            for sequences in (_FIRST_SEQUENCES, _COMPARED_SEQUENCES)
        )
        planned = system in DISTCA_SYSTEMS
        many = _MANY_TOKENS_WITH_PLANS if planned else _MANY_TOKENS
        if workload.sequences * workload.context >= many:
            several = 1
        kept, kept_with_plans = (_KEPT, _KEPT_WITH_PLANS) if several > 1 else (2, 1)
        if not planned:
            # A peer's layout that is not quite the best would flatter DistCA.
            return Effort(kept, batches, first)
        last_tolerance = _LAST_TOLERANCE if self.tolerances else None
        if self.in_the_papers_way:
            sweeps = ((self._tolerant, 1.0),)
            return Effort(
                kept_with_plans, several, first, self.finalists, None, sweeps, last_tolerance
            )
        return Effort(
            kept_with_plans,
            several,
            first,
            self.finalists,
            with_pools_or_shared_heads,
            (
                (self._pooled_pipelines, 1.0),
                (with_chains, _WORTH_IT),
                (without_latents, 1.0),
                (with_shared_heads, 1.0),
                (with_pools, 1.0),
                (with_wide_documents, 1.0),
                (with_other_micro_batches, 1.0),
                (with_near_micro_batches, 1.0),
                # A tolerance costs a user nothing.
                (self._tolerant, 1.0),
                (with_kept_inputs, 1.0),
                (with_or_without_ping_pong, 1.0),
                # Last, so that a faster network has the plan with which the search for the slower
                # one ended.
                (with_slower_links, 1.0),
                # The slower network's search may have ended with another tolerance.
                (self._tolerant_for_slower_links, 1.0),
            ),
            last_tolerance,
            self.whole_iterations,
        )

    def _pooled_pipelines(self, candidate: Candidate, workload: Workload) -> list[Candidate]:
        sizes = self.tensor, self.stages
        return pooled_pipelines(candidate.system, workload, *sizes)

    def _tolerant(self, candidate: Candidate, workload: Workload) -> list[Candidate]:
        return [replace(candidate, tolerance=each) for each in self.tolerances]

    def _tolerant_for_slower_links(
        self, candidate: Candidate, workload: Workload
    ) -> list[Candidate]:
        return self._tolerant(candidate, workload) if candidate.network_divisor > 1 else []


def best_of(
    system: str,
    workload: Workload,
    batches: Sequence[Sequence[Int64s]],
    evaluate: Evaluate,
    extent: Extent,
    parts_of: Callable[[int], RunParts] | None = None,
    reached: Callable[[float], None] = lambda share: None,
) -> Choice:
    """Finds the best configuration of a system.

    Configurations run the first batches, which have 8 sequences together or more: those of a
    baseline in the order of their lower bounds, and as long as these are below the time of the few
    fastest; those with `--distca`, whose planning takes longer, in the order of `estimate`, until
    enough of them fit, and these with server pools. Those that may be fastest run batches of 96
    sequences together, by which the best one is chosen, unless 8 or 16 tell that they are slower;
    and that with chains, keys and values instead of latents, other tolerances, inputs
    that are kept, pools without ping-pong, and plans for a slower network, too. The best one runs
    all batches.

    Args:
        system: one of `SYSTEMS`.
        workload: model, cluster and sizes.
        batches: sequences of each batch.
        evaluate: simulates configurations.
        extent: what is tried.
        parts_of, reached: as for `find_best`.

    Raises:
        ValueError: there is no such system.
    """
    effort = extent.effort(system, workload, len(batches))
    sizes = extent.tensor, extent.stages
    return find_best(system, workload, batches, *sizes, evaluate, effort, parts_of, reached)


def advise(
    workload: Workload,
    batches: Sequence[Sequence[Int64s]],
    systems: Sequence[str],
    tensor: Sequence[int],
    stages: Sequence[int],
    finalists: int = 4,
    tolerances: Sequence[float] = (),
    trials: Trials | None = None,
    reached: Callable[[str, float], None] = lambda system, share: None,
    whole_iterations: bool = False,
) -> list[Choice]:
    """Finds the best configuration of each system, as `best_of` does.

    Args:
        workload: model, cluster and sizes.
        batches: sequences of each global batch, as `simulate` takes them.
        systems: names in `SYSTEMS`.
        tensor, stages, finalists, tolerances: as for `Extent`.
        trials: what simulates the same workload and batches; None: this process.
        reached: called with a system and the share of its search that is done, perhaps on another
            thread.
        whole_iterations: as for `Effort`.

    Raises:
        ValueError: there is no batch or no such system.
    """
    if not batches:
        raise ValueError("no batches to simulate: give at least 1")
    extent = Extent(tensor, stages, finalists, tolerances, whole_iterations=whole_iterations)
    trials = trials or Trials(workload, batches)

    def find(system: str) -> Choice:
        choice = best_of(
            system,
            workload,
            batches,
            trials.first,
            extent,
            trials.parts_of,
            lambda share: reached(system, share),
        )
        reached(system, 1.0)
        return choice

    # Plans of DistCA take longest. The others' bounds keep this process busy meanwhile, and hybrid
    # context parallelism a process of its own.
    lanes = [
        [system for system in systems if system in DISTCA_SYSTEMS],
        [system for system in systems if system not in (*DISTCA_SYSTEMS, HYBRID)],
        [system for system in systems if system == HYBRID],
    ]
    if not trials.has_processes:
        return [find(system) for system in systems]

    def find_all(lane: Sequence[str]) -> dict[str, Choice]:
        return {system: find(system) for system in lane}

    first, *others = lanes
    threads = ThreadPoolExecutor(len(others))
    try:
        running = [threads.submit(find_all, lane) for lane in others]
        found = find_all(first)
        for each in running:
            found |= each.result()
    finally:
        # After an error its process is closed by who made `trials`, and ends what is left.
        threads.shutdown(wait=False, cancel_futures=True)
    return [found[system] for system in systems]
