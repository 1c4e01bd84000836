"""Prefills over chains on real processes: CPU seconds of the busiest rank, and the first token.

    python benchmarks/serving/chain_prefill.py --output benchmarks/results/serving
    sudo python benchmarks/serving/chain_prefill.py --ranks 2 --mbit 50 200 --output DIR

A prompt is fed to a small random Llama on ranks in five ways, which take turns in the same
processes: an *even* and a *balanced* chain; *all-gather*, in which all ranks are sent all keys and
compute what is seen (KV-Runahead's TSP with causal skipping), and the same with *all products*, as
its paper has it: those with later keys are computed, too, and dropped; and the *ring*, which shards
in zigzag. The balanced chain is searched on costs fitted to the CPU seconds of the even one's
ranks.

With `--mbit`, which needs root, each process runs in a network namespace of its own, whose link has
that speed; and again with the link from the chain's first rank to the next at half of it.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.links.slow_link import ENVIRONMENT, FAST_MBIT_PER_S, Namespaces, answer, read_answer
from benchmarks.serving.planned_steps import PlannedSteps
from benchmarks.serving.ring_prefill import save_model
from distca.attention import select_kernel
from distca.attention.kernel import KernelTasks, Outputs
from distca.attention.torch_cpu import TorchCpuKernel
from distca.cost.steps import STEP_SLOTS
from distca.inference.model_runner import ModelRunner
from distca.inference.models import ServedModel, read_model
from distca.machine import cpu_name
from distca.plan.span import Floats, Int64s
from distca.runtime import Buffers, CoreAttention
from distca.schedule.serving.partitions import Chain, cut_prompt, even_shares, search_partition
from distca.transport import CollectiveTransport

CPU, BLOCK, FINEST = torch.device("cpu"), 128, 32
WAYS = ("even chain", "balanced chain", "all-gather", "all-gather, all products", "ring")
BASE = WAYS[0]


@dataclass(frozen=True)
class Job:
    """What processes of ranks run.

    Attributes:
        model: folder of the model.
        store: file by which they find each other.
        ranks: number of processes.
        tokens: tokens of the prompt.
    """

    model: str
    store: str
    ranks: int
    tokens: int


class AllProducts(TorchCpuKernel):
    """A kernel that computes products with later keys, too, and drops them.

    Of a square on the diagonal that is its other half, as large as the one that is seen; of all
    keys behind a rank's queries, as many as `later` says.

    Attributes:
        later: products of each call with a diagonal, beside those of its square.
    """

    later = 0

    def forward(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        tasks: KernelTasks,
        into: Outputs | None = None,
    ) -> Outputs:
        """See `Kernel.forward`."""
        found = super().forward(q_THD, k_THD, v_THD, tasks, into)
        if tasks.causal:
            rows = len(q_THD)
            super().forward(q_THD, k_THD[-rows:], v_THD[-rows:], _alone(tasks, rows, True))
            if self.later:
                keys = k_THD.new_zeros((self.later, *k_THD.shape[1:]))
                super().forward(q_THD, keys, keys, _alone(tasks, rows, False, self.later))
        return found


def _alone(tasks: KernelTasks, rows: int, causal: bool, keys: int | None = None) -> KernelTasks:
    """One task of that many queries and keys."""
    of_q, of_k = (torch.tensor([0, end], dtype=torch.int32) for end in (rows, keys or rows))
    return KernelTasks(of_q, of_k, causal, None, tasks.softmax_scale)


class Rank:
    """A model on this rank."""

    def __init__(self, job: Job, model: ServedModel, kernel: Any) -> None:
        group = dist.new_group(list(range(job.ranks)))
        self._transport = CollectiveTransport(group, CPU)
        buffers = Buffers(CPU, max(STEP_SLOTS, len(model.masks)))
        core = CoreAttention(self._transport, kernel, buffers)
        # The first rank of a chain may have most tokens.
        blocks = -(-job.tokens // BLOCK) + 1
        self._tokens, self._rank = job.tokens, ModelRunner(model, core, CPU, blocks, BLOCK)
        self._planner = PlannedSteps(model.masks, job.ranks, BLOCK, runner=self._rank)

    def prefill(self, strategy: Any, chain: Chain | None) -> dict[str, float]:
        """Feeds a prompt; returns seconds, CPU seconds, and the bytes sent.

        The seconds are those to the prompt's next token; 0 on ranks that do not choose it.
        """
        tokens = np.random.default_rng(0).integers(0, 1000, self._tokens).tolist()
        sent = sum(self._transport.bytes_sent.values())
        dist.barrier()
        started, cpu = time.perf_counter(), time.process_time()
        step = self._planner.plan({0: len(tokens)}, strategy, chain)
        chosen = self._rank.run(step, {0: tokens})
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - started
        self._planner.drop_all()
        sent = sum(self._transport.bytes_sent.values()) - sent
        return {"seconds": seconds if chosen else 0.0, "cpu": cpu, "sent": sent}


def work(rank: int, job: Job) -> None:
    """Runs one rank, which runs the way of each line on the standard input."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(job.store, job.ranks), rank=rank, world_size=job.ranks
    )
    model, full = read_model(job.model, torch.float32), AllProducts()
    seen, all_products = Rank(job, model, select_kernel("cpu")), Rank(job, model, full)
    answer(rank, {})
    for line in sys.stdin:
        way, parts = json.loads(line)
        strategy, chain, here = "pass-kv", None, seen
        if way.startswith("all-gather"):
            strategy = "all-gather"
        if way == WAYS[3]:
            chain, here = Chain(job.ranks, even_shares(job.ranks)), all_products
            # Parts lie on the ranks from the last one down.
            parts_of = cut_prompt(job.tokens, even_shares(job.ranks))
            full.later = int(parts_of[job.ranks - rank :].sum())
        if parts:
            chain = Chain(job.ranks, tuple(part / job.tokens for part in parts))
        everyones: list[Any] = [None] * job.ranks
        dist.all_gather_object(everyones, here.prefill(strategy, chain))
        answer(rank, {key: [each[key] for each in everyones] for key in everyones[0]})
    dist.destroy_process_group()


