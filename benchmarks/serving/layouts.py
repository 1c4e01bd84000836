"""SP-NTP and SP-TP beside pass-KV on real processes: bytes, and CPU seconds of the busiest rank.

    python benchmarks/serving/layouts.py --output benchmarks/results/serving

A prompt is fed to a small random Llama on ranks in five ways, which take turns in the same
processes. Ranks with whole weights pass keys (*pass-kv*) or scatter heads (*sp-ntp*); ranks that
split them share rows between blocks (*sp-tp*), gather each layer's attention weights and scatter
heads (*sp-ntp, split*), or have all rows each (*tensor parallel*), whose sums of all rows are not
counted. Counted bytes are held against the plans'.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.serving.chain_prefill import page
from benchmarks.serving.planned_steps import PlannedSteps
from benchmarks.serving.ring_prefill import save_model
from distca.attention import select_kernel
from distca.cost.steps import STEP_SLOTS
from distca.inference.model_runner import ModelRunner
from distca.inference.models import read_model
from distca.inference.sequence_parallel import share_rows, split_model
from distca.inference.tensor_parallel import join_ranks
from distca.machine import cpu_name
from distca.runtime import Buffers, CoreAttention
from distca.schedule.serving import STRATEGIES, Strategy
from distca.schedule.serving.batches import PrefillStrategy
from distca.schedule.serving.csps.layouts import Layout, SplitModel
from distca.schedule.serving.csps.levels import Levels
from distca.transport import CollectiveTransport

CPU, BLOCK, TIMEOUT = torch.device("cpu"), 128, timedelta(minutes=10)
BASE = "pass-kv"
WHOLE: dict[str, Strategy] = {BASE: "pass-kv", "sp-ntp": "sp-ntp"}
SPLIT: dict[str, Layout | None] = {
    "sp-tp": "sp-tp",
    "sp-ntp, split": "sp-ntp",
    "tensor parallel": None,
}
WAYS = (*WHOLE, *SPLIT)


@dataclass(frozen=True)
class Job:
    """What processes of ranks run.

    Attributes:
        folder: folder of the model, and of the file by which ranks find each other.
        ranks: number of processes.
        tokens: tokens of the prompt.
        rounds: prefills of each way that count.
    """

    folder: str
    ranks: int
    tokens: int
    rounds: int


class Rank:
    """A model on this rank, whole or a slice.

    Args:
        job: what is run.
        split: whether ranks split the weights.
    """

    def __init__(self, job: Job, split: bool) -> None:
        tensor = job.ranks if split else 1
        self._model = read_model(job.folder, torch.float32, tensor)
        group, ranks = join_ranks(tensor, TIMEOUT)
        self._tokens, self._tensor = job.tokens, tensor
        self._layers: SplitModel | None = None
        if split:
            self._layers = split_model(self._model, "bytes")
            ranks = share_rows(ranks, self._layers, CPU, TIMEOUT)
        transport = CollectiveTransport(group, CPU)
        core = CoreAttention(transport, select_kernel("cpu"), Buffers(CPU, STEP_SLOTS))
        blocks = -(-job.tokens // BLOCK) + 1
        self._rank = ModelRunner(self._model, core, CPU, blocks, BLOCK, ranks)
        world = job.ranks // tensor
        self._planners = {
            layout: PlannedSteps(self._model.masks, world, BLOCK, self._split(layout), self._rank)
            for layout in (SPLIT.values() if split else [None])
        }

    def _split(self, layout: Layout | None) -> SplitModel | None:
        if self._layers is None or layout is None:
            return None
        return SplitModel(self._layers.layer, self._layers.layers, layout)

    def prefill(
        self, strategy: PrefillStrategy, layout: Layout | None, chain: Levels | None = None
    ) -> dict[str, float]:
        """Feeds a prompt.

        Args:
            strategy: what travels.
            layout: how rows are shared by ranks that split the weights.
            chain: who owns the tokens; None: all evenly, in zigzag.

        Returns:
            CPU seconds, seconds to the first token, if it is chosen here, bytes sent, and those of
            all ranks by the plan.
        """
        tokens = np.random.default_rng(0).integers(0, 1000, self._tokens).tolist()
        sent, planner = self._rank.bytes_sent, self._planners[layout]
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        step = planner.plan({0: len(tokens)}, strategy, chain)
        chosen = self._rank.run(step, {0: tokens})
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        planner.drop_all()
        model, tensor = self._model, self._tensor
        planned = sum(step.bytes_by_sequence(model.windows, model.shape, tensor))
        sent = self._rank.bytes_sent - sent
        first = wall if chosen else 0.0
        return {"cpu": cpu, "first_token": first, "sent": sent, "planned": planned}


def join(rank: int, job: Job) -> None:
    """Joins the other ranks."""
    store = dist.FileStore(f"{job.folder}/{job.ranks}", job.ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.ranks)


def work(rank: int, job: Job, pipe: Any) -> None:
    """Runs one rank; the first tells what every way took on all ranks, round by round."""
    torch.set_num_threads(1)
    join(rank, job)
    whole, split = Rank(job, split=False), Rank(job, split=True)
    found: dict[str, list[Any]] = {way: [] for way in WAYS}
    for number in range(job.rounds + 1):
        # The first round warms up, and ways take turns at being the first.
        turn = number % len(WAYS)
        for way in (*WAYS[turn:], *WAYS[:turn]):
            if way in WHOLE:
                ran = whole.prefill(WHOLE[way], None)
            else:
                ran = split.prefill(STRATEGIES[0], SPLIT[way])
            everyones: list[Any] = [None] * job.ranks
            dist.all_gather_object(everyones, ran)
            found[way] += [everyones] if number else []
    if rank == 0:
        pipe.send(found)
    dist.destroy_process_group()


def measure(job: Job) -> dict[str, list[Any]]:
    """Runs all ways on processes of their own."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    processes = [context.Process(target=work, args=(n, job, theirs)) for n in range(job.ranks)]
    for process in processes:
        process.start()
    theirs.close()
    try:
        found: dict[str, list[Any]] = ours.recv()
    finally:
        for process in processes:
            process.join(60)
            process.kill()
    return found


