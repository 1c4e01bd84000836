"""Prefills over a slow link: near to far with and without drops, pass-KV, SP-NTP and SP-TP.

    sudo python benchmarks/serving/sparse_prefill.py --mbit 40 --output benchmarks/results/serving

A prompt is fed to a small random Llama on ranks that each are in a network namespace of their own,
whose link has that speed. Keys travel from near to far as `--prefill-strategy csps` has them, in
the given number of micro-partitions, and with `--sparsity` as the table says; *pass-kv* is the
dense ring in zigzag, *sp-ntp* scatters heads, and *sp-tp* shares rows between blocks whose weights
ranks split. All ways take turns in the same processes, on free links and on slow ones. The link's
seconds are the bytes of the rank that sends most over its speed; the simulator gets the link's
speed, and one rate of compute, by which pass-KV takes as long on free links as was measured.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.links.slow_link import ENVIRONMENT, FAST_MBIT_PER_S, Namespaces, answer, read_answer
from benchmarks.serving import layouts
from benchmarks.serving.chain_prefill import page
from benchmarks.serving.ring_prefill import save_model
from distca.cost.link import Links
from distca.inference.machine import CPUS
from distca.inference.models import ServedModel, model_size, read_model
from distca.machine import cpu_name
from distca.plan import Mask
from distca.schedule.serving import nobody_holds, shard_evenly, step_plan
from distca.schedule.serving.batches import PrefillStrategy, plan_layers
from distca.schedule.serving.csps import Levels, NodeParts, Sparsity
from distca.schedule.serving.csps.head_scatter import head_groups
from distca.schedule.serving.csps.pipeline import NearToFar
from distca.simulate import Cluster
from distca.simulate.serving import (
    InferenceCosts,
    described_split,
    simulate_shared,
    simulate_step,
)

Name = Literal["pass-kv", "sp-ntp", "sp-tp", "csps"]


@dataclass(frozen=True)
class Way:
    """A way to prefill.

    Attributes:
        name: strategy.
        partitions: micro-partitions with csps.
        drop: share of the other ranks' keys that csps drops.
        node_parts: parts of the ranks with csps.
    """

    name: Name
    partitions: int = 1
    drop: float = 0.0
    node_parts: NodeParts = "zigzag"

    @property
    def title(self) -> str:
        if self.name != "csps":
            return self.name
        parts = f"csps, {self.partitions} partition" + "s" * (self.partitions > 1)
        dropped = f"p = {self.drop:g}" if self.drop else "dense"
        return f"{parts}, {dropped}" + ", contiguous" * (self.node_parts == "contiguous")

    def planned(self, model: ServedModel, ranks: int) -> tuple[PrefillStrategy, Levels | None]:
        """What travels, and who shares out the new tokens; None: all evenly."""
        if self.name == "sp-tp":
            return "pass-kv", None
        if self.name != "csps":
            return self.name, None
        sparsity = Sparsity.of_drop_ratio(self.drop, len(model.windows), model.shape.kv_heads)
        levels = Levels(Links(ranks), ranks, self.node_parts)
        return NearToFar(levels, sparsity, model.windows, (self.partitions,)), levels

    def simulated(self, model: ServedModel, job: layouts.Job, machine: Cluster) -> float:
        """Simulated seconds to the first token."""
        size = job.ranks if self.name == "sp-tp" else 1
        costs = InferenceCosts(model_size(model), machine, size, model.dtype.itemsize)
        strategy, levels = self.planned(model, job.ranks)
        tokens = np.zeros(1, dtype=np.int64), np.array([job.tokens])
        # Of sp-tp one rank has them all.
        ranks = 1 if self.name == "sp-tp" else job.ranks
        new = shard_evenly(*tokens, ranks) if levels is None else levels.shard(*tokens)
        held, shape = nobody_holds(new.world_size), costs.shape
        if isinstance(strategy, NearToFar):
            found = plan_layers(held, new, model.masks, strategy)
            plans = [found.of(layer, Mask(window)) for layer, window in enumerate(model.windows)]
            return simulate_step(plans, costs).seconds
        assert isinstance(strategy, str), "no way lets others choose"
        groups = head_groups(shape.heads, shape.kv_heads, new.world_size)
        plan = step_plan(held, new, strategy, Mask(), in_steps=True, head_groups=groups)
        plans = [plan] * len(model.windows)
        if self.name != "sp-tp":
            return simulate_step(plans, costs).seconds
        split = described_split(costs, "sp-tp")
        shared = split.share(job.tokens)
        assert shared is not None, "there are tokens for every rank"
        return simulate_shared(split, shared, plans, costs).seconds


STRATEGIES_PAGE = "../../../docs/inference_strategies.md"
BASE = Way("pass-kv")
WAYS = (
    BASE,
    Way("sp-ntp"),
    Way("sp-tp"),
    *(Way("csps", parts) for parts in (1, 4, 32)),
    Way("csps", 4, node_parts="contiguous"),
    Way("csps", 4, 0.5),
    Way("csps", 4, 0.8),
)


def work(rank: int, job: layouts.Job) -> None:
    """Runs one rank, which runs the way of each line on the standard input."""
    torch.set_num_threads(1)
    layouts.join(rank, job)
    whole, split = layouts.Rank(job, split=False), layouts.Rank(job, split=True)
    model = read_model(job.folder, torch.float32)
    answer(rank, {})
    for line in sys.stdin:
        way = Way(*json.loads(line))
        strategy, levels = way.planned(model, job.ranks)
        if way.name == "sp-tp":
            ran = split.prefill(strategy, "sp-tp")
        else:
            ran = whole.prefill(strategy, None, levels)
        everyones: list[Any] = [None] * job.ranks
        dist.all_gather_object(everyones, ran)
        sent = [each["sent"] for each in everyones]
        assert sum(sent) == ran["planned"], f"{way.title}: {sum(sent)} bytes, planned otherwise"
        seconds = max(each["first_token"] for each in everyones)
        answer(rank, {"seconds": seconds, "sent": max(sent)})
    dist.destroy_process_group()


class Processes:
    """The processes of all ranks, each in a namespace."""

    def __init__(self, job: layouts.Job, names: list[str]) -> None:
        told = json.dumps(asdict(job))
        self._started = [
            subprocess.Popen(
                [
                    *("ip", "netns", "exec", name),
                    *(sys.executable, __file__, "--work", str(rank), told),
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
            process.stdin.write(json.dumps(astuple(way)) + "\n")  # type: ignore[union-attr]
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
        """Ends all."""
        for process in self._started:
            process.stdin.close()  # type: ignore[union-attr]
        for process in self._started:
            try:
                process.wait(60)
            finally:
                process.kill()


def machine_of(ranks: int, gb_per_s: float, factor: float) -> Cluster:
    """The ranks' machine, with links of that speed, and multiples of the usual compute rate."""
    return replace(
        CPUS,
        gpus_per_node=ranks,
        node_gb_per_s=gb_per_s,
        peak_tflops=CPUS.peak_tflops * factor,
        attention_tflops=CPUS.attention_tflops * factor,
    )


