"""`distca serve` under a Poisson load, beside transformers' own `generate` and its own server.

    python benchmarks/serving/serving.py --output DIR

All answer the same prompts greedily, with a small model of random weights, one system after the
other: transformers' `generate` in one process, one request at a time and with all that wait as one
batch; `transformers serve` (which needs the package accelerate); vLLM's server where it is
installed; and `distca serve` on one rank and on two. Throughput, times to the first token and per
token are the clients', CPU seconds those of all processes of a server.

Then two servers, of one rank and of two, are asked a short prompt in turn: what the second rank
costs a request that does not need it. And the engine's scheduling and a rank's planning are timed
in this process, with 32 sequences.
"""

from __future__ import annotations

import itertools
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

import httpx
import numpy as np

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.serving.systems import (
    SHORT,
    VOCABULARY,
    Answered,
    Asked,
    cpu_seconds,
    distca,
    is_ours,
    missing,
    serving,
    systems,
    write_model,
)
from distca.attention.kernel_timing import cpu_name
from distca.cost.volume import AttentionShape
from distca.inference.machine import Machine
from distca.inference.messages import AddRequest, ModelOutput, SampledToken, encode
from distca.inference.sampling import SamplingParams
from distca.plan import Mask
from distca.progress import track
from distca.schedule.serving import Selector, Strategy
from distca.schedule.serving.iteration import BatchEntry, plan_iteration
from distca.schedule.serving.limits import SchedulerConfig
from distca.serve.engine.backlog import Backlog
from distca.serve.engine.engine import EngineProcess
from distca.serve.engine.settings import ServerConfig

SHORT_TOKENS = 32


def draw_load(count: int, rate: float, seed: int = 0) -> list[Asked]:
    """Draws requests: Poisson arrivals, an infinite rate for all at once; one of 8 is long."""
    chance = random.Random(seed)
    arrival, asked = 0.0, []
    for number in range(count):
        length = chance.randint(512, 1024) if number % 8 == 3 else chance.randint(16, 192)
        prompt = " ".join(f"w{chance.randrange(VOCABULARY)}" for _ in range(length))
        asked.append(Asked(arrival, prompt, chance.randint(16, 48)))
        arrival += chance.expovariate(rate) if rate < float("inf") else 0.0
    return asked


def figures(load: Sequence[Asked], found: Sequence[Answered], cpu: float) -> list[str]:
    """Cells of a row: throughput, times and CPU seconds."""
    tokens = sum(each.tokens for each in load)
    seconds = max(each.arrival + f.last for each, f in zip(load, found, strict=True))
    per_token = [
        (f.last - f.first) / (each.tokens - 1) for each, f in zip(load, found, strict=True)
    ]
    first = [f.first for f in found]
    milliseconds = (
        statistics.median(first),
        float(np.percentile(first, 90)),
        statistics.median(per_token),
    )
    return [
        f"{tokens / seconds:.0f}",
        *(f"{1e3 * each:,.0f}" for each in milliseconds[:2]),
        f"{1e3 * milliseconds[2]:.1f}",
        f"{1e3 * cpu / tokens:.1f}",
    ]


def load_section(folder: str, loads: dict[str, list[Asked]]) -> Iterator[str]:
    """All systems under all loads."""
    rows: dict[str, list[list[str]]] = {name: [] for name in loads}
    expected: dict[str, list[str]] = {}
    for name, answer in track(systems(folder).items(), "serving", "systems"):
        why = missing(name)
        if why is None:
            try:
                found = answer(list(loads.values()))
            except (RuntimeError, httpx.HTTPError, EOFError) as error:
                why = f"failed: {error}"
        if why is not None:
            for cells in rows.values():
                cells.append([name, why, *[""] * 5])
            continue
        for (load, asked), (answers, cpu) in zip(loads.items(), found, strict=True):
            texts = [each.text.strip() for each in answers]
            expected.setdefault(load, texts)
            same = sum(a == b for a, b in zip(texts, expected[load], strict=True))
            rows[load].append([name, *figures(asked, answers, cpu), f"{same} of {len(texts)}"])
    heading = ["system", "tokens/s", "TTFT P50, ms", "P90", "ms a token P50", "CPU ms a token"]
    for load, cells in rows.items():
        yield from (f"## {load}", "")
        yield from table([*heading, "answers of the first system"], cells)
        yield ""


