"""What vLLM's connector costs requests that it does not take: CPU seconds over vLLM without it.

    python benchmarks/serving/connector_cost.py --output DIR

It runs in an environment that has vLLM (`launch/setup.sh vllm` makes one for CPUs). One engine of
vLLM answers the same short prompts three times. Each of its steps runs once with our connector,
once with a connector that does nothing, and once with none, in an order that is drawn: two
processes, or two moments, would differ by more than what is measured. The prefill ranks are
connected meanwhile. The engine alone is measured: a server's routes, which know nothing of
connectors, would make the ratios smaller.

The thread that computes counts, and with our connector also the threads that the connector has.
The other threads of the process are those of torch's process groups: vLLM has them without a
connector, too.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import threading
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

OURS, NOTHING, NONE = "our connector", "a connector that does nothing", "no connector"
WAYS = (OURS, NOTHING, NONE)

Round = dict[str, float]
"""CPU seconds of each way."""


class Engine:
    """vLLM in this process, whose connector changes from step to step.

    Args:
        folder: folder of the model.
        address: where the prefill ranks listen.
        seed: draws the orders of the ways.
    """

    def __init__(self, folder: str, address: str, seed: int) -> None:
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
        self._worker, self._chance = kv_transfer_state, random.Random(seed)
        self._scheduler = self._model.llm_engine.engine_core.engine_core.scheduler
        ours = self._scheduler.connector, self._worker._KV_CONNECTOR_AGENT
        self._connectors = {OURS: ours, NOTHING: idle_connectors(ours[0]), NONE: (None, None)}
        self._step, self._model.llm_engine.step = self._model.llm_engine.step, self._timed_step
        # Ways of the steps of a load, one for each time that it is answered.
        self._orders: list[list[str]] = []
        self._turn = self._steps = 0
        self._seconds = dict.fromkeys(WAYS, 0.0)

    @property
    def asked(self) -> int:
        """Prompts that the ranks were asked for."""
        return int(self._connectors[OURS][0]._asks._next)

    def wait(self) -> None:
        """Waits until its scheduler and its worker know the ranks."""
        scheduler, worker = self._connectors[OURS]
        due = time.monotonic() + 300
        while not (scheduler._asks._client.ready and worker._loads._client.ready):
            assert time.monotonic() < due, "the ranks are not connected"
            time.sleep(0.1)

    def _timed_step(self) -> Any:
        if self._steps == len(self._orders):
            self._orders.append(self._chance.sample(WAYS, len(WAYS)))
        way = self._orders[self._steps][self._turn]
        self._steps += 1
        self._scheduler.connector, self._worker._KV_CONNECTOR_AGENT = self._connectors[way]
        before = time.thread_time()
        found = self._step()
        self._seconds[way] += time.thread_time() - before
        return found

    def answer(self, load: Sequence[Any]) -> tuple[Round, list[list[str]]]:
        """CPU seconds in which it answers a load in each way, and its answers of all times."""
        from vllm import SamplingParams

        sampling = [
            SamplingParams(temperature=0, max_tokens=each.tokens, ignore_eos=True) for each in load
        ]
        self._orders, self._seconds, answers = [], dict.fromkeys(WAYS, 0.0), []
        whole, others = time.thread_time(), thread_seconds()
        for self._turn in range(len(WAYS)):
            self._steps = 0
            self._model.reset_prefix_cache()
            found = self._model.generate([each.prompt for each in load], sampling, use_tqdm=False)
            answers.append([each.outputs[0].text for each in found])
        # What is no step, and the time of other threads, is that of a third of these moments.
        rest = time.thread_time() - whole - sum(self._seconds.values())
        seconds = {way: self._seconds[way] + rest / len(WAYS) for way in WAYS}
        seconds[OURS] += (thread_seconds() - others) / len(WAYS)
        return seconds, answers

    def load(self, load: Sequence[Any]) -> None:
        """Answers a load with our connector alone."""
        self._orders = [[OURS]] * 1000
        self._turn = self._steps = 0
        self._model.generate([each.prompt for each in load], use_tqdm=False)


def idle_connectors(ours: Any) -> tuple[Any, Any]:
    """Connectors of vLLM's base class that do nothing, of its scheduler and of its worker.

    Args:
        ours: our connector of the scheduler.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    class Idle(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
        _metadata = base.KVConnectorMetadata()

        def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
            return 0, False

        def update_state_after_alloc(self, *_: Any) -> None:
            pass

        def build_connector_meta(self, _: Any) -> Any:
            return self._metadata

        def request_finished_all_groups(self, *_: Any) -> tuple[bool, None]:
            return False, None

        def start_load_kv(self, *_: Any, **__: Any) -> None:
            pass

        def wait_for_layer_load(self, _: Any) -> None:
            pass

        def save_kv_layer(self, *_: Any, **__: Any) -> None:
            pass

        def wait_for_save(self) -> None:
            pass

    scheduler, worker = (
        Idle(ours._vllm_config, role, ours._kv_cache_config)
        for role in (base.KVConnectorRole.SCHEDULER, base.KVConnectorRole.WORKER)
    )
    return scheduler, worker


def thread_seconds() -> float:
    """CPU seconds of the threads that our connector has: of its clients, and of ZeroMQ."""
    clients = {each.native_id for each in threading.enumerate() if each.name == "distca prefill"}
    assert len(clients) == 2, "those of the scheduler and of the worker"
    total = 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) in clients or (task / "comm").read_text().startswith("ZMQbg"):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def measure(pipe: Connection, folder: str, address: str, args: Any, seed: int) -> None:
    """Answers in all ways, in all rounds: the main function of the engine's process."""
    engine = Engine(folder, address, seed)
    engine.wait()
    engine.load(draw(1, LONG, 2 * MIN_TOKENS, 1.0, seed))
    assert engine.asked == 1, "the ranks are not connected"
    rounds = []
    for number in range(WARM + args.rounds):
        load = draw(args.requests, SHORT, MIN_TOKENS, 1.0, 1000 * seed + number)
        seconds, answers = engine.answer(load)
        assert all(each == answers[0] for each in answers), "other answers"
        rounds.append(seconds)
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


