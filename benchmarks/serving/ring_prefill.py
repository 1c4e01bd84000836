"""Prefills in steps: CPU seconds of ranks beside one process, and what is exposed on a slow link.

    python benchmarks/serving/ring_prefill.py --output benchmarks/results/serving
    sudo python benchmarks/serving/ring_prefill.py --ranks 2 --busy 0.5 0.9 --output DIR

A prompt is fed to a small random Llama, in one process by transformers itself, and on ranks in
three ways: in steps, as users run it; *single-stream*, which waits for each exchange where it
starts; and *signal*, in which every message is one byte, as if communication were free. Ways take
turns in the same processes. Of the ideal: the CPU seconds of one process over ranks times the most
of a rank.

With `--busy`, which needs root, each process runs in a network namespace of its own, whose link
lets through so much that the rows of a step take that share of the time of a step's kernels
(Equation 2 of the paper on context-parallel inference holds below 1); wall seconds are compared
with signals in the same round.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
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
from distca.attention import select_kernel
from distca.cost.steps import STEP_SLOTS
from distca.inference.model_runner import ModelRunner
from distca.inference.models import ServedModel, read_model
from distca.machine import cpu_name
from distca.runtime import Buffers, CoreAttention
from distca.schedule.serving import STRATEGIES
from distca.transport import CollectiveTransport, Transport
from distca.transport.ablation import Signal, SingleStream

CPU, BLOCK = torch.device("cpu"), 128
WAYS = ("in steps", "single-stream", "signal")
WRAPPERS = {"single-stream": SingleStream, "signal": Signal}


@dataclass(frozen=True)
class Job:
    """What processes of ranks run.

    Attributes:
        model: folder of the model.
        store: file by which they find each other.
        ranks: number of processes.
        tokens: tokens of the prompt.
        rounds: measurements of each way.
    """

    model: str
    store: str
    ranks: int
    tokens: int
    rounds: int


class Way:
    """A model on this rank, whose exchanges run in one of the ways."""

    def __init__(self, job: Job, model: ServedModel, name: str) -> None:
        group = dist.new_group(list(range(job.ranks)))
        transport: Transport = CollectiveTransport(group, CPU)
        if name in WRAPPERS:
            transport = WRAPPERS[name](transport)
        buffers = Buffers(CPU, max(STEP_SLOTS, len(model.masks)))
        blocks = -(-job.tokens // job.ranks // BLOCK) + 1
        self._job, self._core = job, CoreAttention(transport, select_kernel("cpu"), buffers)
        self._rank = ModelRunner(model, self._core, CPU, blocks, BLOCK)
        self._planner = PlannedSteps(model.masks, job.ranks, BLOCK, runner=self._rank)

    def prefill(self, strategy: Any) -> dict[str, float]:
        """Feeds a prompt; returns seconds, CPU seconds, those of kernels, and the bytes sent."""
        tokens = np.random.default_rng(0).integers(0, 1000, self._job.tokens).tolist()
        dist.barrier()
        sent = sum(self._core.transport.bytes_sent.values())
        self._core.trace.recording = True
        started, cpu = time.perf_counter(), time.process_time()
        step = self._planner.plan({0: len(tokens)}, strategy)
        self._rank.run(step, {0: tokens})
        cpu = time.process_time() - cpu
        dist.barrier()
        seconds = time.perf_counter() - started
        self._planner.drop_all()
        spans = self._core.trace.take(0)
        kernels = sum(span["dur"] for span in spans if span["name"] == "core attention") / 1e6
        sent = sum(self._core.transport.bytes_sent.values()) - sent
        return {"seconds": seconds, "cpu": cpu, "kernels": kernels, "sent": sent}


def work(rank: int, job: Job) -> None:
    """Runs one rank, which measures a strategy for each line on the standard input."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(job.store, job.ranks), rank=rank, world_size=job.ranks
    )
    model = read_model(job.model, torch.float32)
    ways = {name: Way(job, model, name) for name in WAYS}
    answer(rank, {})
    for line in sys.stdin:
        found: dict[str, list[Any]] = {name: [] for name in WAYS}
        for number in range(job.rounds + 1):
            turn = number % len(WAYS)
            for name in (*WAYS[turn:], *WAYS[:turn]):
                measured: list[Any] = [None] * job.ranks
                dist.all_gather_object(measured, ways[name].prefill(json.loads(line)))
                # The first round warms up. The busiest rank counts.
                if number:
                    found[name].append({key: max(m[key] for m in measured) for key in measured[0]})
        answer(rank, found)
    dist.destroy_process_group()


def alone(model: ServedModel, tokens: int, rounds: int) -> float:
    """CPU seconds of one process, whose attention is transformers' own; the median."""
    torch.set_num_threads(1)
    loaded, found = model.load(CPU, "sdpa"), []
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 1000, tokens))[None]
    for _ in range(rounds + 1):
        started = time.process_time()
        with torch.no_grad():
            loaded(input_ids=ids, use_cache=True, logits_to_keep=1)
        found.append(time.process_time() - started)
    return statistics.median(found[1:])


