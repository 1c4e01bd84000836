"""Prefill ranks of a test, and an engine that asks them for keys and values."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distca.inference.defaults import configure
from distca.inference.models import ServedModel, read_model
from distca.plan.span import Int64s
from distca.prefill.client import LANDING_BYTES, Ended, PrefillClient
from distca.prefill.facts import model_facts
from distca.prefill.front import Front
from distca.prefill.heads import HeadSlices
from distca.prefill.messages import Hello, Join, TransferChoice, Welcome
from distca.prefill.ranks import PrefillCounts, PrefillRank
from distca.schedule.serving.cdsp import Coefficients, PrefillModel, Search
from distca.schedule.serving.cdsp.growing import GrowingGroups
from distca.schedule.serving.handoff import protocol
from distca.schedule.serving.handoff.protocol import Transfer
from support.ports import free_port
from support.small_models import VOCABULARY

ROOT = Path(__file__).parents[2]
CHUNK = 40
LEASE = 60.0
"""Seconds: a busy machine may stop a process for five, after which prompts would be given up."""

_TIMES = PrefillModel(
    "any", "any", {n: Coefficients(5.0 * (n - 1), 1 / n, 0.0, 0.0) for n in (1, 2, 4)}
)
GROWING = GrowingGroups(Search(_TIMES, smallest_chunk=4))
"""Ten tokens are as soon computed by one rank as by two."""


@dataclass(frozen=True)
class RankDone:
    """What a rank has at the end.

    Attributes:
        counts: what it has computed and sent.
        bytes_planned: bytes to other ranks.
        referenced: blocks that are still held.
        log: what it has logged.
    """

    counts: PrefillCounts
    bytes_planned: int
    referenced: int
    log: tuple[str, ...]


class _Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


NEEDS_NIXL = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed here: pip install nixl"
)
BY_EACH = pytest.mark.parametrize("transfer", ["tcp", pytest.param("nixl", marks=NEEDS_NIXL)])
"""Rows come by TCP, and by NIXL where it is installed."""


def prefill_on_a_rank(
    folder: Path,
    address: str,
    prompts: int,
    changes: dict[str, Any],
    chunk: int = CHUNK,
    transfer: TransferChoice = "auto",
    tensor_parallel_size: int = 1,
) -> RankDone:
    """Computes prompts by transformers' code until so many have ended."""
    model = read_model(str(folder), torch.float32, tensor_parallel_size)
    return prefill_with(model, address, prompts, changes, chunk, transfer=transfer)


def prefill_with(
    model: ServedModel,
    address: str,
    prompts: int,
    changes: dict[str, Any],
    chunk: int = CHUNK,
    lease: float = LEASE,
    transfer: TransferChoice = "auto",
) -> RankDone:
    """Computes prompts until so many have ended."""
    processes = dist.get_world_size()
    count = processes // model.tensor_parallel_size
    settings = {"block_size": 4, "max_num_batched_tokens": 96, "cache_bytes": 1 << 24}
    config = configure(model, count, **(settings | changes))
    rank = PrefillRank(config, model, chunk, lease, transfer)
    front = None
    if dist.get_rank() == 0:
        dtype = str(model.dtype).removeprefix("torch.")
        facts = model_facts(model.config, model.path, dtype, model.frequencies, model.quantization)
        layers = len(model.windows)
        welcome = Welcome("", processes, chunk, layers, rank.capacity, lease, agents=rank.agents)
        front = Front(address, facts, welcome, rank.slices, rank.transfers)
        rank.listen(front)
    log, kept = logging.getLogger("distca.prefill"), _Kept()
    level = log.level
    log.setLevel(logging.DEBUG)
    log.addHandler(kept)
    try:
        while rank.counts.prompts + rank.counts.ended < prompts:
            rank.iterate()
        blocks = rank.engine.cache
        referenced = sum(blocks.referenced(each) for each in range(count))
        return RankDone(rank.counts, rank.engine.counts.bytes_moved, referenced, tuple(kept.lines))
    finally:
        log.removeHandler(kept)
        log.setLevel(level)
        rank.close()


@contextmanager
def front_alone(
    address: str, facts: Mapping[str, str], layers: int, kv_heads: int, capacity: int = 1 << 20
) -> Iterator[tuple[Front, list[int]]]:
    """A front without ranks, which refuses all prompts: it, and how many tokens each has had."""
    welcome = Welcome("", 1, 1024, layers, capacity, 5.0)
    front, over = Front(address, facts, welcome, HeadSlices(kv_heads, 1, 1)), threading.Event()
    asked: list[int] = []

    def pump() -> None:
        while not over.is_set():
            front.pump(0.05)
            for each in front.take():
                if isinstance(each, Join):
                    asked.append(len(each.prefill.tokens))
                    front.say(each.number, protocol.Drained.__name__, "nobody computes it")
                    front.forget(each.number)

    thread = threading.Thread(target=pump)
    thread.start()
    try:
        yield front, asked
    finally:
        over.set()
        thread.join()
        front.close()


