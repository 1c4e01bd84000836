"""Cases of the simulated experiments, and a runner that keeps the iterations it has simulated.

The search for a system's best configuration is `distca simulate`'s (`distca.simulate.advice`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.published_lengths import papers, published
from benchmarks.sources import digest_of_script
from distca.cost.model_sizes import MODELS
from distca.cost.training_memory import Recompute
from distca.documents.lengths import (
    Capped,
    LengthDistribution,
    Lognormal,
    Mixture,
    Uniform,
    Upsampled,
    Zipf,
    draw,
)
from distca.plan.span import Int64s
from distca.progress import progress
from distca.schedule import BufferBoundError
from distca.simulate import (
    CLUSTERS,
    UNCHARGED,
    Ablation,
    Candidate,
    Charges,
    Choice,
    Workload,
    pack_sequences,
    simulate,
)
from distca.simulate.advice import Extent, best_of
from distca.simulate.trials import Trial
from distca.whole_file import write_text

Key = TypeVar("Key")
PROGRAM = "benchmarks/cluster/sweep.py"
"""What makes batches and plans and simulates them, with all that it imports."""


@dataclass(frozen=True)
class Case:
    """An experiment of the paper: a workload and its documents.

    Attributes:
        model: a name of `distca.cost.model_sizes.MODELS`.
        documents: "pretrain" or "prolong".
        context: the longest document, and the tokens of a sequence.
        sequences: number of sequences in a global batch.
        gpus: number of H200s.
        tolerance: relative imbalance of servers' loads that schedulers may leave.
        published: folder with published lengths instead of distributions; or "".
        charges: charges on all systems.
        papers_way: draw published lengths as the paper's experiments do.
        recompute: part of each layer that runs forward again, in all systems.
        expert_parallel: GPUs that share each layer's routed experts, in all systems.
    """

    model: str
    documents: str
    context: int
    sequences: int
    gpus: int
    tolerance: float = 0.1
    published: str = ""
    charges: Charges = UNCHARGED
    papers_way: bool = False
    recompute: Recompute = "none"
    expert_parallel: int = 1

    def __str__(self) -> str:
        return f"{self.model}, {self.documents} to {self.context:,}, {self.gpus} GPUs"

    @property
    def workload(self) -> Workload:
        cluster = replace(CLUSTERS["dgx-h200"], charges=self.charges)
        if self.published:
            cluster = replace(cluster, attention_tflops=published_tflops(Path(self.published)))
        model = MODELS[self.model]
        sizes = self.gpus, self.context, self.sequences
        how = self.tolerance, self.recompute, self.expert_parallel
        return Workload(model, cluster, *sizes, *how)

    @property
    def published_lengths(self) -> Path:
        """The file of published lengths."""
        name = {"pretrain": "wlbllm", "prolong": "prolong"}[self.documents]
        return Path(self.published) / f"document_lengths_{name}.json"

    def batch(self, seed: int) -> list[Int64s]:
        """Sequences of a global batch: lengths of documents, cut where a sequence ends."""
        if self.published:
            path = self.published_lengths
            upsampled = published(path, upsampled=True)
            make = papers(path, self.documents) if self.papers_way else upsampled
            lengths = make(self.sequences * self.context, self.context, seed)
            return pack_sequences(lengths, self.sequences, self.context)
        distribution = paper_distribution(self.documents, self.context)
        total = self.sequences * self.context
        return pack_sequences(draw(distribution, total, seed), self.sequences, self.context)


def paper_distribution(name: str, longest: int) -> LengthDistribution:
    """The paper's distributions "Pretrain" and "ProLong", up to a length.

    Pretrain is the distribution "pretrain" with its long part up to `longest`. ProLong's mixture
    has 60% of its tokens in long documents (Gao et al., 2025, Section 4; here log-uniform from
    32,768 on); its short part is that of the distribution "prolong".
    """
    if name == "pretrain":
        base = Mixture(Uniform(1, 6400), Zipf(1.0, 8192, longest), 0.022)
        return Upsampled(base, 10_000, 0.1)
    mean_long = (longest - 32_768) / np.log(longest / 32_768)
    mean_short = 2956.0
    share = 0.6 * mean_short / (0.6 * mean_short + 0.4 * mean_long)
    short = Lognormal(1300, 1.1, longest, 575)
    return Capped(Mixture(short, Zipf(1.0, 32_768, longest), float(share)), longest)


@lru_cache(maxsize=4)
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
    seed: int = 0
    ablation: Ablation = "none"

    @property
    def key(self) -> str:
        """Digest of all that the result depends on, with the program and published lengths."""
        case = self.case
        lengths = digest_of(case.published_lengths) if case.published else ""
        what = [asdict(self), asdict(case.workload), digest_of_script(PROGRAM), lengths]
        return hashlib.sha1(json.dumps(what, sort_keys=True).encode()).hexdigest()

    def run(self) -> dict[str, Any]:
        workload = self.case.workload
        documents = batch(self.case, self.seed)
        try:
            outcome = simulate(self.candidate, workload, documents, self.ablation)
        except BufferBoundError:
            return {"key": self.key, **asdict(Trial.impossible(workload))}
        sent = np.sum(list(outcome.bytes_sent.values()), axis=0)
        return {
            "key": self.key,
            **asdict(Trial.of(outcome)),
            "gathering": float(outcome.gathering.mean()) / outcome.seconds,
            "computed_max_over_mean": float(outcome.computed.max() / outcome.computed.mean()),
            "gb": float(sent.sum()) / 1e9,
            "gb_busiest": float(sent.max()) / 1e9,
        }


@lru_cache(maxsize=64)
def batch(case: Case, seed: int) -> list[Int64s]:
    """`Case.batch`, cached: all configurations of a case run the same batches."""
    return case.batch(seed)


@lru_cache(maxsize=16)
def digest_of(path: Path) -> str:
    """Digest of a file's contents."""
    return hashlib.sha1(path.read_bytes()).hexdigest()


