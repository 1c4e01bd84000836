"""Prefills from near to far over a slow link: micro-partitions and drops, beside the simulator.

    sudo python benchmarks/serving/sparse_prefill.py --mbit 40 --output benchmarks/results/serving

A prompt is fed to a small random Llama on two ranks, each in a network namespace of its own, whose
link has that speed. Keys travel as `--prefill-strategy csps` has them, in so many micro-partitions,
and with `--sparsity` as the table says; *pass-kv* is the dense ring in zigzag. All ways take turns
in the same processes, on free links and on slow ones. The link's seconds are the bytes of the rank
that sends most over its speed; the simulator is told the link's speed, and one rate of compute, by
which its dense prefill takes as long on free links as the measured one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks.links.slow_link import ENVIRONMENT, FAST_MBIT_PER_S, Namespaces, answer, read_answer
from benchmarks.serving.chain_prefill import page
from benchmarks.serving.ring_prefill import save_model
from distca.attention import select_kernel
from distca.cost.link import Links
from distca.cost.step_memory import STEP_SLOTS
from distca.plan import Mask, Plan
from distca.runtime import Buffers, CoreAttention
from distca.runtime.kernel_timing import cpu_name
from distca.schedule.serving import nobody_holds, shard_evenly
from distca.schedule.serving.blocks import BlockPool
from distca.schedule.serving.csps import Levels, Sparsity
from distca.schedule.serving.csps.pipeline import NearToFar, shard_near
from distca.schedule.serving.layer_plans import plan_layers
from distca.serve.models import ServedModel, model_size, read_model
from distca.serve.selection import CPUS
from distca.serve.step_planner import StepPlanner
from distca.serve.steps import ModelRank
from distca.simulate import Cluster
from distca.simulate.serving import InferenceCosts, simulate_step
from distca.transport import CollectiveTransport

CPU, BLOCK, RANKS = torch.device("cpu"), 128, 2


@dataclass(frozen=True)
class Way:
    """A way to prefill.

    Attributes:
        partitions: micro-partitions; 0: pass-kv.
        drop: share of the other rank's keys that is dropped.
    """

    partitions: int
    drop: float = 0.0

    @property
    def name(self) -> str:
        if not self.partitions:
            return "pass-kv"
        parts = f"{self.partitions} partition" + "s" * (self.partitions > 1)
        return f"{parts}, " + (f"p = {self.drop:g}" if self.drop else "dense")

    def planned(self, model: ServedModel) -> tuple[Any, Any]:
        """What travels, and who owns new tokens."""
        if not self.partitions:
            return "pass-kv", partial(shard_evenly, world_size=RANKS)
        sizes = len(model.windows), model.shape.kv_heads
        sparsity = Sparsity.of_drop_ratio(self.drop, *sizes)
        levels = Levels(Links(RANKS), RANKS)
        strategy = NearToFar(levels, sparsity, model.windows, (self.partitions,))
        return strategy, partial(shard_near, ranks=RANKS)

    def plans(self, model: ServedModel, tokens: int) -> list[Plan]:
        """The plan of each layer."""
        strategy, sharding = self.planned(model)
        new = sharding(np.zeros(1, dtype=np.int64), np.array([tokens]))
        found = plan_layers(lambda _: nobody_holds(RANKS), new, model.masks, strategy)
        return [found.of(layer, Mask(window)) for layer, window in enumerate(model.windows)]


WAYS = (Way(0), *(Way(n) for n in (1, 4, 32)), Way(4, 0.5), Way(4, 0.8))
BASE = Way(1)


@dataclass(frozen=True)
class Job:
    """What processes of ranks run: a model's folder, a file to meet by, tokens of the prompt."""

    model: str
    store: str
    tokens: int


