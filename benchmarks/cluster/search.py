"""The best configuration of each system for a case of the simulated experiments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.cluster.sweep import Case, Runner, Unit, batch
from distca.simulate import Candidate, candidates, divisions
from distca.simulate.advice import estimate, sizes_of
from distca.simulate.search import (
    with_chains,
    with_head_groups,
    with_kept_inputs,
    with_less_memory,
)

_COMPARED = 3
"""Batches on which configurations are compared that were fast in the first."""
_FASTEST = 12
"""Configurations of a baseline that run them: the fastest in the first batch."""
_FINALISTS = 4
"""Configurations of a baseline that run all batches."""
_SHORTLIST = 2
"""Configurations with `--distca` that run them."""
_NEAR = 1.15
"""Ratio of estimates up to which tensor-parallel sizes take turns in a sweep."""
_BEYOND_THE_PAPER = ("tiles",)
"""Systems that are tried with chains of micro-batches and with inputs that servers keep, which the
paper has not."""
_TRIES = 4
"""Bound on the configurations that a sweep runs once one fits, per one that is to fit."""


@dataclass(frozen=True)
class Best:
    """The best configuration of a system for a case; None where all that ran are out of memory, or
    there is none.

    Attributes:
        candidate: best configuration.
        tokens_per_second: throughput of all GPUs together, over all batches.
        memory_gb: memory of the GPU that needs most, in any batch.
        idle: share of the time in which compute is not busy.
        exposed: share of the time in which compute waits for exchanges, and for others in them.
        tried: number of configurations that divide the workload.
        simulated: number of configurations that ran.
        out_of_memory: number of configurations that are known not to fit.
    """

    candidate: Candidate | None
    tokens_per_second: float = float("nan")
    memory_gb: float = float("nan")
    idle: float = float("nan")
    exposed: float = float("nan")
    tried: int = 0
    simulated: int = 0
    out_of_memory: int = 0

    def __str__(self) -> str:
        if self.candidate is not None:
            return str(self.candidate)
        if not self.tried:
            return "none divides, or it has no windows"
        if self.out_of_memory == self.tried:
            return "out of memory"
        return f"out of memory in the {self.simulated} simulated"


@dataclass(frozen=True)
class Sweep:
    """Extent of the search for the best configuration with `--distca`.

    Attributes:
        batches: number of first batches on which configurations are compared.
        most_promising: number of configurations, fastest by `estimate`, that are to fit in memory.
        finalists: number of fastest configurations that are tried with each tolerance.
        tolerances: values of `Candidate.tolerance` to try.
    """

    batches: int
    most_promising: int
    finalists: int
    tolerances: tuple[float, ...]


def best_baselines(
    runner: Runner,
    cases: Sequence[Case],
    system: str,
    tensor: Sequence[int],
    stages: Sequence[int],
    batches: int,
) -> dict[Case, Best]:
    """Finds the best configuration of a baseline for each case: the fastest over all batches.

    All configurations run the first batch, the fastest of these a few, and the fastest of those all
    of them. If they are all out of memory in some batch, the next ones run, to the last.

    Args:
        runner: runner of the simulations.
        cases: workloads and their documents.
        system: one of `distca.simulate.BASELINES`.
        tensor: tensor-parallel sizes to try.
        stages: pipeline sizes to try.
        batches: number of batches of each case.
    """
    able = {case: candidates(system, case.workload, tensor, stages) for case in cases}
    rows = run_batches(runner, able, 1, f"{system}: first batch")
    fitting = {case: ranked(able[case], case, rows) for case in cases}
    fastest = {case: mine[:_FASTEST] for case, mine in fitting.items()}
    rows |= run_batches(runner, fastest, min(_COMPARED, batches), f"{system}: first batches")
    left = {
        case: ranked(mine, case, rows) + fitting[case][_FASTEST:] for case, mine in fastest.items()
    }
    order: dict[Case, list[Candidate]] = {case: [] for case in cases}
    while wanted := {case: mine[:_FINALISTS] for case, mine in left.items() if mine}:
        rows |= run_batches(runner, wanted, batches, f"{system}: all batches")
        for case, mine in wanted.items():
            order[case] = ranked(mine, case, rows)
            left[case] = [] if order[case] else left[case][_FINALISTS:]
    best = {}
    for case in cases:
        tried = len(divisions(system, case.workload, tensor, stages))
        failed = tried - len(ranked(able[case], case, rows))
        best[case] = _summary(case, order[case][:1], rows, tried, len(able[case]), failed)
    return best


def best_with_plans(
    runner: Runner,
    cases: Sequence[Case],
    system: str,
    tensor: Sequence[int],
    stages: Sequence[int],
    batches: int,
    sweep: Sweep,
) -> dict[Case, Best]:
    """Finds the best configuration with `--distca` for each case, over all batches.

    Planning takes longer than a baseline. So configurations run the first batches in the order of
    `estimate`, until enough of them fit; the fastest run them with each tolerance, in chains, and
    with inputs kept; the fastest of these a few batches; and the fastest of those all of them. If
    it is out of memory in any, it runs with fewer in flight or in head groups, or the next one
    runs, to the last.

    Args:
        runner: runner of the simulations.
        cases: workloads and their documents.
        system: one of `distca.simulate.DISTCA_SYSTEMS`.
        tensor: tensor-parallel sizes to try.
        stages: pipeline sizes to try.
        batches: number of batches of each case.
        sweep: extent of the search.
    """
    short = min(sweep.batches, batches)
    left = {case: _by_promise(system, case, tensor, stages, sweep) for case in cases}
    swept: Rows = {}
    while wanted := {case: mine for case in cases if (mine := _next(case, left, swept, sweep))}:
        swept |= run_batches(runner, wanted, short, f"{system}: sweep")
        for case, mine in wanted.items():
            failed = [c for c in mine if not ranked([c], case, swept)]
            others = [other for c in failed for other in with_less_memory(c, case.workload)]
            left[case] = others + [c for c in left[case] if c not in mine]
            if not left[case] and not ranked(_of(case, swept), case, swept):
                left[case] = _with_smaller_buffers(case, swept, sweep)
    fitting = {case: ranked(_of(case, swept), case, swept) for case in cases}
    tuned = {}
    for case, mine in fitting.items():
        more: list[Candidate] = []
        if mine and system in _BEYOND_THE_PAPER:
            more = with_chains(mine[0], case.workload) + with_kept_inputs(mine[0], case.workload)
        tuned[case] = more + [
            replace(c, tolerance=tolerance)
            for c in mine[: sweep.finalists]
            for tolerance in sweep.tolerances
        ]
    rows = run_batches(runner, tuned, short, f"{system}: tolerance and chains")
    order = {
        case: ranked(mine, case, rows) + fitting[case][sweep.finalists :]
        for case, mine in tuned.items()
    }
    fastest = {case: mine[:_SHORTLIST] for case, mine in order.items()}
    rows = run_batches(runner, fastest, min(_COMPARED, batches), f"{system}: first batches")
    passed_over: dict[Case, list[Candidate]] = {}
    for case, mine in fastest.items():
        able = ranked(mine, case, rows)
        passed_over[case] = [c for c in mine if c not in able]
        order[case] = able + [c for c in order[case] if c not in able]
    best: dict[Case, Best] = {}
    while open_ones := [case for case in cases if case not in best]:
        next_ones = {case: order[case][:1] for case in open_ones}
        rows = run_batches(runner, next_ones, batches, f"{system}: all batches")
        swept = rows | swept
        for case, mine in next_ones.items():
            if mine and not ranked(mine, case, rows):
                out = order[case].pop(0)
                passed_over[case].append(out)
                others = [
                    c for c in with_less_memory(out, case.workload) if c not in _of(case, swept)
                ]
                left[case] = others + [c for c in left[case] if c not in others]
                if out.head_groups == 1:
                    # It nearly fits: smaller buffers may be enough.
                    order[case] = with_head_groups(out, case.workload)[:1] + order[case]
                # Where all that ran are out of memory, configurations with a worse estimate run.
                order[case] = order[case] or left[case][:1]
                left[case] = [c for c in left[case] if c not in order[case]]
                continue
            unknown = [c for c in (*left[case], *order[case]) if c not in passed_over[case]]
            counts = _counts(system, case, tensor, stages, swept, passed_over[case], unknown)
            best[case] = _summary(case, mine, rows, *counts)
    return best


def _by_promise(
    system: str, case: Case, tensor: Sequence[int], stages: Sequence[int], sweep: Sweep
) -> list[Candidate]:
    first = batch(case, 0)
    able = candidates(system, case.workload, tensor, stages)
    seconds = {candidate: estimate(candidate, case.workload, first) for candidate in able}
    able.sort(key=lambda candidate: seconds[candidate])
    # An estimate says least of small tensor-parallel sizes, whose exchanges are large: sizes take
    # turns, with what is nearly as fast as the first.
    near = [c for c in able if seconds[c] <= _NEAR * seconds[able[0]]]
    turn = {c: sum(c.tensor == o.tensor for o in near[:n]) for n, c in enumerate(near)}
    order = sorted(able, key=lambda candidate: turn.get(candidate, len(able)))
    return [replace(candidate, tolerance=sweep.tolerances[0]) for candidate in order]


def _next(
    case: Case, left: dict[Case, list[Candidate]], swept: Rows, sweep: Sweep
) -> list[Candidate]:
    """Configurations that a case's sweep runs next; none once enough fit, or none is left."""
    done = _of(case, swept)
    fitting = len(ranked(done, case, swept))
    if fitting and len(done) >= _TRIES * sweep.most_promising:
        return []
    return left[case][: max(sweep.most_promising - fitting, 0)]


