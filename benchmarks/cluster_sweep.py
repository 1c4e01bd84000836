"""Runs many simulations over the cores, remembers those that are done, and picks the best."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from plans import published
from tqdm import tqdm

from data.lengths import (
    Capped,
    LengthDistribution,
    Lognormal,
    Mixture,
    Uniform,
    Upsampled,
    Zipf,
    draw,
)
from distca.cost.models import MODELS
from distca.plan.span import Int64s
from distca.simulate import (
    CLUSTERS,
    WAYS,
    Ablation,
    Candidate,
    Job,
    candidates,
    divisions,
    pack_sequences,
    simulate,
)
from distca.simulate.advice import estimate

_MOST_PROMISING = 4
"""Configurations with `--distca` that are simulated in a sweep, by `estimate`."""


@dataclass(frozen=True)
class Case:
    """A job of the paper.

    Attributes:
        model: a name of `distca.cost.models.MODELS`.
        documents: "pretrain" or "prolong".
        context: the longest document, and the tokens of a sequence.
        sequences: of a global batch.
        gpus: H200s.
        tolerance: of servers' loads.
        tensor: tensor-parallel size.
        published: a folder with published lengths instead of distributions; or "".
    """

    model: str
    documents: str
    context: int
    sequences: int
    gpus: int
    tolerance: float = 0.1
    tensor: int = 8
    published: str = ""

    @property
    def job(self) -> Job:
        cluster = CLUSTERS["dgx-h200"]
        if self.published:
            cluster = replace(cluster, attention_tflops=published_tflops(Path(self.published)))
        model = MODELS[self.model]
        return Job(model, cluster, self.gpus, self.context, self.sequences, self.tolerance)

    def batch(self, seed: int) -> list[Int64s]:
        """Sequences of documents, each cut where its sequence ends."""
        total = self.sequences * self.context
        if self.published:
            name = {"pretrain": "wlbllm", "prolong": "prolong"}[self.documents]
            path = Path(self.published) / f"document_lengths_{name}.json"
            lengths = published(path, upsampled=True)(
                self.sequences * self.context, self.context, seed
            )
            return pack_sequences(lengths, self.sequences, self.context)
        distribution = paper_distribution(self.documents, self.context)
        total = self.sequences * self.context
        return pack_sequences(draw(distribution, total, seed), self.sequences, self.context)


def paper_distribution(name: str, longest: int) -> LengthDistribution:
    """What the paper calls "Pretrain" and "ProLong", up to a length.

    Pretrain is `data.lengths`'s "pretrain" with its long part up to `longest`. ProLong's mixture
    has 60% of its tokens in long documents (Gao et al., 2025, Section 4; here log-uniform from
    32,768 on); its short part is that of `data.lengths`'s "prolong".
    """
    if name == "pretrain":
        base = Mixture(Uniform(1, 6400), Zipf(1.0, 8192, longest), 0.022)
        return Upsampled(base, 10_000, 0.1)
    mean_long = (longest - 32_768) / np.log(longest / 32_768)
    mean_short = 2956.0
    share = 0.6 * mean_short / (0.6 * mean_short + 0.4 * mean_long)
    short = Lognormal(1300, 1.1, longest, 575)
    return Capped(Mixture(short, Zipf(1.0, 32_768, longest), float(share)), longest)


def published_tflops(folder: Path) -> float:
    """The highest rate of the published kernel times (64 heads of 128, causal, forward)."""
    rows = np.genfromtxt(folder / "attention_forward_h100.csv", delimiter=",", names=True)
    whole = rows[(rows["cp"] == 1) & (rows["tp"] == 1)]
    flops = 4.0 * 64 * 128 * whole["L"] * (whole["L"] + 1) / 2
    return float((flops / (whole["duration_per_doc"] * 1e-3)).max() / 1e12)


@dataclass(frozen=True)
class Unit:
    """One simulated iteration."""

    case: Case
    candidate: Candidate
    seed: int
    ablation: Ablation = "none"

    @property
    def key(self) -> str:
        return hashlib.sha1(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def run(self) -> dict[str, Any]:
        sequences = self.case.batch(self.seed)
        try:
            outcome = simulate(self.candidate, self.case.job, sequences, self.ablation)
        except ValueError as error:
            return {"key": self.key, "error": str(error)}
        sent = np.sum(list(outcome.bytes_sent.values()), axis=0)
        return {
            "key": self.key,
            "seconds": outcome.seconds,
            "tokens": outcome.tokens,
            "fits": outcome.fits,
            "memory_gb": float(outcome.memory_bytes.max()) / 1e9,
            "least_memory_gb": float(outcome.memory_bytes.min()) / 1e9,
            "idle": outcome.idle,
            "exposed": float(outcome.exposed.mean()) / outcome.seconds,
            "computed_max_over_mean": float(outcome.computed.max() / outcome.computed.mean()),
            "gb": float(sent.sum()) / 1e9,
            "gb_busiest": float(sent.max()) / 1e9,
        }


def run_unit(unit: Unit) -> dict[str, Any]:
    return unit.run()


class Runner:
    """Runs units over the cores; what a file has already is not run again."""

    def __init__(self, path: Path, processes: int | None) -> None:
        self._path = path
        self._processes = processes or len(os.sched_getaffinity(0))
        self._done: dict[str, dict[str, Any]] = {}
        if path.is_file():
            # A last line that an interrupted run left unfinished is run again.
            lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
            path.write_text("".join(f"{line}\n" for line in lines))
            self._done = {row["key"]: row for row in map(json.loads, lines)}

    def run(self, units: Sequence[Unit], title: str) -> list[dict[str, Any]]:
        """The results of all units, in their order."""
        wanted = {unit.key: unit for unit in units if unit.key not in self._done}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with (
            ProcessPoolExecutor(self._processes) as pool,
            self._path.open("a") as file,
            tqdm(total=len(wanted), desc=title, unit=" runs", disable=None) as bar,
        ):
            for future in as_completed([pool.submit(run_unit, unit) for unit in wanted.values()]):
                row = future.result()
                self._done[row["key"]] = row
                file.write(json.dumps(row) + "\n")
                file.flush()
                bar.update()
        return [self._done[unit.key] for unit in units]


@dataclass(frozen=True)
class Best:
    """The best configuration of a system for a case; None where every one is out of memory."""

    candidate: Candidate | None
    tokens_per_second: float = float("nan")
    memory_gb: float = float("nan")
    idle: float = float("nan")
    exposed: float = float("nan")
    tried: int = 0
    out_of_memory: int = 0


def best_of(
    runner: Runner,
    cases: Sequence[Case],
    system: str,
    stages: Sequence[int],
    batches: int,
    sweep_batches: int,
    finalists: int = 1,
    tolerances: Sequence[float | None] = (None,),
    like: dict[Case, list[Candidate]] | None = None,
) -> tuple[dict[Case, Best], dict[Case, list[Candidate]]]:
    """The best configuration of a system for each case, over all batches.

    All configurations (with `--distca` those that promise most) run the first batches, the fastest
    of them with each tolerance, and the fastest of these runs all batches. One that is out of
    memory in any of them is out, and the next one runs.

    Args:
        runner: runs them.
        cases: jobs.
        system: one of `distca.simulate.SYSTEMS`.
        stages: pipeline sizes.
        batches: of each case.
        sweep_batches: on which all configurations are compared.
        finalists: configurations that are tried with each tolerance.
        tolerances: see `Candidate`.
        like: configurations to compare for each case, in place of all.

    Returns:
        The best, and the finalists of each case.
    """
    short = min(sweep_batches, batches)
    every = {case: divisions(system, case.job, [case.tensor], stages) for case in cases}
    able = {case: candidates(system, case.job, [case.tensor], stages) for case in cases}
    if system in WAYS:
        # Planning takes longer than a baseline: only those that promise most are simulated.
        for case, mine in able.items():
            first = case.batch(0)
            mine.sort(key=lambda c, job=case.job, batch=first: estimate(c, job, batch))
            del mine[_MOST_PROMISING:]
    if like is not None:
        able = {case: [replace(c, system=system) for c in like[case]] for case in cases}
    swept = _run(runner, able, short, f"{system}: sweep")
    chosen = {case: _ranked(able[case], case, swept)[:finalists] for case in cases}
    tuned = {
        case: [replace(c, tolerance=tolerance) for c in mine for tolerance in tolerances]
        for case, mine in chosen.items()
    }
    rows = _run(runner, tuned, short, f"{system}: tolerance")
    left = {case: _ranked(mine, case, rows) for case, mine in tuned.items()}
    best: dict[Case, Best] = {}
    while any(case not in best for case in cases):
        next_ones = {case: left[case][:1] for case in cases if case not in best}
        rows = _run(runner, next_ones, batches, f"{system}: all batches")
        for case, mine in next_ones.items():
            failed = sum(not all(r.get("fits", False) for r in swept[case, c]) for c in able[case])
            failed += len(every[case]) - len(able[case]) if like is None else 0
            if not mine:
                best[case] = Best(None, tried=len(every[case]), out_of_memory=failed)
            elif _ranked(mine, case, rows):
                best[case] = _summary(mine[0], rows[case, mine[0]], len(every[case]), failed)
            else:
                left[case] = left[case][1:]
    return best, chosen


Rows = dict[tuple[Case, Candidate], list[dict[str, Any]]]


def _run(runner: Runner, wanted: dict[Case, list[Candidate]], batches: int, title: str) -> Rows:
    """What each configuration of each case came to in each of the first batches."""
    pairs = [(case, c) for case, mine in wanted.items() for c in mine]
    units = [Unit(case, c, seed) for case, c in pairs for seed in range(batches)]
    rows = runner.run(units, title)
    return {
        pair: rows[number * batches : (number + 1) * batches] for number, pair in enumerate(pairs)
    }


def _ranked(mine: Sequence[Candidate], case: Case, rows: Rows) -> list[Candidate]:
    """Those that fit in every batch, the fastest first."""
    able = [c for c in mine if all(r.get("fits", False) for r in rows[case, c])]
    return sorted(able, key=lambda c: sum(r["seconds"] for r in rows[case, c]))


def _summary(candidate: Candidate, rows: list[dict[str, Any]], tried: int, failed: int) -> Best:
    return Best(
        candidate,
        sum(r["tokens"] for r in rows) / sum(r["seconds"] for r in rows),
        max(r["memory_gb"] for r in rows),
        float(np.mean([r["idle"] for r in rows])),
        float(np.mean([r["exposed"] for r in rows])),
        tried,
        failed,
    )
