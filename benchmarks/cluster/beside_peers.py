"""Is DistCA ever slower than a peer? Simulated jobs, each system in its best configuration.

    python benchmarks/cluster/beside_peers.py --output DIR
    python benchmarks/cluster/beside_peers.py --drawn 60 --output DIR

The first runs named jobs, the second jobs that are drawn from all models, clusters and sizes. Each
job is one run of `distca simulate`. A ratio is the mean over its batches, with the 95% confidence
interval of the mean over many batches. Jobs that ran are kept in the page's JSON file, and do not
run again with `--append`.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.sources import ROOT
from distca.commands.simulate_report import PARTS
from distca.commands.verdict import TITLES
from distca.cost.model_sizes import MODELS
from distca.progress import progress
from distca.simulate import DISTCA_SYSTEMS, Candidate
from distca.simulate.dynamic import DYNAMIC
from distca.whole_file import write_text

OURS = "tiles"
_AS_FAST = 1 - 1e-6
"""Ratio from which on DistCA counts as equally fast: sums are rounded."""
_LITTLE, _A_SHARE = 1.01, 0.0005
"""Ratio below which the page says what DistCA takes more time for than the peer, and the least
share of an iteration that it says."""
EQUAL = "fixed"
"""Distribution of documents that are all as long: nothing is to be balanced."""


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        model: a name of `MODELS`.
        documents: a name of `distca.documents.lengths.DISTRIBUTIONS`.
        context: tokens of a sequence, and of the longest document.
        sequences: sequences of a global batch.
        gpus: number of GPUs.
        cluster: a name of `distca.simulate.CLUSTERS`.
        more: further flags of `distca simulate`.
    """

    model: str
    documents: str
    context: int
    sequences: int
    gpus: int
    cluster: str = "dgx-h200"
    more: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        """Flags of `distca simulate`."""
        return [
            *("--model", self.model, "--distribution", self.documents),
            *("--context", str(self.context), "--sequences", str(self.sequences)),
            *("--cluster", self.cluster, "--gpus", str(self.gpus), *self.more),
        ]


def _named() -> Iterator[Job]:
    for model, context, sequences, gpus, documents in (
        ("llama-8b", 64, 64, 64, "pretrain"),
        ("llama-8b", 128, 64, 64, "pretrain"),
        ("llama-8b", 128, 32, 64, "prolong"),
        ("llama-8b", 256, 32, 64, "pretrain"),
        ("llama-8b", 256, 32, 64, "prolong"),
        ("llama-8b", 512, 16, 64, "pretrain"),
        ("llama-8b", 512, 32, 256, "prolong"),
        ("llama-34b", 64, 64, 64, "prolong"),
        ("llama-34b", 128, 32, 128, "pretrain"),
        ("llama-34b", 128, 32, 128, "prolong"),
        ("llama-34b", 256, 32, 128, "pretrain"),
        ("llama-34b", 512, 16, 256, "pretrain"),
        ("llama-70b", 128, 32, 128, "prolong"),
        ("llama-70b", 256, 32, 64, "pretrain"),
        ("llama-70b", 256, 32, 128, "pretrain"),
        ("llama-70b", 256, 32, 256, "prolong"),
    ):
        yield Job(model, documents, context * 1024, sequences, gpus)
    k = 1024
    experts = "--expert-model-parallel-size"
    yield Job("qwen3-30b-a3b", "pretrain", 128 * k, 32, 64, more=(experts, "8"))
    yield Job("deepseek-v3-like", "pretrain", 64 * k, 128, 512, more=(experts, "64"))
    yield Job("gemma3-27b-like", "pretrain", 128 * k, 32, 64)
    yield Job("llama-8b", "prolong", 1024 * k, 1, 64)
    stages = "--pipeline-model-parallel-sizes"
    yield Job("llama-70b", "pretrain", 128 * k, 64, 128, more=(stages, "4"))
    yield Job("llama-70b", "pretrain", 256 * k, 64, 128)
    yield Job("llama-8b", "pretrain", 128 * k, 32, 32, "dgx-h100")
    yield Job("llama-34b", "pretrain", 64 * k, 64, 64, "dgx-a100")
    yield Job("qwen3-8b", "pretrain", 64 * k, 16, 8)
    yield Job("llama-8b", EQUAL, 8 * k, 64, 32)