def save_model(folder: str, layers: int, width: int) -> None:
    """Saves a random Llama."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
        max_position_embeddings=1 << 17,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def measure(job: Job, names: list[list[str]], speeds: Any) -> list[dict[str, Any]]:
    """Measures all strategies on ranks, for each share that links are busy.

    Args:
        job: what ranks run.
        names: command before that of each rank.
        speeds: function that limits links, and the shares; None: links are not limited.
    """
    started = [
        subprocess.Popen(
            [*name, sys.executable, __file__, "--work", str(rank), json.dumps(asdict(job))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
            env=os.environ | (ENVIRONMENT if speeds else {}),
        )
        for rank, name in enumerate(names)
    ]

    def ask(strategy: str) -> dict[str, Any]:
        for process in started:
            process.stdin.write(json.dumps(strategy) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        return read_answer(started[0])

    try:
        read_answer(started[0])
        rows: list[dict[str, Any]] = []
        for strategy in STRATEGIES:
            if speeds is None:
                rows.append({"strategy": strategy, "ways": ask(strategy)})
                continue
            limit, shares = speeds
            limit(FAST_MBIT_PER_S)
            free = ask(strategy)["signal"]
            sent = ask(strategy)["in steps"][0]["sent"]
            kernels = statistics.median(each["kernels"] for each in free)
            # A step's rows travel during the kernels of the step before.
            hidden = kernels * (job.ranks - 1) / job.ranks
            for share in shares:
                speed = float(f"{sent * 8e-6 / hidden / share:.3g}")
                limit(speed)
                rows.append(
                    {"strategy": strategy, "busy": share, "mbit": speed, "ways": ask(strategy)}
                )
        for process in started:
            process.stdin.close()  # type: ignore[union-attr]
        for process in started:
            process.wait(60)
        return rows
    finally:
        for process in started:
            process.kill()


def over_signal(row: dict[str, Any], name: str) -> float:
    """Wall seconds of a way over those with signals of the same round; the median."""
    rounds = zip(row["ways"][name], row["ways"]["signal"], strict=True)
    return statistics.median(each["seconds"] / free["seconds"] for each, free in rounds)


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
    parser.add_argument("--busy", type=float, nargs="+", help="shares of a step's kernels")
    parser.add_argument("--output", type=Path, required=True, help="folder for the table")
    args = parser.parse_args()
    if args.busy and (os.geteuid() != 0 or min(args.busy) <= 0):
        parser.error("--busy needs root, for network namespaces, and shares above 0")
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, args.layers, args.hidden_size)
        one = alone(read_model(folder, torch.float32), args.tokens, args.rounds)
        for ranks, slow in itertools.product(args.ranks, [bool(args.busy)]):
            job = Job(folder, f"{folder}/{ranks}", ranks, args.tokens, args.rounds)
            if slow:
                with Namespaces(ranks) as namespaces:
                    names = [["ip", "netns", "exec", name] for name in namespaces.names]
                    rows = measure(job, names, (namespaces.limit, args.busy))
            else:
                rows = measure(job, [[]] * ranks, None)
            for row in rows:
                most = statistics.median(each["cpu"] for each in row["ways"]["in steps"])
                ratios = (f"{over_signal(row, name):.3f}" for name in WAYS[:2])
                busy, speed = row.get("busy", ""), row.get("mbit", "")
                cells = (
                    ranks,
                    row["strategy"],
                    busy,
                    speed,
                    f"{most:.2f}",
                    f"{one / ranks / most:.0%}",
                )
                lines.append(f"| {' | '.join(map(str, (*cells, *ratios)))} |")
    command = " ".join(["python", "benchmarks/serving/ring_prefill.py", *sys.argv[1:]])
    text = "\n".join(
        [
            "# Prefills in steps",
            "",
            f"    {command.replace(str(args.output), 'DIR')}",
            "",
            f"{args.tokens:,} tokens, {args.layers} layers of width {args.hidden_size}, fp32, a "
            f"thread each on {cpu_name()}, torch {torch.__version__}. One process, transformers: "
            f"{one:.2f} CPU s. Busy: link seconds of a step over its kernels'. "
            f"{pages.medians(args.rounds).capitalize()}.",
            "",
            "| ranks | strategy | busy | Mbit/s | CPU s, most of a rank | of the ideal "
            "| wall, in steps over signal | single-stream over signal |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *lines,
        ]
    )
    args.output.mkdir(parents=True, exist_ok=True)
    name = "ring_slow_link.md" if args.busy else "ring_prefill.md"
    pages.write(args.output / name, text, __file__)
    print(text)


if __name__ == "__main__":
    main()