def _with_smaller_buffers(case: Case, swept: Rows, sweep: Sweep) -> list[Candidate]:
    """Configurations to try where nothing fits: fewer tasks move, or fewer heads at a time."""
    found: list[Candidate] = []
    for candidate in _of(case, swept):
        found += with_head_groups(candidate, case.workload)[:1] * (candidate.head_groups == 1)
        found.append(replace(candidate, tolerance=sweep.tolerances[-1]))
    return [candidate for candidate in found if (case, candidate) not in swept]


def _counts(
    system: str,
    case: Case,
    tensor: Sequence[int],
    stages: Sequence[int],
    swept: Rows,
    passed_over: Sequence[Candidate],
    unknown: Sequence[Candidate],
) -> tuple[int, int, int]:
    """Counts configurations that divide the workload, that ran, and that are known not to fit."""

    def sizes(mine: Sequence[Candidate]) -> set[Candidate]:
        return {replace(sizes_of(c), tolerance=None) for c in mine}

    tried = len(divisions(system, case.workload, tensor, stages))
    able = candidates(system, case.workload, tensor, stages)
    done = _of(case, swept)
    failed = (sizes(done) - sizes(ranked(done, case, swept))) | sizes(passed_over)
    failed -= sizes(unknown)
    return tried, len(sizes(done)), tried - len(able) + len(failed)