def idle_section(folder: str, repetitions: int) -> Iterator[str]:
    """A short prompt on servers of one rank and of two, in turn."""
    with serving(distca(folder, 1), folder, 1) as one, serving(distca(folder, 2), folder, 1) as two:
        servers = {"1 rank": one, "2 ranks": two}
        spent: dict[str, list[list[float]]] = {name: [] for name in servers}
        for server in servers.values():
            server.ask([Asked(0.0, SHORT, SHORT_TOKENS)] * 2)
        moved = two.number("bytes_moved_total")
        for number in range(repetitions):
            turn = list(servers.items())
            for name, server in turn if number % 2 else turn[::-1]:
                # The API, a process that tracks resources, the engine, and the workers.
                pids = [pid for pid in server.pids if is_ours(pid)]
                before = [cpu_seconds([pid]) for pid in pids]
                # A prompt that the prefix cache does not have.
                server.ask([Asked(0.0, f"{SHORT} w{number}", SHORT_TOKENS)])
                after = [cpu_seconds([pid]) for pid in pids]
                taken = [b - a for a, b in zip(before, after, strict=True)]
                spent[name].append([taken[0], taken[1], *sorted(taken[2:], reverse=True)])
        moved = two.number("bytes_moved_total") - moved
        state = httpx.get(f"{two.url}/debug/state").json()
    members = sum(rank["tokens"] > 0 for rank in state["ranks"])
    rows, sums = [], {}
    for name, each in spent.items():
        mean = 1e3 * np.mean(each, axis=0) / SHORT_TOKENS
        sums[name] = [mean[1] + mean[2], mean.sum()]
        cells = [f"{x:.3f}" for x in mean] + [""] * (4 - len(mean))
        rows.append([name, *cells, *(f"{x:.3f}" for x in sums[name])])
    ratios = [b / a for a, b in zip(sums["1 rank"], sums["2 ranks"], strict=True)]
    rows.append(["ratio", *[""] * 4, *(f"{ratio:.3f}" for ratio in ratios)])
    yield from (
        "## A short prompt on an idle server",
        "",
        f"CPU milliseconds a token, mean of {repetitions} prompts of 9 tokens with answers of "
        f"{SHORT_TOKENS}, in turn on both servers, one thread to a process. On 2 ranks the last "
        f"iteration had {members} member, and {moved:,.0f} bytes moved.",
        "",
    )
    heading = ["server", "API", "engine", "worker", "other worker", "engine and member", "all"]
    yield from table(heading, rows)
    yield ""


class NoWorkers:
    """Stands for an engine's sockets: messages are encoded, and go nowhere."""

    def __init__(self, processes: int) -> None:
        self.message: Any = None
        self.parts: Collection[int] = ()
        self._backlog = Backlog(processes)

    def send(self, message: Any) -> None:
        if not isinstance(message, bytes):
            encode(message)

    def start(self, iteration: Any, parts: Collection[int]) -> None:
        """See `Workers`."""
        self.message, self.parts = iteration, parts
        list(self._backlog.tell(iteration, parts))

    def begin_step(self) -> None:
        """See `Workers`."""

    def end_step(self) -> None:
        """See `Workers`."""


def host_section(sequences: int, steps: int) -> Iterator[str]:
    """CPU time of an engine's iterations, and of a rank's plans."""
    rows = []
    for ranks, chunk, auto in itertools.product((2, 8), (0, 512), (False, True)):
        if auto and not chunk:
            continue
        strategy = _chooses(ranks) if auto else "pass-kv"
        engine_ms, plan_ms = host_cost(sequences, ranks, chunk, steps, strategy)
        what = f"{sequences} decoded" + (f", a chunk of {chunk}" if chunk else "")
        what += ", `--prefill-strategy auto`" if auto else ""
        both = [a + b for a, b in zip(engine_ms, plan_ms, strict=True)]
        cells = (f"{np.median(x):.2f} ({max(x):.2f})" for x in (engine_ms, plan_ms, both))
        rows.append([what, str(ranks), *cells])
    yield from (
        f"## Scheduling and planning with {sequences} sequences",
        "",
        "CPU milliseconds of an iteration in this process, median (most): the engine schedules, "
        "gives out blocks, encodes its message and takes what was chosen; each rank plans. "
        "Sequences of 1,000 tokens are shared by all ranks, in blocks of 16.",
        "",
    )
    yield from table(["fed", "ranks", "engine", "a rank's plan", "both"], rows)


