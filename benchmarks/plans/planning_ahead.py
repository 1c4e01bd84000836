"""What planning costs the thread that launches kernels: on a thread beside it, or in a process.

    python benchmarks/plans/planning_ahead.py --output DIR

A loop of small operations stands for a rank's launches, whose cost is Python's, not the machine's.
It runs alone, beside a thread that plans global batches without a pause, and beside a process that
does (`distca.schedule.PlannerProcess`), in turn. The ratio of the wall times of beside and alone,
of one round, is what planning would cost a step whose planning never ends. Planning needs a core
of its own: with fewer than two idle ones the ratios say nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks.arguments import Parser
from distca.cost.kernel_time import AnalyticCost
from distca.cost.model_sizes import MODELS
from distca.documents.lengths import DISTRIBUTIONS, draw
from distca.machine import cpu_name
from distca.schedule import (
    Documents,
    ExecutionOptions,
    GlobalBatchPlanner,
    PlannerProcess,
    PlannerWithStats,
    ScheduleConfig,
    documents_in_turn,
)
from distca.schedule.program import Pass
from distca.whole_file import write_text

Plan = Callable[[list[Documents]], object]


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks of a stage")
    parser.add_argument("--stages", type=int, default=8, help="pipeline stages")
    parser.add_argument("--micro-batches", type=int, default=16, help="of a global batch")
    parser.add_argument("--tokens", type=int, default=65_536, help="of a rank and micro-batch")
    parser.add_argument("--distribution", choices=DISTRIBUTIONS, default="pretrain")
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--launches", type=int, default=200_000, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="folder of planning_ahead.json")
    return parser.parse_args()


def planning(args: argparse.Namespace) -> tuple[PlannerWithStats, list[Documents]]:
    """Makes the planner of a job, and the documents of one of its global batches."""
    shape = MODELS[args.model].attention_shape()
    config = ScheduleConfig(shape=shape, cost_model=AnalyticCost.of_shape(shape))
    servers = np.arange(args.stages * args.ranks, dtype=np.int64).reshape(args.stages, args.ranks)
    planner = GlobalBatchPlanner(servers, config, ExecutionOptions())
    tokens = args.tokens * args.ranks
    lengths = DISTRIBUTIONS[args.distribution]
    windows = [draw(lengths, tokens, seed) for seed in range(args.micro_batches)]
    calls: list[dict[Pass, int]] = [{"forward": 1, "backward": 1}]
    counting = PlannerWithStats(planner, {"forward": calls, "backward": calls}, "resend")
    return counting, documents_in_turn(windows)


def seconds_of_launches(launches: int) -> float:
    """Runs small operations, and returns the wall time that they took."""
    row = torch.ones(8)
    start = time.perf_counter()
    for _ in range(launches):
        row = row + 1
    return time.perf_counter() - start


@contextmanager
def planned_without_pause(plan: Plan, documents: list[Documents]) -> Iterator[None]:
    """Has a thread ask for plans all the time."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            plan(documents)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def main() -> None:
    """Runs the benchmark, and prints the ratios."""
    args = parse_args()
    torch.set_num_threads(1)
    plan, documents = planning(args)
    start = time.process_time()
    plan(documents)
    cpu_seconds = time.process_time() - start
    process = PlannerProcess(plan)
    process(documents)
    ratios: dict[str, list[float]] = {"thread": [], "process": []}
    for _ in range(args.rounds):
        for name, ask in (("thread", plan), ("process", process)):
            alone = seconds_of_launches(args.launches)
            with planned_without_pause(ask, documents):
                beside = seconds_of_launches(args.launches)
            ratios[name].append(beside / alone)
    process.close()
    result = {
        "machine": f"{cpu_name()}, Python {platform.python_version()}, torch {torch.__version__}",
        "setting": {name: value for name, value in vars(args).items() if name != "output"},
        "documents": sum(len(each.lengths) for each in documents),
        "CPU seconds of planning a global batch": cpu_seconds,
        "launches beside planning over alone": {
            name: {"median": statistics.median(each), "least": min(each), "most": max(each)}
            for name, each in ratios.items()
        },
    }
    text = json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")
    if args.output is not None:
        write_text(args.output / "planning_ahead.json", text + "\n")


if __name__ == "__main__":
    main()
