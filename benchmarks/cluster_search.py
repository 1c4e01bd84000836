"""The best configuration of each system for a case of the simulated experiments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from cluster_sweep import Case, Runner, Unit, batch

from distca.simulate import Candidate, candidates, divisions
from distca.simulate.advice import estimate
from distca.simulate.search import with_fewer_in_flight

_COMPARED = 3
"""Batches on which a baseline's configurations are compared."""
_FINALISTS = 12
"""Of a baseline, that run all batches."""
_TRIES = 4
"""Configurations that a sweep runs at most once one fits, over those that are to fit."""


@dataclass(frozen=True)
class Best:
    """The best configuration of a system for a case; None where all that ran are out of memory.

    Attributes:
        candidate: the configuration.
        tokens_per_second: of all GPUs, over all batches.
        memory_gb: of the GPU that needs most, in any batch.
        idle: the part of the time in which compute is not busy.
        exposed: the part in which it waits for exchanges, and for others in them.
        tried: configurations that divide the job.
        simulated: those of them that ran.
        out_of_memory: those that are known not to fit.
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
        if self.out_of_memory == self.tried:
            return "out of memory"
        return f"out of memory in the {self.simulated} simulated"


@dataclass(frozen=True)
class Sweep:
    """How the best configuration with `--distca` is looked for.

    Attributes:
        batches: on which configurations are compared, the first ones.
        most_promising: configurations that are to fit in memory, by `estimate`.
        finalists: the fastest of them, which are tried with each tolerance.
        tolerances: see `Candidate`.
    """

    batches: int
    most_promising: int
    finalists: int
    tolerances: tuple[float, ...]


def best_baselines(
    runner: Runner, cases: Sequence[Case], system: str, stages: Sequence[int], batches: int
) -> dict[Case, Best]:
    """The best configuration of a baseline for each case: the fastest over all batches.

    All configurations that fit in memory in the first batch run a few, and the fastest of these run
    all of them. If they are all out of memory in some batch, the next ones run, to the last.

    Args:
        runner: runs them.
        cases: jobs.
        system: one of `distca.simulate.BASELINES`.
        stages: pipeline sizes.
        batches: of each case.
    """
    able = {case: candidates(system, case.job, [case.tensor], stages) for case in cases}
    rows = run_batches(runner, able, 1, f"{system}: first batch")
    fitting = {case: ranked(able[case], case, rows) for case in cases}
    rows |= run_batches(runner, fitting, min(_COMPARED, batches), f"{system}: first batches")
    left = {case: ranked(fitting[case], case, rows) for case in cases}
    order: dict[Case, list[Candidate]] = {case: [] for case in cases}
    while wanted := {case: mine[:_FINALISTS] for case, mine in left.items() if mine}:
        rows |= run_batches(runner, wanted, batches, f"{system}: all batches")
        for case, mine in wanted.items():
            order[case] = ranked(mine, case, rows)
            left[case] = [] if order[case] else left[case][_FINALISTS:]
    best = {}
    for case in cases:
        tried = len(divisions(system, case.job, [case.tensor], stages))
        failed = tried - len(ranked(able[case], case, rows))
        best[case] = _summary(case, order[case][:1], rows, tried, len(able[case]), failed)
    return best


def best_with_plans(
    runner: Runner,
    cases: Sequence[Case],
    system: str,
    stages: Sequence[int],
    batches: int,
    sweep: Sweep,
) -> dict[Case, Best]:
    """The best configuration with `--distca` for each case, over all batches.

    Planning takes longer than a baseline. So those run the first batches that promise most, until
    enough of them fit; the fastest of these with each tolerance; and the fastest of them all runs
    all batches. If it is out of memory in any, the next one runs, to the last.

    Args:
        runner: runs them.
        cases: jobs.
        system: one of `distca.simulate.WAYS`.
        stages: pipeline sizes.
        batches: of each case.
        sweep: how much is tried.
    """
    short = min(sweep.batches, batches)
    left = {case: _by_promise(system, case, stages, sweep) for case in cases}
    swept: Rows = {}
    while wanted := {case: mine for case in cases if (mine := _next(case, left, swept, sweep))}:
        swept |= run_batches(runner, wanted, short, f"{system}: sweep")
        for case, mine in wanted.items():
            failed = [c for c in mine if not ranked([c], case, swept)]
            others = [other for c in failed for other in with_fewer_in_flight(c)]
            left[case] = others + [c for c in left[case] if c not in mine]
    fitting = {case: ranked(_of(case, swept), case, swept) for case in cases}
    tuned = {
        case: [
            replace(c, tolerance=tolerance)
            for c in mine[: sweep.finalists]
            for tolerance in sweep.tolerances
        ]
        for case, mine in fitting.items()
    }
    rows = run_batches(runner, tuned, short, f"{system}: tolerance")
    order = {
        case: ranked(mine, case, rows) + fitting[case][sweep.finalists :]
        for case, mine in tuned.items()
    }
    passed_over: dict[Case, list[Candidate]] = {case: [] for case in cases}
    best: dict[Case, Best] = {}
    while open_ones := [case for case in cases if case not in best]:
        next_ones = {case: order[case][:1] for case in open_ones}
        rows = run_batches(runner, next_ones, batches, f"{system}: all batches")
        swept = rows | swept
        for case, mine in next_ones.items():
            if mine and not ranked(mine, case, rows):
                out = order[case].pop(0)
                passed_over[case].append(out)
                others = [c for c in with_fewer_in_flight(out) if c not in _of(case, swept)]
                left[case] = others + [c for c in left[case] if c not in others]
                # Where all that ran are out of memory those run that promise less.
                order[case] = order[case] or left[case][:1]
                left[case] = [c for c in left[case] if c not in order[case]]
                continue
            unknown = [*left[case], *order[case]]
            counts = _counts(system, case, stages, swept, passed_over[case], unknown)
            best[case] = _summary(case, mine, rows, *counts)
    return best


def _by_promise(system: str, case: Case, stages: Sequence[int], sweep: Sweep) -> list[Candidate]:
    first = batch(case, 0)
    able = candidates(system, case.job, [case.tensor], stages)
    able.sort(key=lambda candidate: estimate(candidate, case.job, first))
    return [replace(candidate, tolerance=sweep.tolerances[0]) for candidate in able]


def _next(
    case: Case, left: dict[Case, list[Candidate]], swept: Rows, sweep: Sweep
) -> list[Candidate]:
    """What a case's sweep runs next; nothing: enough of it fit, or nothing is left."""
    done = _of(case, swept)
    fitting = len(ranked(done, case, swept))
    if fitting and len(done) >= _TRIES * sweep.most_promising:
        return []
    return left[case][: max(sweep.most_promising - fitting, 0)]


def _counts(
    system: str,
    case: Case,
    stages: Sequence[int],
    swept: Rows,
    passed_over: Sequence[Candidate],
    unknown: Sequence[Candidate],
) -> tuple[int, int, int]:
    """Configurations that divide the job; those that ran; those that are known not to fit."""

    def sizes(mine: Sequence[Candidate]) -> set[Candidate]:
        return {replace(c, max_in_flight=None, tolerance=None) for c in mine}

    tried = len(divisions(system, case.job, [case.tensor], stages))
    able = candidates(system, case.job, [case.tensor], stages)
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
    """What each configuration of each case came to in each of the first batches."""
    pairs = [(case, c) for case, mine in wanted.items() for c in mine]
    units = [Unit(case, c, seed) for case, c in pairs for seed in range(batches)]
    rows = runner.run(units, title)
    return {
        pair: rows[number * batches : (number + 1) * batches] for number, pair in enumerate(pairs)
    }


def ranked(mine: Sequence[Candidate], case: Case, rows: Rows) -> list[Candidate]:
    """Those that fit in every batch, the fastest first."""
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
    """Of the only one in `best`, or of none."""
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