def _chooses(ranks: int) -> Selector:
    """What chooses the strategy of chunks in a server of a model like this page's."""
    shape = AttentionShape(8, 4, 32, 4)
    return Machine.described(False, None, None).selector("simulated", shape, ranks, hurried=4)


def host_cost(
    sequences: int, ranks: int, chunk: int, steps: int, strategy: Strategy | Selector
) -> tuple[list[float], list[float]]:
    """Times iterations that decode a token of all sequences, beside a chunk of one more."""
    limits = SchedulerConfig(sequences + 1, sequences + max(chunk, 1000), 16, 64)
    sizes = 4096, ranks, 1, "pass-kv", limits, 16, 1 << 30, 0.9, False, 60.0
    settings = ServerConfig("", "float32", (None,), b"", *sizes)
    workers = NoWorkers(ranks)
    engine = EngineProcess(settings, workers, workers)
    engine.begin(sequences * 128, 1)
    owners: dict[int, list[int]] = {}

    def iterate(number: int) -> tuple[float, float]:
        begin = time.thread_time()
        assert engine.start_iteration()
        spent = time.thread_time() - begin
        parts = []
        for fed in workers.message.feed:
            owners.setdefault(fed.number, []).extend(fed.ranks)
            held = np.array(owners[fed.number], dtype=np.int64)
            parts.append(BatchEntry(fed.number, fed.start, fed.count, held))
        begin = time.thread_time()
        plan_iteration(parts, (Mask(),), 16, ranks, strategy)
        planned = time.thread_time() - begin
        chosen = [SampledToken(fed.number, 5, None) for fed in workers.message.feed if fed.samples]
        begin = time.thread_time()
        for rank in workers.parts:
            engine.take_done(ModelOutput(rank, number, [] if rank else chosen, 1, 0, 0.0, 0.0))
        return 1e3 * (spent + time.thread_time() - begin), 1e3 * planned

    for number in range(sequences):
        engine.take(AddRequest(number, 0, [number] * 1000, SamplingParams(max_tokens=1000)))
    number = 0
    while len(owners) < sequences or len(workers.message.feed) < sequences:
        iterate(number)
        number += 1
    found = []
    for _ in range(steps):
        number += 1
        if chunk:
            new = sequences + number
            engine.take(AddRequest(new, 0, [new % 900] * chunk, SamplingParams(max_tokens=1)))
        found.append(iterate(number))
    return [a for a, _ in found], [b for _, b in found]


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Formats a Markdown table."""
    for row in (heading, ["---"] * len(heading), *rows):
        yield f"| {' | '.join(row)} |"


def main() -> int:
    import torch
    import transformers

    parser = Parser(__doc__)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=40, help="short prompts in turn")
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    args = parser.parse_args()
    loads = {
        f"Poisson, {args.rate:g} requests/s": draw_load(args.requests, args.rate),
        "All requests at once": draw_load(args.requests, float("inf")),
    }
    with tempfile.TemporaryDirectory(prefix="served-") as folder:
        write_model(Path(folder), args.hidden_size, args.layers)
        page = [
            "# Serving under load",
            "",
            "`python benchmarks/serving/serving.py --output DIR`",
            "",
            f"{cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch "
            f"{torch.__version__}, transformers {transformers.__version__}. A Llama of "
            f"{args.layers} layers of {args.hidden_size}, float32, random weights; {args.requests} "
            "requests with prompts of 16 to 192 tokens, one of 8 of 512 to 1,024, and answers of "
            "16 to 48, the same for all systems, which run one after the other.",
            "",
            *load_section(folder, loads),
            *idle_section(folder, args.repetitions),
            *host_section(32, 200),
        ]
    text = "\n".join(page) + "\n"
    args.output.mkdir(parents=True, exist_ok=True)
    pages.write(args.output / "serving.md", text, __file__)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
