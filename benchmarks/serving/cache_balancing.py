"""How much a prefill takes longer when cached keys and values move to new ranks, on slow links.

    python benchmarks/serving/cache_balancing.py --output benchmarks/results/serving
    sudo python benchmarks/serving/cache_balancing.py --busy 0.3 0.6 --output DIR

A prompt is fed in two chunks, the first on half of the ranks. Before the second, half of its cached
keys and values move to the other ranks, those of a layer while the layer before is computed. On
described clusters that is simulated. With `--busy`, which needs root, it is measured, too: each
process runs in a network namespace of its own. The link's speed is such that attention's own bytes
of the second chunk take that share of its time. Three variants take turns in the same processes:
*behind compute*, as servers run it; *single-stream*, which waits for each layer's move as it
starts; and *signal*, in which moves are one byte, as if they cost nothing. Exposed is how much
longer a variant takes than signal in the same round, over both chunks.
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.links.slow_link import ENVIRONMENT, FAST_MBIT_PER_S, Namespaces, answer, read_answer
from benchmarks.serving.ring_prefill import save_model
from distca.attention import select_kernel
from distca.cost.model_sizes import MODELS
from distca.cost.steps import STEP_SLOTS
from distca.inference.model_runner import ModelRunner
from distca.inference.models import read_model
from distca.machine import cpu_name
from distca.runtime import Buffers, CoreAttention
from distca.runtime.serving.kv_moves import KvMoves
from distca.schedule.serving.blocks import BlockPool, PrefixCache
from distca.schedule.serving.cdsp.chunks import Piece
from distca.schedule.serving.iteration import plan_iteration
from distca.schedule.serving.scheduled import ScheduledTokens
from distca.simulate import CLUSTERS
from distca.simulate.serving import InferenceCosts, simulate_growth
from distca.simulate.serving.growth import grow_blocks
from distca.transport import CollectiveTransport, Transport, new_exchange_group
from distca.transport.ablation import Signal, SingleStream

CPU, BLOCK, VOCABULARY = torch.device("cpu"), 128, 1000
WRAPPERS = {"behind compute": lambda each: each, "single-stream": SingleStream, "signal": Signal}
SIMULATED = ((32768, 32768), (16384, 49152), (49152, 16384))
GB_PER_S = (50.0, 25.0, 12.5, 6.0)


@dataclass(frozen=True)
class Job:
    """What processes of ranks run.

    Attributes:
        model: folder of the model.
        store: file by which they find each other.
        ranks: number of processes.
        tokens: tokens of each of the two chunks.
        rounds: measurements of each way.
    """

    model: str
    store: str
    ranks: int
    tokens: int
    rounds: int


class Rank:
    """A model on this rank, and how rows move between ranks."""

    def __init__(self, job: Job) -> None:
        everyone, timeout = list(range(job.ranks)), timedelta(seconds=300)
        attention, moving = (new_exchange_group(everyone, timeout) for _ in range(2))
        assert attention is not None
        assert moving is not None
        self.attention, self.moving = (
            CollectiveTransport(group, CPU, members_only=True) for group in (attention, moving)
        )
        model = read_model(job.model, torch.float32)
        buffers = Buffers(CPU, max(STEP_SLOTS, len(model.masks)))
        core = CoreAttention(self.attention, select_kernel("cpu"), buffers)
        self._job, self._masks = job, model.masks
        self._blocks = 2 * job.tokens // BLOCK + 2
        self._model = ModelRunner(model, core, CPU, self._blocks, BLOCK)
        self._model.attention.watch = self
        self._moves: KvMoves | None = None

    def begins(self, layer: int) -> None:
        """Takes in the rows of a layer that others had."""
        assert self._moves is not None
        self._moves.begins(layer)

    def written(self, layer: int) -> None:
        """See `LayerWatch`."""

    def prefill(self, way: str) -> dict[str, float]:
        """Feeds both chunks; returns seconds of each, CPU seconds, and bytes that were sent."""
        job, rank = self._job, self.attention.rank
        cache = PrefixCache(BlockPool(job.ranks, self._blocks, BLOCK))
        groups = frozenset(range(job.ranks // 2)), frozenset(range(job.ranks))
        pieces = [
            Piece(n * job.tokens, (n + 1) * job.tokens, each) for n, each in enumerate(groups)
        ]
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, 2 * job.tokens).tolist()
        moving: Transport = WRAPPERS[way](self.moving)
        found, cpu = {}, time.process_time()
        names = "first", "second"
        for piece, given, name in zip(pieces, grow_blocks(pieces, cache), names, strict=True):
            sent = [sum(each.bytes_sent.values()) for each in (self.attention, moving)]
            dist.barrier()
            started = time.perf_counter()
            if rank in piece.ranks:
                owners = np.array([block.rank for block in given.blocks], dtype=np.int64)
                part = ScheduledTokens(0, piece.start, job.tokens, owners)
                plan = plan_iteration([part], self._masks, BLOCK, job.ranks, "pass-kv")
                self._model.drop(0)
                mine = [block.number for block in given.blocks if block.rank == rank]
                self._model.add_blocks(0, mine)
                self._moves = KvMoves(self._model.attention.pool, moving, given.moves)
                self._model.run_batch(plan, {0: tokens[piece.start : piece.end]})
            dist.barrier()
            found[name] = time.perf_counter() - started
            after = (sum(each.bytes_sent.values()) for each in (self.attention, moving))
            found["rows"], found["moved"] = (b - a for a, b in zip(sent, after, strict=True))
        self._model.drop(0)
        return found | {"cpu": time.process_time() - cpu}


def work(rank: int, job: Job) -> None:
    """Runs one rank, which measures all ways for each line on the standard input."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(job.store, job.ranks), rank=rank, world_size=job.ranks
    )
    here, ways = Rank(job), [*WRAPPERS]
    answer(rank, {})
    for _ in sys.stdin:
        found: dict[str, list[Any]] = {name: [] for name in ways}
        for number in range(job.rounds + 1):
            turn = number % len(ways)
            for name in (*ways[turn:], *ways[:turn]):
                measured: list[Any] = [None] * job.ranks
                dist.all_gather_object(measured, here.prefill(name))
                # The first round warms up. The busiest rank counts.
                if number:
                    found[name].append({key: max(m[key] for m in measured) for key in measured[0]})
        answer(rank, found)
    dist.destroy_process_group()