def work(rank: int, job: Job) -> None:
    """Runs one rank, which runs the way of each line on the standard input."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(job.store, RANKS), rank=rank, world_size=RANKS
    )
    model = read_model(job.model, torch.float32)
    transport = CollectiveTransport(dist.new_group(list(range(RANKS))), CPU)
    buffers = Buffers(CPU, max(STEP_SLOTS, len(model.masks)))
    core = CoreAttention(transport, select_kernel("cpu"), buffers)
    blocks = -(-job.tokens // BLOCK) + 1
    mine = ModelRank(model, core, CPU, blocks, BLOCK)
    planner = StepPlanner(BlockPool(RANKS, blocks, BLOCK), model.masks, 16)
    tokens = np.random.default_rng(0).integers(0, 1000, job.tokens).tolist()
    answer(rank, {})
    for line in sys.stdin:
        strategy, sharding = Way(*json.loads(line)).planned(model)
        sent = sum(transport.bytes_sent.values())
        dist.barrier()
        started = time.perf_counter()
        step = planner.plan({0: len(tokens)}, strategy, decodes=False, sharding=sharding)
        chosen = mine.run(step, {0: tokens})
        seconds = time.perf_counter() - started
        planner.drop(0)
        mine.drop(0)
        sent = sum(transport.bytes_sent.values()) - sent
        everyones: list[Any] = [None] * RANKS
        dist.all_gather_object(everyones, (seconds if chosen else 0.0, sent))
        times, nbytes = zip(*everyones, strict=True)
        answer(rank, {"seconds": max(times), "sent": max(nbytes)})
    dist.destroy_process_group()


class Processes:
    """The processes of both ranks, each in a namespace."""

    def __init__(self, job: Job, names: list[str]) -> None:
        enter, told = ["ip", "netns", "exec"], json.dumps(asdict(job))
        self._started = [
            subprocess.Popen(
                [
                    *enter,
                    name,
                    sys.executable,
                    __file__,
                    "--work",
                    str(rank),
                    told,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
                env=os.environ | ENVIRONMENT,
            )
            for rank, name in enumerate(names)
        ]
        read_answer(self._started[0])

    def run(self, way: Way) -> dict[str, float]:
        """Runs a way; returns its figures."""
        for process in self._started:
            process.stdin.write(json.dumps([way.partitions, way.drop]) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        return read_answer(self._started[0])

    def measure(self, rounds: int) -> dict[Way, tuple[float, float]]:
        """Runs all ways in turn; returns the median seconds of each, and its bytes."""
        found: dict[Way, list[dict[str, float]]] = {way: [] for way in WAYS}
        for number in range(rounds + 1):
            turn = number % len(WAYS)
            for way in (*WAYS[turn:], *WAYS[:turn]):
                ran = self.run(way)
                # The first round warms up.
                found[way] += [ran] if number else []
        return {
            way: (statistics.median(each["seconds"] for each in ran), ran[0]["sent"])
            for way, ran in found.items()
        }

    def close(self) -> None:
        """Ends both."""
        for process in self._started:
            process.stdin.close()  # type: ignore[union-attr]
        for process in self._started:
            try:
                process.wait(60)
            finally:
                process.kill()


def simulated(
    model: ServedModel, tokens: int, way: Way, gb_per_s: float, factor: float = 1.0
) -> float:
    """Simulated seconds of a way, with compute at so many times the usual rate."""
    machine: Cluster = replace(
        CPUS,
        gpus_per_node=RANKS,
        node_gb_per_s=gb_per_s,
        peak_tflops=CPUS.peak_tflops * factor,
        attention_tflops=CPUS.attention_tflops * factor,
    )
    costs = InferenceCosts(model_size(model), machine, 1, model.dtype.itemsize)
    return simulate_step(way.plans(model, tokens), costs).seconds


def rate(model: ServedModel, tokens: int, seconds: float) -> float:
    """The rate of compute at which the simulated dense prefill takes so long on free links."""
    low, high = 1e-3, 1e3
    while high > low * 1.001:
        middle = (low * high) ** 0.5
        slower = simulated(model, tokens, BASE, 1e3, middle) > seconds
        low, high = (middle, high) if slower else (low, middle)
    return low


def rows_of(processes: Processes, limit: Any, job: Job, mbit: float, rounds: int) -> list[str]:
    """The rows of one speed."""
    model = read_model(job.model, torch.float32)
    limit(FAST_MBIT_PER_S)
    free = processes.measure(rounds)
    limit(mbit)
    slow = processes.measure(rounds)
    factor, rows = rate(model, job.tokens, free[BASE][0]), []
    for way in WAYS:
        on_link = slow[way][1] * 8e-6 / mbit
        compute, seconds = free[way][0], slow[way][0]
        cells = (
            f"{slow[way][1] / 1e6:.2f}",
            *(f"{each:.2f}" for each in (compute, on_link, max(compute, on_link))),
            f"{seconds:.2f}",
            f"{compute + on_link:.2f}",
            f"{simulated(model, job.tokens, way, mbit / 8e3, factor):.2f}",
        )
        rows.append(f"| {mbit:g} | {way.name} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(int(sys.argv[2]), Job(**json.loads(sys.argv[3])))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=float, nargs="+", default=[40.0], help="speeds of links")
    parser.add_argument("--output", type=Path, required=True, help="folder for the table")
    args = parser.parse_args()
    if os.geteuid() != 0 or min(args.mbit) <= 0:
        parser.error("network namespaces need root, and links speeds above 0")
    with tempfile.TemporaryDirectory() as folder, Namespaces(RANKS) as namespaces:
        save_model(folder, args.layers, args.hidden_size)
        job = Job(folder, f"{folder}/store", args.tokens)
        processes = Processes(job, namespaces.names)
        try:
            rows = [
                row
                for mbit in args.mbit
                for row in rows_of(processes, namespaces.limit, job, mbit, args.rounds)
            ]
        finally:
            processes.close()
    command = " ".join(["python", "benchmarks/serving/sparse_prefill.py", *sys.argv[1:]])
    setting = (
        f"{args.tokens:,} tokens, {args.layers} layers of width {args.hidden_size} (the first and "
        f"the last drop nothing), fp32, {RANKS} ranks, a thread each on {cpu_name()}, torch "
        f"{torch.__version__}. Medians of {args.rounds} rounds, on {os.cpu_count()} cores with a "
        f"load of {os.getloadavg()[1]:.0f} meanwhile."
    )
    columns = (
        "Mbit/s | way | MB, rank that sends most | s, free links (compute) | s, link | larger "
        "of both | s to the first token | sum of both | simulated s"
    )
    title = "Prefills from near to far on a slow link"
    text = page(title, command.replace(str(args.output), "DIR"), setting, columns, rows)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "sparse_slow_link.md").write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