def run_unit(unit: Unit) -> dict[str, Any]:
    return unit.run()


class Runner:
    """Runs units over the cores, but for those whose results a file has already."""

    def __init__(self, path: Path, processes: int | None) -> None:
        self._path = path
        self._processes = processes or len(os.sched_getaffinity(0))
        self._done: dict[str, dict[str, Any]] = {}
        if path.is_file():
            # The unit of a last line that an interrupted run left unfinished runs again.
            lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
            write_text(path, "".join(f"{line}\n" for line in lines))
            self._done = {row["key"]: row for row in map(json.loads, lines)}

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        """Processes for all runs: Megatron's scheduler takes seconds to load in each."""
        return ProcessPoolExecutor(self._processes)

    def run(self, units: Sequence[Unit], title: str) -> list[dict[str, Any]]:
        """The results of all units, in their order."""
        wanted = {unit.key: unit for unit in units if unit.key not in self._done}
        if not wanted:
            return [self._done[unit.key] for unit in units]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with (
            self._path.open("a") as file,
            progress("paper", "runs", len(wanted), doing=title) as shown,
        ):
            submitted = [self._pool.submit(run_unit, unit) for unit in wanted.values()]
            for future in as_completed(submitted):
                row = future.result()
                self._done[row["key"]] = row
                file.write(json.dumps(row) + "\n")
                file.flush()
                shown.update()
        return [self._done[unit.key] for unit in units]

    def over_batches(
        self, units: Mapping[Key, Unit], batches: int, title: str
    ) -> dict[Key, list[dict[str, Any]]]:
        """The results of each unit's configuration in its batch and the next, by the unit's key."""
        every = [
            replace(unit, seed=unit.seed + more)
            for unit in units.values()
            for more in range(batches)
        ]
        rows = self.run(every, title)
        return {key: rows[n * batches : (n + 1) * batches] for n, key in enumerate(units)}

    def best(self, case: Case, system: str, extent: Extent, batches: int) -> Choice:
        """Finds the best configuration of a system for a case.

        Args:
            case: workload and its documents.
            system: one of `distca.simulate.SYSTEMS`.
            extent: what is tried.
            batches: number of batches.
        """
        names = [field.name for field in fields(Trial) if field.name != "parts"]

        def evaluate(
            some: Sequence[Candidate], count: int, *, parts: bool = False
        ) -> dict[Candidate, list[Trial]]:
            # Parts of the time are nothing that tables have.
            units = {candidate: Unit(case, candidate) for candidate in some}
            found = self.over_batches(units, count, f"{case}: {system}")
            return {
                candidate: [Trial(**{name: row[name] for name in names}) for row in rows]
                for candidate, rows in found.items()
            }

        documents = [batch(case, seed) for seed in range(batches)]
        return best_of(system, case.workload, documents, evaluate, extent)


def mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    """The mean of a figure over batches."""
    return float(np.mean([row[name] for row in rows]))