NAMED = tuple(_named())
"""Jobs of one study of simulated jobs, and others: with experts, latents, windows, a million
tokens, four stages, other GPUs, one node, and equal documents."""


def drawn(number: int, seed: int) -> list[Job]:
    """Draws jobs from all models and clusters.

    Contexts are 32K to 1M, GPUs 8 to 1,024, and a global batch has 0.5M tokens or more and one
    sequence for every 2 to 16 GPUs, as far as that goes.

    Args:
        number: number of jobs.
        seed: another seed draws others.
    """
    generator = np.random.default_rng(seed)
    documents = ("pretrain", "prolong", "lognormal", "zipf", EQUAL)
    jobs: list[Job] = []
    while len(jobs) < number:
        model = str(generator.choice(list(MODELS)))
        gpus = 2 ** int(generator.integers(3, 11))
        context = 1024 * 2 ** int(generator.integers(5, 11))
        cluster = str(generator.choice(["dgx-h200", "dgx-h100", "dgx-a100", "dgx-b200"]))
        recompute = str(generator.choice(["none", "none", "mlp", "full"]))
        sequences = max(gpus // 2 ** int(generator.integers(1, 5)), 2**19 // context, 1)
        more: tuple[str, ...] = () if recompute == "none" else ("--recompute", recompute)
        if (experts := MODELS[model].experts) is not None:
            more += ("--expert-model-parallel-size", str(math.gcd(gpus, experts.number, 64)))
        kind = str(generator.choice(documents))
        job = Job(model, kind, context, sequences, gpus, cluster, more)
        if sequences * context <= 2**27 and job not in jobs:
            jobs.append(job)
    return jobs


def run(job: Job) -> dict[str, Any]:
    """Runs `distca simulate`; returns what it found.

    Returns:
        `ratio`, `low` and `high` of DistCA's speed over the fastest peer's; `dynamic`, the mean of
        its speed over that of dynamic context parallelism, which is no such peer; `peer` and both
        `configurations`; `fits`, whether DistCA and whether any peer fits in memory; `more`, the
        two parts of an iteration for which DistCA takes most more time than the fastest other, with
        the difference as a share of that one's iteration. NaN and empty where one does not.

    Raises:
        CalledProcessError: the command failed.
    """
    command = [
        sys.executable,
        "-m",
        "distca",
        "simulate",
        *job.flags,
        "--whole-iterations",
        "--json",
    ]
    found = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    rows = {row["system"]: row for row in json.loads(found.stdout)["systems"]}
    ours = rows[OURS]
    dynamic = rows[DYNAMIC]["distca_over_it"] if ours["candidate"] else None
    others = (*DISTCA_SYSTEMS, DYNAMIC)
    peers = [row for name, row in rows.items() if name not in others and row["candidate"]]
    peer = min(peers, key=lambda row: float(row["seconds"]), default=None)
    # The fastest of all others, whose parts the command has.
    beside = next((row for row in rows.values() if row != ours and row["seconds_by_part"]), None)
    over = peer["distca_over_it"] if peer is not None and ours["candidate"] else None
    return {
        "ratio": over["mean"] if over else math.nan,
        "low": over["low"] if over else math.nan,
        "high": over["high"] if over else math.nan,
        "dynamic": dynamic["mean"] if dynamic else math.nan,
        "batches": len(ours["seconds_of_batches"]),
        "peer": "" if peer is None else TITLES[peer["system"]],
        "configurations": [
            "" if row is None or not row["candidate"] else _sizes(row) for row in (ours, peer)
        ],
        "fits": [bool(ours["candidate"]), peer is not None],
        "more": _more(ours, beside) if over and beside is not None else {},
    }


def _more(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> dict[str, float]:
    """Returns the parts for which DistCA takes most more time, as shares of the peer's iteration,
    falling."""
    mine, theirs = ours["seconds_by_part"], peer["seconds_by_part"]
    more = {part: (mine[part] - theirs[part]) / sum(theirs.values()) for part in PARTS}
    return {part: more[part] for part in sorted(more, key=lambda each: -more[each])[:2]}


def _terms(each: Mapping[str, Any]) -> str:
    """Says what DistCA takes more time for, where it gains little."""
    if not each["ratio"] < _LITTLE:
        return ""
    return "; ".join(
        f"{PARTS[part]} +{share:.1%}" for part, share in each["more"].items() if share >= _A_SHARE
    )


def _sizes(row: Mapping[str, Any]) -> str:
    """Returns a configuration in words."""
    return str(Candidate(**row["candidate"]))


def page(jobs: Sequence[Job], found: Mapping[str, Mapping[str, Any]], command: str) -> str:
    """Returns the page of the jobs that ran."""
    ran = [(job, found[str(job)]) for job in jobs if str(job) in found]
    both = [each for _, each in ran if all(each["fits"])]
    ratios = np.array([each["ratio"] for each in both])
    behind = [each for each in both if each["ratio"] < _AS_FAST]
    alone = sum(each["fits"] == [True, False] for _, each in ran)
    neither = sum(not any(each["fits"]) for _, each in ran)
    lacking = sum(each["fits"] == [False, True] for _, each in ran)
    lines = [
        "# DistCA beside the fastest peer of each job",
        "",
        f"    {command}",
        "",
        "Simulated, not measured. Peers are plain Megatron, its four kinds of context parallelism, "
        "hybrid context parallelism and ideal WLB-LLM, which Megatron does not have. Each system "
        "has its best configuration that fits in memory. A ratio is DistCA's speed over the "
        "fastest peer's: the mean over the batches, and its 95% confidence interval. Where it is "
        f"below {_LITTLE}, the last column has up to two parts of an iteration for which DistCA "
        "takes more time, as shares of the peer's iteration (first batch). Megatron's dynamic "
        "context parallelism, which no release has, has a column of its own: empty where it was "
        "not run or does not fit. Where it is the fastest, the last column is beside it.",
        "",
        f"{len(ran)} jobs. In {len(both)} both fit in memory; DistCA alone fits in {alone}, a peer "
        f"alone in {lacking}, and neither in {neither}.",
    ]
    if len(both):
        mean = math.exp(float(np.log(ratios).mean()))
        lines += [
            f"The geometric mean is {mean:.3f}, the least {ratios.min():.3f}, the greatest "
            f"{ratios.max():.3f}. DistCA is slower than the fastest peer in {len(behind)} of "
            f"{len(both)}.",
        ]
    head = ["model", "documents", "context", "sequences", "GPUs", "cluster", "flags"]
    head += ["ratio", "batches", "fastest peer", "its configuration", "DistCA's"]
    head += ["over dynamic CP"]
    head += ["DistCA takes more for"]
    rows = []
    for job, each in sorted(ran, key=lambda pair: _order(pair[1])):
        ratio = f"{each['ratio']:.3f} ({each['low']:.3f} to {each['high']:.3f})"
        if not all(each["fits"]):
            ratio = {(True, False): "DistCA alone fits", (False, True): "a peer alone fits"}.get(
                tuple(each["fits"]), "nothing fits"
            )
        ours, theirs = each["configurations"]
        dynamic = each.get("dynamic", math.nan)
        rows.append(
            [
                *(job.model, job.documents, f"{job.context // 1024}K", job.sequences, job.gpus),
                *(job.cluster, " ".join(job.more), ratio, each["batches"], each["peer"]),
                *(theirs, ours, "" if math.isnan(dynamic) else f"{dynamic:.3f}", _terms(each)),
            ]
        )
    return "\n".join([*lines, "", pages.table(head, rows)])


def _order(each: Mapping[str, Any]) -> tuple[bool, float]:
    """Puts those behind first, and those without a ratio last."""
    return math.isnan(each["ratio"]), each["ratio"]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the jobs and writes the page."""
    parser = Parser(__doc__)
    parser.add_argument("--drawn", type=int, metavar="N", help="draw N jobs instead of named ones")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other jobs")
    parser.add_argument("--append", action="store_true", help="keep jobs that ran before")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(argv)
    jobs = list(NAMED) if args.drawn is None else drawn(args.drawn, args.seed)
    name = "beside_peers" if args.drawn is None else "drawn_jobs"
    file = args.output / f"{name}.json"
    found: dict[str, Any] = {}
    if args.append and file.is_file():
        found = json.loads(file.read_text())
    with progress("beside_peers", "jobs", len(jobs)) as bar:
        for job in jobs:
            if str(job) not in found:
                found[str(job)] = run(job)
                write_text(file, json.dumps(found, indent=1) + "\n")
            bar.update()
    command = pages.typed("benchmarks/cluster/beside_peers.py")
    pages.save(args.output, name, page(jobs, found, command), __file__, found)


if __name__ == "__main__":
    main()