def rate(model: ServedModel, job: layouts.Job, seconds: float) -> float:
    """The factor by which simulated pass-KV takes so long on free links."""
    low, high = 1e-3, 1e3
    while high > low * 1.001:
        middle = (low * high) ** 0.5
        slower = BASE.simulated(model, job, machine_of(job.ranks, 1e3, middle)) > seconds
        low, high = (middle, high) if slower else (low, middle)
    return low


def rows_of(processes: Processes, limit: Any, job: layouts.Job, mbit: float) -> list[str]:
    """The rows of one speed."""
    model = read_model(job.folder, torch.float32)
    limit(FAST_MBIT_PER_S)
    free = processes.measure(job.rounds)
    limit(mbit)
    slow = processes.measure(job.rounds)
    machine, rows = machine_of(job.ranks, mbit / 8e3, rate(model, job, free[BASE][0])), []
    for way in WAYS:
        on_link = slow[way][1] * 8e-6 / mbit
        compute, seconds = free[way][0], slow[way][0]
        cells = (
            f"{slow[way][1] / 1e6:.2f}",
            *(f"{each:.2f}" for each in (compute, on_link, max(compute, on_link))),
            f"{seconds:.2f}",
            f"{compute + on_link:.2f}",
            f"{way.simulated(model, job, machine):.2f}",
            f"{seconds / slow[BASE][0]:.2f}",
        )
        rows.append(f"| {mbit:g} | {way.title} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(int(sys.argv[2]), layouts.Job(**json.loads(sys.argv[3])))
        return
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=float, nargs="+", default=[40.0], help="speeds of links")
    parser.add_argument("--output", type=Path, required=True, help="folder for the table")
    args = parser.parse_args()
    if os.geteuid() != 0 or min(args.mbit) <= 0:
        parser.error("network namespaces need root, and links speeds above 0")
    with tempfile.TemporaryDirectory() as folder, Namespaces(args.ranks) as namespaces:
        save_model(folder, args.layers, args.hidden_size)
        job = layouts.Job(folder, args.ranks, args.tokens, args.rounds)
        processes = Processes(job, namespaces.names)
        try:
            rows = [
                row for mbit in args.mbit for row in rows_of(processes, namespaces.limit, job, mbit)
            ]
        finally:
            processes.close()
    command = " ".join(["python", "benchmarks/serving/sparse_prefill.py", *sys.argv[1:]])
    load, cores = os.getloadavg()[1], os.cpu_count() or 1
    ran = f"{cores} cores. The load was {load:.0f}" + (
        ": the machine was overloaded, so compare times with care." if load > 2 * cores else "."
    )
    setting = (
        f"{args.tokens:,} tokens, {args.layers} layers of width {args.hidden_size} (csps drops no "
        f"keys in the first and last layer), fp32, {args.ranks} ranks with one thread each on "
        f"{cpu_name()}, torch {torch.__version__}. Medians of {args.rounds} rounds on {ran} It "
        f"needs root, to limit links. Strategies: [prefill strategies]({STRATEGIES_PAGE}).\n\n"
        "*Compute*: time to the first token (TTFT) on fast links. *Link*: not measured, but the "
        "bytes of the rank that sends most over the link's speed. *Simulated*: the simulator gets "
        "the link's speed, and a compute rate with which pass-kv takes the measured time on fast "
        "links. SP-NTP and SP-TP do not overlap communication, so expect compute plus link time. "
        "The others should approach the larger of the two. *Partitions*: parts in which keys "
        "travel (`--micro-partitions`). *p*: share of the other ranks' keys that csps drops. "
        "*Contiguous*: each rank has one contiguous part of the prompt, and not two in zigzag."
    )
    columns = (
        "Mbit/s | strategy | MB of the rank that sends most | compute, s | link, s | larger of "
        "compute and link | TTFT, s | compute plus link | simulated TTFT, s | TTFT over pass-kv's"
    )
    title = "Prefills on a slow link"
    text = page(title, command.replace(str(args.output), "DIR"), setting, columns, rows)
    args.output.mkdir(parents=True, exist_ok=True)
    pages.write(args.output / "sparse_slow_link.md", text, __file__)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