class Reader:
    """An engine with one process, which keeps the rows that it is given.

    Args:
        folder: folder of the model.
        address: where the prefill ranks listen.
        heads: first head of keys, and how many; None: all.
        worker: number of this process, and how many there are.
        engine: name of the engine.
        transfer: how rows come.
        landing_bytes: memory for those that come by NIXL.
        facts: what it says of the model that is not so.
    """

    def __init__(
        self,
        folder: Path,
        address: str,
        heads: tuple[int, int] | None = None,
        worker: tuple[int, int] = (0, 1),
        engine: str = "engine",
        transfer: TransferChoice = "auto",
        landing_bytes: int = LANDING_BYTES,
        **facts: str,
    ) -> None:
        model = read_model(str(folder), torch.float32)
        first, count = heads or (0, model.kv_heads)
        known = (
            model_facts(model.config, str(folder), "float32", model.frequencies, model.quantization)
            | facts
        )
        hello = Hello(known, engine, *worker, "", first, count)
        self._shape = len(model.windows), count, model.shape.head_dim
        self.rows: dict[Transfer, tuple[torch.Tensor, torch.Tensor]] = {}
        self.written: dict[Transfer, torch.Tensor] = {}
        self.late: list[Transfer] = []
        self.ended: dict[Transfer, str] = {}
        self.client = PrefillClient(
            address,
            hello,
            model.shape.head_dim,
            torch.float32,
            self._take,
            transfer,
            landing_bytes=landing_bytes,
        )

    def begin(self, number: int, tokens: Sequence[int], start: int = 0, **settings: Any) -> None:
        """Asks for a prompt."""
        layers, heads, dim = self._shape
        transfer, size = Transfer(number), (layers, len(tokens), heads, dim)
        self.rows[transfer] = torch.full(size, torch.nan), torch.full(size, torch.nan)
        self.written[transfer] = torch.zeros(size[:2], dtype=torch.int64)
        self.client.begin(transfer, tokens, start, **settings)

    def poll(self, seconds: float = 0.05) -> None:
        """Reads what has come."""
        self.note(self.client.poll(seconds))

    def is_ready_after(self, instance: str) -> bool:
        """Whether other ranks than those of a run are there."""
        welcome = self.client.welcome
        return self.client.ready and welcome is not None and welcome.instance != instance

    def note(self, ended: Sequence[Ended]) -> None:
        for each in ended:
            assert each.transfer not in self.ended, "a prompt ended twice"
            self.ended[each.transfer] = each.failure

    def until(self, done: Callable[[], bool], seconds: float = 180.0) -> None:
        """Reads what comes until something holds."""
        due = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < due, "nothing more comes"
            self.poll()

    def _take(
        self, transfer: Transfer, layer: int, at: Int64s, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        if transfer in self.ended:
            self.late.append(transfer)
        index = torch.from_numpy(at)
        for memory, rows in zip(self.rows[transfer], (k, v), strict=True):
            memory[layer, index] = rows
        self.written[transfer][layer, index] += 1


def free_address() -> str:
    """An address of this machine at which nobody listens."""
    return f"tcp://127.0.0.1:{free_port()}"


def prompt(seed: int, tokens: int) -> list[int]:
    """Tokens of a prompt; those of one seed begin alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (tokens,), generator=generator).tolist()


def reference(folder: Path, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of transformers' own model, `[layers, tokens, heads, head_dim]`."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    with torch.no_grad():
        cache = model(torch.tensor([list(tokens)]), use_cache=True).past_key_values
    keys, values = (
        torch.stack([getattr(layer, name)[0].transpose(0, 1) for layer in cache.layers])
        for name in ("keys", "values")
    )
    return keys, values


@contextmanager
def in_background(function: Callable[[], Any]) -> Iterator[list[Any]]:
    """Runs a function on a thread; its result, or what it raised, is in the list at the end."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield results
    finally:
        thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]


@contextmanager
def prefill_command(
    folder: Path, address: str, lease: float, *flags: str
) -> Iterator[subprocess.Popen]:
    """`distca prefill` with two ranks unless flags say otherwise, in processes of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        *(sys.executable, "-m", "distca", "prefill", str(folder)),
        *("--context-parallel-size", "2", "--port", address.rsplit(":", 1)[1]),
        *("--lease", str(lease), "--step-timeout", "20", "--kv-cache-memory-bytes", "2000000"),
        *("--max-num-batched-tokens", "64", "--max-num-seqs", "8", *flags),
    ]
    with (
        (folder / "prefill.log").open("w") as log,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=log
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    """Processes of the ranks."""
    found = []
    for task in Path(f"/proc/{launcher.pid}/task").glob("*/children"):
        found += [int(child) for child in task.read_text().split()]
    return sorted(pid for pid in found if b"prefill" in Path(f"/proc/{pid}/cmdline").read_bytes())
