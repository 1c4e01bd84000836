"""What vLLM's connector costs requests that it does not take: CPU seconds over vLLM alone.

    python benchmarks/serving/connector_cost.py --output DIR

It runs in an environment that has vLLM (`launch/setup.sh vllm` makes one for CPUs). vLLM's engine
answers the same short prompts twice in one process, with its connector and after that was taken out
of its scheduler and its worker, or the other way round. Two processes would differ by up to a tenth
with where their memory lies, which is more than what is measured. The prefill ranks are connected
meanwhile. The engine alone is measured: a server's routes, which know nothing of connectors, would
make the ratio smaller. With the connector all threads of the process count, without it the one that
computes: the others are the connector's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.serving.http_servers import write_model
from benchmarks.serving.vllm_prefill import (
    ALONE,
    CONNECTED,
    MIN_TOKENS,
    POSITIONS,
    draw,
    free_address,
    prefill_ranks,
    transfer_config,
)
from distca.machine import cpu_name
from distca.progress import track

SHORT, LONG = 0.0, 1.0
"""Parts of the prompts that are long."""

WARM = 3
"""Rounds that are not counted."""

Round = dict[str, float]
"""CPU seconds of both ways."""


class Engine:
    """vLLM in this process, whose connector comes and goes.

    Args:
        folder: folder of the model.
        address: where the prefill ranks listen.
    """

    def __init__(self, folder: str, address: str) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
        }
        import torch
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer import kv_transfer_state

        torch.set_num_threads(1)
        # As vLLM's workers on CPUs do.
        torch.accelerator.empty_cache = lambda: None  # type: ignore[assignment]
        self._model = LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=POSITIONS,
            max_num_batched_tokens=2048,
            kv_transfer_config=KVTransferConfig(**transfer_config(address)),
        )
        self._worker = kv_transfer_state
        self._scheduler = self._model.llm_engine.engine_core.engine_core.scheduler
        self._connectors = self._scheduler.connector, self._worker._KV_CONNECTOR_AGENT

    @property
    def asked(self) -> int:
        """Prompts that the ranks were asked for."""
        return int(self._connectors[0]._asks._next)

    def wait(self) -> None:
        """Waits until its scheduler and its worker know the ranks."""
        scheduler, worker = self._connectors
        due = time.monotonic() + 300
        while not (scheduler._asks._client.ready and worker._loads._client.ready):
            assert time.monotonic() < due, "the ranks are not connected"
            time.sleep(0.1)

    def answer(self, way: str, load: Sequence[Any]) -> tuple[float, list[str]]:
        """CPU seconds in which it answers a load, and its answers."""
        from vllm import SamplingParams

        there = self._connectors if way == CONNECTED else (None, None)
        self._scheduler.connector, self._worker._KV_CONNECTOR_AGENT = there
        self._model.reset_prefix_cache()
        sampling = [
            SamplingParams(temperature=0, max_tokens=each.tokens, ignore_eos=True) for each in load
        ]
        clock = time.process_time if way == CONNECTED else time.thread_time
        before = clock()
        found = self._model.generate([each.prompt for each in load], sampling, use_tqdm=False)
        return clock() - before, [each.outputs[0].text for each in found]


def measure(pipe: Connection, folder: str, address: str, args: Any, seed: int) -> None:
    """Answers in both ways, in all rounds: the main function of the engine's process."""
    engine = Engine(folder, address)
    engine.wait()
    engine.answer(CONNECTED, draw(1, LONG, 2 * MIN_TOKENS, 1.0, seed))
    assert engine.asked == 1, "the ranks are not connected"
    rounds = []
    for number in range(WARM + args.rounds):
        load = draw(args.requests, SHORT, MIN_TOKENS, 1.0, 1000 * seed + number)
        ways = (ALONE, CONNECTED) if number % 2 else (CONNECTED, ALONE)
        found = {way: engine.answer(way, load) for way in ways}
        assert found[ALONE][1] == found[CONNECTED][1], "other answers"
        rounds.append({way: seconds for way, (seconds, _) in found.items()})
    assert engine.asked == 1, "short requests went to the ranks"
    pipe.send(rounds[WARM:])


def compare(folder: str, args: Any, seed: int) -> list[Round]:
    """Starts the ranks and the engine; returns the CPU seconds of each round."""
    context = multiprocessing.get_context("spawn")
    pipe, its = context.Pipe()
    address = free_address()
    with prefill_ranks(folder, address, args.ranks):
        process = context.Process(target=measure, args=(its, folder, address, args, seed))
        process.start()
        its.close()
        try:
            rounds: list[Round] = pipe.recv()
        finally:
            process.terminate()
            process.join()
    return rounds


def ratio(rounds: Sequence[Round]) -> float:
    """CPU seconds with the connector over those without: the median of the rounds."""
    return statistics.median(each[CONNECTED] / each[ALONE] for each in rounds)


def page(found: Sequence[Sequence[Round]], args: Any) -> str:
    """The page of the results."""
    rows = []
    for number, rounds in enumerate(found):
        parts = statistics.quantiles((each[CONNECTED] / each[ALONE] for each in rounds), n=4)
        alone, with_it = (sum(one[name] for one in rounds) for name in (ALONE, CONNECTED))
        rows.append(
            [
                number + 1,
                f"{alone:.2f}",
                f"{with_it:.2f}",
                f"{ratio(rounds):.4f}",
                f"{parts[0]:.3f} to {parts[-1]:.3f}",
            ]
        )
    ratios = [ratio(rounds) for rounds in found]
    head = ["start", f"CPU s of {ALONE}", "with the connector", "median ratio", "middle half"]
    return "\n\n".join(
        [
            "# What the connector costs short requests",
            f"`{pages.typed('benchmarks/serving/connector_cost.py')}`",
            f"{cpu_name()}, Python {platform.python_version()}, vllm-cpu "
            f"{importlib.metadata.version('vllm-cpu')}, its engine without a server. A Llama of "
            f"{args.layers} layers of {args.hidden_size}, float32, random weights. "
            f"{args.requests} requests a round, which arrive at once; prompts have 16 to 512 "
            "tokens, answers 8 to 32. The same process answers them with its connector and "
            f"without, with equal answers, in {args.rounds} rounds after {WARM} that are not "
            f"counted. It starts {len(found)} times. The {args.ranks} prefill ranks are "
            "connected, and not asked.",
            f"CPU seconds with the connector over vLLM alone: {statistics.median(ratios):.4f} in "
            f"the median of the starts, {min(ratios):.4f} to {max(ratios):.4f}.",
            pages.table(head, rows, "---:"),
        ]
    )


def main() -> int:
    """Compares both ways."""
    parser = Parser(__doc__)
    parser.add_argument("--starts", type=int, default=5, help="of the engine")
    parser.add_argument("--rounds", type=int, default=40, help="after each start")
    parser.add_argument("--requests", type=int, default=20, help="of a round")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: give at least 2")
    if importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed: launch/setup.sh vllm makes an environment with it")
    # So that SIGTERM ends the ranks, too.
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