def measure(job: Job, shares: Sequence[float]) -> Iterator[tuple[float, float, dict[str, Any]]]:
    """Measures all ways for each share; yields it with the speed of links in Mbit/s."""
    with Namespaces(job.ranks) as namespaces:
        started = [
            subprocess.Popen(
                [
                    *("ip", "netns", "exec", name, sys.executable, __file__),
                    *("--work", str(rank), json.dumps(asdict(job))),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
                env=os.environ | ENVIRONMENT,
            )
            for rank, name in enumerate(namespaces.names)
        ]

        def ask() -> dict[str, Any]:
            for process in started:
                process.stdin.write("\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
            return read_answer(started[0])

        try:
            read_answer(started[0])
            namespaces.limit(FAST_MBIT_PER_S)
            free = ask()["signal"]
            second = statistics.median(each["second"] for each in free)
            for share in shares:
                speed = float(f"{free[0]['rows'] * 8e-6 / second / share:.3g}")
                namespaces.limit(speed)
                yield share, speed, ask()
            for process in started:
                process.stdin.close()  # type: ignore[union-attr]
            for process in started:
                process.wait(60)
        finally:
            for process in started:
                process.kill()


def exposed(found: dict[str, Any], way: str) -> float:
    """What a way takes longer than signal in the same round, over both chunks; the median."""
    return statistics.median(
        (each["second"] - free["second"]) / (free["first"] + free["second"])
        for each, free in zip(found[way], found["signal"], strict=True)
    )


def measured_section(args: argparse.Namespace) -> Iterator[str]:
    yield from (
        "## Measured",
        "",
        f"{args.ranks // 2}, then {args.ranks} processes on {os.cpu_count()} cores of "
        f"{cpu_name()}, torch {torch.__version__}; two chunks of {args.tokens:,} tokens, "
        f"{args.layers} layers of width {args.hidden_size}, fp32; medians of {args.rounds} rounds "
        "in wall seconds. It needs root, to limit links.",
        "",
        "*Link load*: link time of attention's own bytes, as a share of the second chunk on a fast "
        "link; it sets the link's speed. *Behind compute*: the moves overlap with compute, as in "
        "serving. *Single-stream*: each layer waits until its move has ended. *Signal*: moves are "
        "one byte, so they cost nothing; exposed times are over it. Exposed times around zero, "
        "also negative ones, are noise.",
        "",
        "| link load | Mbit/s | MB moved | moved | exposed, behind compute | exposed, "
        "single-stream | prefill with signal, s | CPU s, busiest rank |",
        f"|{' --- |' * 8}",
    )
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, args.layers, args.hidden_size)
        job = Job(folder, f"{folder}/store", args.ranks, args.tokens, args.rounds)
        for share, speed, found in measure(job, args.busy):
            way, free = found["behind compute"], found["signal"]
            seconds = statistics.median(each["first"] + each["second"] for each in free)
            moved = way[0]["moved"] / 1e6
            cpu = statistics.median(each["cpu"] for each in way)
            yield (
                f"| {share} | {speed} | {moved:.1f} | {8 * moved / speed / seconds:.1%} | "
                f"{exposed(found, 'behind compute'):.1%} | {exposed(found, 'single-stream'):.1%} | "
                f"{seconds:.2f} | {cpu:.2f} |"
            )


def simulated_section() -> Iterator[str]:
    yield from (
        "## Simulated",
        "",
        "llama-8b on 4, then 8 H100s, one per node. *Busy*: share of the second chunk that ranks "
        "wait for attention's own exchanges, if moves cost nothing.",
        "",
        "| tokens of the chunks | link, GB/s | tokens that move | moved | exposed | busy |",
        f"|{' --- |' * 6}",
    )
    for first, second in SIMULATED:
        for speed in GB_PER_S:
            cluster = replace(CLUSTERS["dgx-h100"], gpus_per_node=1, network_gb_per_s=speed)
            found = simulate_growth(
                InferenceCosts(MODELS["llama-8b"], cluster), (first, second), (4, 8)
            )
            seconds = found.first.seconds + found.second.seconds
            link = found.second.bytes_sent["cache balancing"].max() / (speed * 1e9)
            waits = found.free.exposed.max() / found.free.seconds
            yield (
                f"| {first:,} and {second:,} | {speed:g} | {found.rows:,} | {link / seconds:.1%} | "
                f"{found.exposed:.1%} | {waits:.0%} |"
            )
    yield ""


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(int(sys.argv[2]), Job(**json.loads(sys.argv[3])))
        return
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each chunk")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=float, nargs="+", help="shares of the second chunk")
    parser.add_argument("--output", type=Path, required=True, help="folder for the page")
    args = parser.parse_args()
    if args.ranks < 2 or args.ranks % 2:
        parser.error(f"--ranks {args.ranks}: give an even number")
    if args.busy and (os.geteuid() != 0 or min(args.busy) <= 0):
        parser.error("--busy needs root, for network namespaces, and shares above 0")
    flags = " ".join(sys.argv[1:]).replace(str(args.output), "DIR")
    page = [
        "# Moving the KV cache when a prompt gets more ranks",
        "",
        f"    python benchmarks/serving/cache_balancing.py {flags}",
        "",
        "A prompt is prefilled in two chunks, the first on half of the ranks. Before the second, "
        "half of the cached keys and values move to the new ranks. *Moved*: link time of the "
        "moves, as a share of the prefill. *Exposed*: how much the moves lengthen the prefill, as "
        "a share of it.",
        "",
        *simulated_section(),
        *(measured_section(args) if args.busy else ()),
    ]
    args.output.mkdir(parents=True, exist_ok=True)
    text = "\n".join(page).rstrip() + "\n"
    pages.write(args.output / "cache_balancing.md", text, __file__)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