def rows_of(job: Job) -> list[str]:
    """The rows of the table of that many ranks."""
    found = measure(job)

    def most(ran: Any) -> float:
        return float(max(each["cpu"] for each in ran))

    rows = []
    for way in WAYS:
        rounds, base = found[way], found[BASE]
        sent = sum(each["sent"] for each in rounds[0])
        assert sent == rounds[0][0]["planned"], f"{way}: {sent} bytes, planned otherwise"
        over = statistics.median(most(a) / most(b) for a, b in zip(rounds, base, strict=True))
        cpu = [sum(each["cpu"] for each in ran) for ran in rounds]
        cells = (
            f"{statistics.median(map(most, rounds)):.2f}",
            f"{over:.3f}",
            f"{statistics.median(cpu):.2f}",
            "not counted" if way == "tensor parallel" else f"{sent / 1e6:.2f}",
        )
        rows.append(f"| {job.ranks} | {way} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True, help="folder for the table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, args.layers, args.hidden_size)
        jobs = [Job(folder, ranks, args.tokens, args.rounds) for ranks in args.ranks]
        rows = [row for job in jobs for row in rows_of(job)]
    command = " ".join(["python", "benchmarks/serving/layouts.py", *sys.argv[1:]])
    setting = (
        f"{args.tokens:,} tokens, {args.layers} layers of width {args.hidden_size}, fp32, a thread "
        f"each on {cpu_name()}, torch {torch.__version__}. Medians of {args.rounds} rounds; ratios "
        "are of the same round."
    )
    columns = "ranks | way | CPU s, most of a rank | over pass-kv | CPU s, all ranks | MB"
    text = page(
        "Layouts of sequence parallelism on real processes",
        command.replace(str(args.output), "DIR"),
        setting,
        columns,
        rows,
    )
    args.output.mkdir(parents=True, exist_ok=True)
    pages.write(args.output / "layouts.md", text, __file__)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