def ratios(rounds: Sequence[Round], way: str) -> list[float]:
    """CPU seconds of each round in a way over those without a connector."""
    return [each[way] / each[NONE] for each in rounds]


def page(found: Sequence[Sequence[Round]], busy: float, args: Any) -> str:
    """The page of the results.

    Args:
        found: for each start its rounds.
        busy: processes that wanted to run when it began, in the mean of a minute.
        args: of the command line.
    """
    rows = []
    for number, rounds in enumerate(found):
        cells = [f"{sum(each[NONE] for each in rounds):.2f}"]
        for way in (NOTHING, OURS):
            parts = statistics.quantiles(ratios(rounds, way), n=4)
            cells.append(f"{parts[1]:.4f} ({parts[0]:.3f} to {parts[2]:.3f})")
        rows.append([number + 1, *cells])
    of_starts = {
        way: [statistics.median(ratios(rounds, way)) for rounds in found] for way in WAYS[:2]
    }
    told = " ".join(
        f"With {way}: {statistics.median(each):.4f} in the median of the starts, "
        f"{min(each):.4f} to {max(each):.4f}."
        for way, each in of_starts.items()
    )
    head = ["start", f"CPU s with {NONE}", f"{NOTHING}, ratio", f"{OURS}, ratio"]
    return "\n\n".join(
        [
            "# What the connector costs short requests",
            f"`{pages.typed('benchmarks/serving/connector_cost.py')}`",
            f"{cpu_name()}, {os.cpu_count()} cores, {busy:.1f} processes wanted them in the "
            f"minute before, Python {platform.python_version()}, vllm-cpu "
            f"{importlib.metadata.version('vllm-cpu')}, its engine without a server. A Llama of "
            f"{args.layers} layers of {args.hidden_size}, float32, random weights. "
            f"{args.requests} requests a round, which arrive at once; prompts have 16 to 512 "
            "tokens, answers 8 to 32. The same process answers a round three times, with equal "
            "answers. Each of vLLM's steps runs once with our connector, once with a connector of "
            "vLLM's base class that does nothing, and once with none, in an order that is drawn. "
            f"There are {args.rounds} rounds after {WARM} that are not counted. The engine starts "
            f"{len(found)} times. The {args.ranks} prefill ranks are connected, and not asked.",
            f"CPU seconds over those with {NONE}. {told} A connector that does nothing costs what "
            "vLLM's interface costs: what vLLM itself does in each step, layer and request once "
            "there is a connector.",
            "Cells: medians of the rounds (their middle half).",
            pages.table(head, rows, "---:"),
        ]
    )


def main() -> int:
    """Compares the ways."""
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
    busy = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        write_model(Path(folder), args.hidden_size, args.layers, POSITIONS)
        found = [
            compare(folder, args, number)
            for number in track(range(args.starts), "answering", "starts")
        ]
    pages.save(args.output, "connector_cost", page(found, busy, args), __file__, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