class Processes:
    """The processes of all ranks.

    Args:
        job: what they run.
        names: command before that of each rank.
    """

    def __init__(self, job: Job, names: Sequence[Sequence[str]], environment: dict[str, str]):
        self._job = job
        self._started = [
            subprocess.Popen(
                [*name, sys.executable, __file__, "--work", str(rank), json.dumps(asdict(job))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
                env=os.environ | environment,
            )
            for rank, name in enumerate(names)
        ]
        read_answer(self._started[0])

    def run(self, way: str, parts: Sequence[int] = ()) -> dict[str, list[float]]:
        """Runs a way; returns the figures of each rank."""
        for process in self._started:
            process.stdin.write(json.dumps([way, list(parts)]) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        return read_answer(self._started[0])

    def balanced(self, rounds: int) -> list[int]:
        """Searches the partition whose ranks take equally many CPU seconds.

        Args:
            rounds: prefills with even parts, to whose seconds costs are fitted.
        """
        tokens, ranks = self._job.tokens, self._job.ranks
        even = cut_prompt(tokens, even_shares(ranks))
        self.run(BASE, even.tolist())
        cpu = np.median([self.run(BASE, even.tolist())["cpu"] for _ in range(rounds)], axis=0)
        # The chain's first part is the last rank's.
        counts = np.stack([even, products_of(even)], axis=1)
        fitted = np.linalg.lstsq(counts, cpu[::-1], rcond=None)[0]
        per_token, per_product = np.maximum(fitted, 0)

        def busiest(parts: Int64s) -> Floats:
            found: Floats = (per_token * parts + per_product * products_of(parts)).max(axis=1)
            return found

        return search_partition(tokens, ranks, busiest, FINEST).tolist()

    def measure(self, parts: dict[str, Sequence[int]], rounds: int) -> dict[str, list[Any]]:
        """Runs all ways in turn; returns what each round of each found."""
        found: dict[str, list[Any]] = {way: [] for way in WAYS}
        for number in range(rounds + 1):
            # The first round warms up, and ways take turns at being the first.
            turn = number % len(WAYS)
            for way in (*WAYS[turn:], *WAYS[:turn]):
                ran = self.run(way, parts.get(way, ()))
                found[way] += [ran] if number else []
        return found

    def close(self) -> None:
        """Ends all processes."""
        for process in self._started:
            process.stdin.close()  # type: ignore[union-attr]
        for process in self._started:
            try:
                process.wait(60)
            finally:
                process.kill()


def products_of(parts: Int64s) -> Floats:
    """Products of rows that are seen, of each part of a chain, `[..., ranks]`."""
    before = np.cumsum(parts, axis=-1) - parts
    products: Floats = parts * before + parts * (parts + 1) / 2
    return products


def over(found: dict[str, list[Any]], way: str, base: str, what: str) -> float:
    """The most of a rank with a way, over that with another in the same round; the median."""
    rounds = zip(found[way], found[base], strict=True)
    return statistics.median(max(each[what]) / max(other[what]) for each, other in rounds)


def most(rounds: Sequence[Any], what: str) -> float:
    """The most of a rank; the median of the rounds."""
    return statistics.median(max(each[what]) for each in rounds)


def cpu_rows(processes: Processes, job: Job, rounds: int) -> list[str]:
    """The rows of CPU seconds."""
    even = cut_prompt(job.tokens, even_shares(job.ranks)).tolist()
    balanced = processes.balanced(rounds)
    found = processes.measure({WAYS[0]: even, WAYS[1]: balanced}, rounds)
    rows = []
    for way in WAYS:
        parts = f" {' '.join(f'{part / job.tokens:.3f}' for part in balanced)}"
        all_ranks = statistics.median(sum(each["cpu"]) for each in found[way])
        cells = (
            f"{most(found[way], 'cpu'):.2f}",
            f"{over(found, way, BASE, 'cpu'):.3f}",
            f"{all_ranks:.2f}",
            f"{sum(found[way][0]['sent']) / 1e6:.1f}",
        )
        name = way + (parts if way == WAYS[1] else "")
        rows.append(f"| {job.ranks} | {name} | {' | '.join(cells)} |")
    return rows


def slow_rows(processes: Processes, job: Job, rounds: int, limit: Any, mbit: float) -> list[str]:
    """The rows of seconds to the first token on links of one speed."""
    even = cut_prompt(job.tokens, even_shares(job.ranks)).tolist()
    limit(FAST_MBIT_PER_S)
    parts = {WAYS[0]: even, WAYS[1]: processes.balanced(rounds)}
    # A chain goes from the last rank down.
    slow = {(job.ranks - 1, job.ranks - 2): mbit / 2}
    found = {}
    for name, pairs in (("all", {}), ("one slow", slow)):
        limit(mbit, pairs)
        found[name] = processes.measure(parts, rounds)
    rows = []
    for way in WAYS:
        whole, hurt = (most(found[name][way], "seconds") for name in ("all", "one slow"))
        cells = (
            f"{whole:.2f}",
            f"{over(found['all'], way, BASE, 'seconds'):.3f}",
            f"{hurt:.2f}",
            f"{hurt / whole - 1:+.1%}",
        )
        rows.append(f"| {job.ranks} | {mbit:g} | {way} | {' | '.join(cells)} |")
    return rows


def page(title: str, command: str, setting: str, columns: str, rows: Sequence[str]) -> str:
    """The page of a run."""
    line = "| " + " | ".join(["---"] * columns.count(" | ")) + " | --- |"
    return "\n".join(
        [f"# {title}", "", f"    {command}", "", setting, "", f"| {columns} |", line, *rows]
    )


def run(args: argparse.Namespace, folder: str, ranks: int) -> list[str]:
    """Measures on that many ranks; returns rows of the table."""
    job = Job(folder, f"{folder}/{ranks}", ranks, args.tokens)

    def with_processes(
        names: Sequence[Sequence[str]], measured: Callable[[Processes], list[str]]
    ) -> list[str]:
        processes = Processes(job, names, ENVIRONMENT if args.mbit else {})
        try:
            return measured(processes)
        finally:
            processes.close()

    if not args.mbit:
        return with_processes([[]] * ranks, lambda each: cpu_rows(each, job, args.rounds))
    with Namespaces(ranks) as namespaces:
        names = [["ip", "netns", "exec", name] for name in namespaces.names]
        return with_processes(
            names,
            lambda each: [
                row
                for mbit in args.mbit
                for row in slow_rows(each, job, args.rounds, namespaces.limit, mbit)
            ],
        )


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(int(sys.argv[2]), Job(**json.loads(sys.argv[3])))
        return
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=float, nargs="+", help="speeds of links, in Mbit/s")
    parser.add_argument("--output", type=Path, required=True, help="folder for the table")
    args = parser.parse_args()
    if args.mbit and (os.geteuid() != 0 or min(args.mbit) <= 0):
        parser.error("--mbit needs root, for network namespaces, and speeds above 0")
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, args.layers, args.hidden_size)
        rows = [row for ranks in args.ranks for row in run(args, folder, ranks)]
    command = " ".join(["python", "benchmarks/serving/chain_prefill.py", *sys.argv[1:]])
    setting = (
        f"{args.tokens:,} tokens, {args.layers} layers of width {args.hidden_size}, fp32, a thread "
        f"each on {cpu_name()}, torch {torch.__version__}. Medians of {args.rounds} rounds; ratios "
        "are of the same round."
    )
    columns = (
        "ranks | Mbit/s | way | seconds to the first token | over the even chain "
        "| one link at half the speed, s | longer by"
        if args.mbit
        else "ranks | way | CPU s, most of a rank | over the even chain | CPU s, all ranks | MB"
    )
    text = page(
        "Chains on slow links" if args.mbit else "Chains on real processes",
        command.replace(str(args.output), "DIR"),
        setting,
        columns,
        rows,
    )
    args.output.mkdir(parents=True, exist_ok=True)
    name = "chain_slow_link.md" if args.mbit else "chain_prefill.md"
    pages.write(args.output / name, text, __file__)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
