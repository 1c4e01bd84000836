"""What sharing prompts would gain on clusters: trees over all ranks, beside their peers; simulated.

    python benchmarks/cluster/shared_prompts.py --output results/

Rollouts of a global batch have 32 prompts. *One by one* they are computed by the fastest system of
`distca simulate`. *Whole trees* lie on as many ranks each as are fastest, as masks for the kernel
of one context-parallel group have it. The *ideal* is the time of the trees' linear layers and core
attention if all ranks had equal shares and nothing else took time. All ways have the charges of
`distca simulate`. Writes `shared_prompts.md`.

With `--earlier` it takes the jobs of earlier runs of the same code, so that several runs may share
the jobs, and with `--only-earlier` none but these.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages, sources
from benchmarks.arguments import Parser
from distca.commands.simulate_rollouts import SYSTEMS, Row, compare, spent
from distca.cost.model_sizes import MODELS
from distca.plan.span import Int64s
from distca.progress import track
from distca.simulate import CLUSTERS, PUBLISHED, Breakdown, Workload
from distca.simulate.groups import Group, draw_groups
from distca.simulate.rollouts import layouts, least_memory, one_by_one

MODEL, CLUSTER = "llama-8b", "dgx-h200"
SIZES = (
    (4_096, 16, 2_048),
    (16_384, 16, 4_096),
    (65_536, 8, 4_096),
    (65_536, 16, 8_192),
    (32_768, 64, 4_096),
    (131_072, 16, 16_384),
    (1_024, 8, 4_096),
)
"""Tokens of a prompt, responses to it, and tokens of a response, on average. In the last one the
responses are longer than the prompt."""
GROUPS, SPREAD, TOLERANCE = 32, 0.5, 0.05
TENSOR_SIZES = (1, 2, 4, 8)


def _job(
    size: tuple[int, int, int], gpus: int
) -> tuple[list[list[Group]], Workload, list[list[Int64s]]]:
    """Returns the groups of a global batch, the job, and the sequences of rollouts one by one."""
    batches = [draw_groups(*size, GROUPS, SPREAD)]
    context, packed = one_by_one(batches, gpus)
    # What `distca simulate rollouts` charges all systems by default.
    cluster = replace(CLUSTERS[CLUSTER], charges=PUBLISHED)
    workload = Workload(MODELS[MODEL], cluster, gpus, context, len(packed[0]), TOLERANCE)
    return batches, workload, packed


def simulate(size: tuple[int, int, int], gpus: int, systems: Sequence[str]) -> list[Row]:
    """Simulates a global batch in all ways."""
    batches, workload, packed = _job(size, gpus)
    rows, _ = compare(batches, workload, packed, TENSOR_SIZES, systems)
    return rows


def line(size: tuple[int, int, int], gpus: int, rows: Sequence[Row]) -> list[str]:
    """Formats a row of the page."""
    prompt, responses, response = size
    ours = [row for row in rows if row.title.startswith("trees over all")]
    whole = [row for row in rows if row.title.startswith("each tree")]
    apart = [row for row in rows if row.title.startswith("one by one")]
    found = [f"{prompt // 1024}K x {responses} x {response // 1024}K", str(gpus)]
    if not ours:
        return [*found, *_without_room(size, gpus, rows)]
    (row,) = ours
    seconds, parts = row.seconds[0], row.parts
    assert parts is not None
    peer = "none fits"
    if apart:
        name = apart[0].title.partition(": ")[2]
        peer = f"{apart[0].seconds[0] / seconds:.2f} ({name})"
    return [
        *found,
        f"{seconds:.2f} ({row.configuration})",
        peer,
        f"{whole[0].seconds[0] / seconds:.2f} ({whole[0].configuration})" if whole else "none fits",
        f"{(parts.linear + parts.attention) / seconds:.2f}",
        spent(parts),
    ]


def _without_room(size: tuple[int, int, int], gpus: int, rows: Sequence[Row]) -> list[str]:
    """Formats what the page has where no layout of trees over all ranks fits in memory."""
    _, workload, _ = _job(size, gpus)
    needed = least_gb(size, gpus)
    apart = [row for row in rows if row.title.startswith("one by one")]
    peer = "none fits"
    if apart:
        name = apart[0].title.partition(": ")[2]
        peer = f"none; they take {apart[0].seconds[0]:.2f} s ({name})"
    reason = (
        f"none fits: the micro-batch of the largest tree needs at least {needed:.0f} GB of a GPU, "
        f"which has {workload.cluster.usable_bytes / 1e9:.0f}"
    )
    return [reason, peer, "none fits", "", ""]


def least_gb(size: tuple[int, int, int], gpus: int) -> float:
    """Returns the memory that trees over all ranks need at least in their smallest layout."""
    batches, workload, _ = _job(size, gpus)
    tried = layouts(GROUPS, workload, TENSOR_SIZES)
    return min(least_memory(batches[0], workload, each) for each in tried) / 1e9


@dataclass(frozen=True)
class Job:
    """A simulated job.

    Attributes:
        size: tokens of a prompt, responses to it, and tokens of a response.
        gpus: number of GPUs.
        rows: what `compare` returns.
        run: date and commit of the run that simulated it.
    """

    size: tuple[int, int, int]
    gpus: int
    rows: list[Row]
    run: str


def page(found: Sequence[Job], command: str) -> str:
    """Formats the page."""
    runs = Counter(job.run for job in found)
    said = ", ".join(f"{count} on {run}" for run, count in runs.items())
    head = (
        *("prompt x responses x response", "GPUs", "seconds of trees over all ranks"),
        *("one by one, the fastest peer, over it", "whole trees on some ranks over it"),
        *("ideal over it", "what its time is spent on"),
    )
    return (
        "# Rollouts that share prompts on clusters\n\n"
        f"`{command}`: simulated iterations of {MODEL} on {CLUSTER}, one global batch of {GROUPS} "
        f"prompts, log-normal lengths (spread {SPREAD}). Figures over 1 say how many times as long "
        "other ways take. Nothing was measured. All ways have the charges of `distca simulate`. "
        "Trees have no pipelines. With *inputs kept*, servers keep the kernels' inputs for the "
        "backward pass.\n\n"
        + pages.table(head, [line(job.size, job.gpus, job.rows) for job in found])
        + f"\n\nJobs by the run that simulated them: {said}. The line below dates this table."
    )


def earlier(folders: Sequence[Path]) -> dict[tuple[tuple[int, int, int], int], Job]:
    """Reads the jobs that earlier runs have simulated; the last one counts."""
    found = {}
    for folder in folders:
        text = (folder / "shared_prompts.md").read_text()
        made = sources.run_of(text)
        if "--only-earlier" in text:
            made = f"{made} or before"
        for job in json.loads((folder / "shared_prompts.json").read_text()):
            prompt, responses, response = job["size"]
            rows = [
                Row(**{**row, "parts": row["parts"] and Breakdown(**row["parts"])})
                for row in job["rows"]
            ]
            size = prompt, responses, response
            found[size, job["gpus"]] = Job(size, job["gpus"], rows, job.get("run", made))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Simulates, and writes the page."""
    parser = Parser(__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 256], metavar="N")
    numbers = range(1, len(SIZES) + 1)
    parser.add_argument("--sizes", type=int, nargs="+", choices=numbers, default=[*numbers])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--processes", type=int, default=1, metavar="N")
    parser.add_argument("--earlier", type=Path, nargs="+", default=[], metavar="DIR")
    parser.add_argument("--only-earlier", action="store_true")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(argv)
    # Small clusters first, whose simulations are short.
    jobs = [(SIZES[number - 1], gpus) for gpus in args.gpus for number in args.sizes]
    simulated = earlier(args.earlier)
    if args.only_earlier:
        jobs = [job for job in jobs if job in simulated]
    left = [job for job in jobs if job not in simulated]
    with ProcessPoolExecutor(args.processes, get_context("fork")) as pool:
        under_way = [pool.submit(simulate, *job, args.systems) for job in left]
        done = [each.result() for each in track(under_way, "shared_prompts.py", "jobs")]
    run = sources.run_of(sources.provenance())
    for job, rows in zip(left, done, strict=True):
        simulated[job] = Job(*job, rows, run)
    found = [simulated[job] for job in jobs]
    figures = [asdict(job) for job in found]
    text = page(found, pages.typed("benchmarks/cluster/shared_prompts.py"))
    pages.save(args.output, "shared_prompts", text, __file__, figures)


if __name__ == "__main__":
    main()