Rows = dict[tuple[Case, Candidate], list[dict[str, Any]]]


def _of(case: Case, rows: Rows) -> list[Candidate]:
    return [candidate for of, candidate in rows if of == case]


def run_batches(
    runner: Runner, wanted: dict[Case, list[Candidate]], batches: int, title: str
) -> Rows:
    """Simulates each configuration of each case in the first batches."""
    pairs = [(case, c) for case, mine in wanted.items() for c in mine]
    units = [Unit(case, c, seed) for case, c in pairs for seed in range(batches)]
    rows = runner.run(units, title)
    return {
        pair: rows[number * batches : (number + 1) * batches] for number, pair in enumerate(pairs)
    }


def ranked(mine: Sequence[Candidate], case: Case, rows: Rows) -> list[Candidate]:
    """Configurations that fit in every batch, the fastest first."""
    able = [c for c in mine if all(r["fits"] for r in rows[case, c])]
    return sorted(able, key=lambda c: sum(r["seconds"] for r in rows[case, c]))


def _summary(
    case: Case,
    best: Sequence[Candidate],
    rows_of: Rows,
    tried: int,
    simulated: int,
    failed: int,
) -> Best:
    """Figures of the one configuration in `best`, or those of a case where it is empty."""
    if not best:
        return Best(None, tried=tried, simulated=simulated, out_of_memory=failed)
    rows = rows_of[case, best[0]]
    return Best(
        best[0],
        sum(r["tokens"] for r in rows) / sum(r["seconds"] for r in rows),
        max(r["memory_gb"] for r in rows),
        float(np.mean([r["idle"] for r in rows])),
        float(np.mean([r["exposed"] for r in rows])),
        tried,
        simulated,
        failed,
    )
