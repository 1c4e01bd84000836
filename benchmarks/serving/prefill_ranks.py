"""Prefill for other engines on real processes: CPU seconds of the busiest rank, and the transfer.

    python benchmarks/serving/prefill_ranks.py --output benchmarks/results/serving

An engine asks ranks for the keys and values of a long prompt, as vLLM does. Each rank is a process
on a core of its own. The baseline is one rank, in the same run.

The transfer is exposed in two places. Inside an iteration a rank hands the rows of each layer to
its socket, whose own thread sends them while the next layer computes: the CPU seconds that handing
over takes are exposed. After the last iteration of the last rank nothing computes any more: the
time until the engine has all rows is exposed.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.serving.ring_prefill import save_model
from distca.inference.defaults import configure
from distca.inference.models import ServedModel, read_model
from distca.machine import cpu_name
from distca.prefill.client import Ended, OnRows, PrefillClient
from distca.prefill.facts import model_facts
from distca.prefill.front import Front
from distca.prefill.messages import Hello, Welcome
from distca.prefill.ranks import PrefillRank
from distca.schedule.serving.handoff.protocol import Transfer
from distca.schedule.serving.partitions import Chain

STRATEGIES = ("pass-kv", "pass-q", "sp-ntp", "runahead", "tiles")
FOR_SEVERAL = "tiles"
"""The strategy for several prompts at a time: it runs with as many as ranks, too."""
STRATEGIES_PAGE = "../../../docs/inference_strategies.md"
LEASE = 600.0
IDLE = 1.2
"""TTFT over CPU seconds of one rank, above which something else kept the machine busy."""


@dataclass(frozen=True)
class Job:
    """What the ranks of a run compute.

    Attributes:
        model: folder of the model.
        ranks: number of processes.
        strategy: one of `STRATEGIES`.
        tokens: tokens of the prompt.
        chunk: most tokens of an iteration.
        rounds: rounds of prompts, one after the other, after one that is not counted.
        at_once: prompts of a round, which are asked for together.
    """

    model: str
    ranks: int
    strategy: str
    tokens: int
    chunk: int
    rounds: int
    at_once: int = 1


class TimedRank(PrefillRank):
    """A rank that notes what handing rows over takes.

    Attributes:
        handing_over: CPU seconds of the computing thread so far.
    """

    handing_over = 0.0

    def _computed(self, number: int, layer: int, end: int) -> None:
        begin = time.thread_time()
        super()._computed(number, layer, end)
        self.handing_over += time.thread_time() - begin


Rank = TypeVar("Rank", bound=PrefillRank)


def join(kind: type[Rank], rank: int, job: Job, store: str, results: Any) -> Rank:
    """Makes a rank in its process; the first one tells its address. Collective.

    Args:
        kind: its class.
        rank: its number.
        job: what the ranks compute.
        store: file by which they find each other.
        results: queue for the address.
    """
    torch.set_num_threads(1)
    file = dist.FileStore(store, job.ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=file, rank=rank, world_size=job.ranks)
    model = read_model(job.model, torch.float32)
    # Both ranks of a chain of two have as much to do with these parts, by their FLOPs.
    chain = Chain(job.ranks, _parts(job.ranks)) if job.strategy == "runahead" else None
    config = configure(
        model,
        job.ranks,
        strategy="pass-kv" if chain else job.strategy,  # type: ignore[arg-type]
        chain=chain,
        block_size=64,
        max_num_batched_tokens=job.chunk,
        prefix_caching=False,
        step_timeout=LEASE,
    )
    one = kind(config, model, job.chunk, LEASE)
    if rank == 0:
        layers = len(model.windows)
        welcome = Welcome("", job.ranks, job.chunk, layers, one.capacity, LEASE)
        front = Front("tcp://127.0.0.1:*", _facts(model), welcome, one.slices)
        one.listen(front)
        results.put(front.address)
    return one


def connect(job: Job, address: str, on_rows: OnRows) -> PrefillClient:
    """Makes an engine that the ranks know."""
    model = read_model(job.model, torch.float32)
    hello = Hello(_facts(model), "engine", heads=model.kv_heads)
    client = PrefillClient(address, hello, model.shape.head_dim, torch.float32, on_rows)
    assert client.connect(600)
    return client


def _facts(model: ServedModel) -> dict[str, str]:
    return model_facts(model.config, model.path, "float32", model.frequencies, model.quantization)


def prefill(rank: int, job: Job, store: str, results: Any) -> None:
    """Computes all prompts on a rank: the main function of its process."""
    one = join(TimedRank, rank, job, store, results)
    seconds, ended, handing = [], [], []
    for number in range(job.rounds + 1):
        cpu, handed = 0.0, one.handing_over
        while one.counts.prompts < (number + 1) * job.at_once:
            begin, computed = time.process_time(), one.counts.computed
            if one.iterate():
                # Waiting for prompts counts for nobody.
                cpu += time.process_time() - begin
            if one.counts.computed > computed:
                end = time.monotonic()
        seconds.append(cpu)
        ended.append(end)
        handing.append(one.handing_over - handed)
    told = seconds[1:], ended[1:], handing[1:]
    results.put((rank, *told, one.counts.bytes_rows, one.bytes_sent))
    one.close()


def _parts(ranks: int) -> tuple[float, ...]:
    """Shares of a prompt that have as many pairs of a query and a key."""
    ends = np.sqrt(np.arange(ranks + 1) / ranks)
    return tuple(np.diff(ends).tolist())


@dataclass(frozen=True)
class Asked:
    """Rounds of prompts that ranks were asked for, one after the other.

    Attributes:
        asked: when each round was asked for.
        there: when all rows of its prompts were there.
        told: what each rank reports at its end, by rank.
    """

    asked: list[float]
    there: list[float]
    told: list[Any]


def ask(job: Job, main: Callable[[int, Job, str, Any], None], store: str, on_rows: OnRows) -> Asked:
    """Runs the ranks, and asks them for all prompts, after one that is not counted.

    Args:
        job: sizes.
        main: main function of a rank's process, given its number, the job, a file by which the
            ranks meet, and a queue: the first one tells its address, and each one its results.
        store: the file by which they meet.
        on_rows: function that is given what comes.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=main, args=(rank, job, store, results)) for rank in range(job.ranks)
    ]
    for process in processes:
        process.start()
    client = connect(job, results.get(timeout=600), on_rows)
    asked, there = [], []
    for number in range(job.rounds + 1):
        numbers = range(number * job.at_once, (number + 1) * job.at_once)
        prompts = [np.random.default_rng(each).integers(0, 1000, job.tokens) for each in numbers]
        asked.append(time.monotonic())
        for each, tokens in zip(numbers, prompts, strict=True):
            client.begin(Transfer(each), tokens.tolist(), 0)
        ended: list[Ended] = []
        while len(ended) < job.at_once:
            ended += client.poll(0.01)
        assert not any(each.failure for each in ended), ended
        there.append(time.monotonic())
    told = sorted(results.get(timeout=600) for _ in processes)
    for process in processes:
        process.join()
    client.close()
    return Asked(asked, there, told)


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Runs the ranks, and measures them."""
    taken = 0

    def take(transfer: Transfer, layer: int, at: Any, *rows: torch.Tensor) -> None:
        nonlocal taken
        taken += sum(each.nbytes for each in rows)

    store = folder / f"store-{job.ranks}-{job.strategy}-{job.at_once}"
    found = ask(job, prefill, str(store), take)
    asked, there, told = found.asked, found.there, found.told
    last = [max(ends) for ends in zip(*(ends for _, _, ends, *_ in told), strict=True)]
    assert sum(rows for *_, rows, _ in told) == taken
    prompts = (job.rounds + 1) * job.at_once
    busiest = [max(each) for each in zip(*(cpu for _, cpu, *_ in told), strict=True)]
    return {
        "ranks": job.ranks,
        "strategy": job.strategy,
        "at_once": job.at_once,
        "cpu_seconds": [each / job.at_once for each in busiest],
        "seconds": [b - a for a, b in zip(asked[1:], there[1:], strict=True)],
        "handing_over": [
            max(each) / job.at_once for each in zip(*(h for *_, h, _, _ in told), strict=True)
        ],
        "exposed": [max(b - a, 0.0) for a, b in zip(last, there[1:], strict=True)],
        "bytes_between_ranks": sum(sent for *_, sent in told) // prompts,
        "bytes_to_engine": taken // prompts,
    }


def _name(each: Mapping[str, Any]) -> str:
    """The title of a row."""
    if each["ranks"] == 1:
        return "one rank"
    several = f", {each['at_once']} prompts at once" if each["at_once"] > 1 else ""
    return f"{each['strategy']}{several}"


def page(job: Job, sizes: tuple[int, int], found: Sequence[dict[str, Any]]) -> str:
    """The page of the results.

    Args:
        job: what the ranks computed.
        sizes: layers and width of the model.
        found: figures; one rank comes first.
    """
    base = statistics.median(found[0]["cpu_seconds"])
    rows = []
    for each in found:
        cpu, seconds = each["cpu_seconds"], each["seconds"]
        parts = [100 * a / b for a, b in zip(each["exposed"], seconds, strict=True)]
        inside = [100 * a / b for a, b in zip(each["handing_over"], cpu, strict=True)]
        rows.append(
            (
                each["ranks"],
                _name(each),
                f"{statistics.median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f})",
                f"{statistics.median(cpu) / base:.3f}",
                f"{statistics.median(seconds):.2f}",
                f"{statistics.median(inside):.1f}% ({min(inside):.1f} to {max(inside):.1f})",
                f"{statistics.median(parts):.1f}% ({min(parts):.1f} to {max(parts):.1f})",
                f"{each['bytes_between_ranks'] / 1e6:.1f}",
                f"{each['bytes_to_engine'] / 1e6:.1f}",
            )
        )
    head = (
        *("ranks", "strategy", "CPU s of the busiest rank", "over one rank's CPU s", "TTFT, s"),
        *("exposed inside", "exposed at the end", "MB between ranks", "MB to the engine"),
    )
    # A rank alone computes all the time, so that longer is what others take.
    waited = statistics.median(found[0]["seconds"]) / base
    compared = (
        f"Do not compare TTFTs: the machine was busy, and one rank's TTFT is {waited:.1f} times "
        "its CPU seconds. CPU seconds and bytes are comparable."
        if waited > IDLE
        else "CPU seconds and bytes are comparable. So are TTFTs, unless other programs ran."
    )
    return "\n\n".join(
        (
            "# Prefill ranks",
            f"{cpu_name()}, one thread a rank, torch {torch.__version__}: "
            f"`{pages.typed('benchmarks/serving/prefill_ranks.py')}`",
            f"A Llama of {sizes[0]} layers of width {sizes[1]}, fp32, random weights. Prompts of "
            f"{job.tokens:,} tokens in chunks of {job.chunk:,}; median (minimum to maximum) of "
            f"{job.rounds} prompts. Strategies: [prefill strategies]({STRATEGIES_PAGE}). TTFT: "
            "time until the serving engine (such as vLLM) has all keys and values; its own first "
            f"step is not included. {compared}",
            "*Exposed inside*: CPU time of a rank that hands keys and values to its socket, as a "
            "share of its CPU seconds. *Exposed at the end*: time from the end of the last "
            "rank's compute until the engine has everything, as a share of TTFT. `tiles` is for "
            "several prompts at a time. With one it sends most: the prompt's linear layers stay on "
            "one rank, so queries, keys and values go to the other ranks, and outputs come back. "
            "Its last row has a prompt for each rank at once: CPU seconds and bytes are those of a "
            "round, divided by the number of prompts. TTFT is until the last prompt is there.",
            pages.table(head, rows, "---:"),
        )
    )


def main() -> None:
    """Measures all strategies."""
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True, help="folder for the table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = str(folder / "model")
        save_model(model, args.layers, args.hidden_size)
        jobs = [Job(model, 1, STRATEGIES[0], args.tokens, args.chunk, args.rounds)]
        jobs += [
            Job(model, ranks, strategy, args.tokens, args.chunk, args.rounds)
            for ranks in args.ranks
            for strategy in STRATEGIES
        ]
        jobs += [
            Job(model, ranks, FOR_SEVERAL, args.tokens, args.chunk, args.rounds, at_once=ranks)
            for ranks in args.ranks
        ]
        found, sizes = [], (args.layers, args.hidden_size)
        for job in jobs:
            found.append(run(job, folder))
            sys.stderr.write(f"{json.dumps(found[-1])}\n")
    pages.save(args.output, "prefill_ranks", page(jobs[0], sizes, found), __file__, found)


if __name__ == "__main__":
    main()
