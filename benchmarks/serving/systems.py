"""Systems that answer prompts, for `serving.py`: servers, and `generate` in a process."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

VOCABULARY = 1000
SHORT = "w1 w2 w3 w4 w5 w6 w7 w8"


@dataclass(frozen=True)
class Asked:
    """A request: seconds after the first, its prompt, and the tokens of its answer."""

    arrival: float
    prompt: str
    tokens: int


@dataclass
class Answered:
    """A request's answer, and when its first and its last token came, after its arrival."""

    text: str = ""
    first: float = 0.0
    last: float = 0.0


def write_model(folder: Path, hidden: int, layers: int, positions: int = 2048) -> None:
    """Writes a Llama of random weights, each token of which is a word, and which never stops."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=positions,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", unk_token="w0", padding_side="left"
    ).save_pretrained(folder)


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU seconds of processes so far, of all their threads."""
    return sum(
        int((task / "schedstat").read_text().split()[0]) / 1e9
        for pid in pids
        for task in Path(f"/proc/{pid}/task").iterdir()
    )


def tree_of(pid: int) -> list[int]:
    """A process and all that it started: children come behind their parents."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return [pid, *(each for child in children for each in tree_of(child))]


def is_ours(pid: int) -> bool:
    """Whether a process is not the one that Python starts to track resources."""
    return b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()


class Server:
    """A server in processes of its own.

    Args:
        command: its command; `{port}` is replaced by a free port.
        model: name by which it knows the model.
        threads: threads of each process's kernels; None: as it chooses.
    """

    def __init__(self, command: Sequence[str], model: str, threads: int | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url, self.model = f"http://127.0.0.1:{port}", model
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it is read at the end)
        self._process = subprocess.Popen(
            [word.format(port=port) for word in command],
            env=environment,
            stdout=self._log,
            stderr=self._log,
        )
        end = time.monotonic() + 300
        while not self._is_there():
            if self._process.poll() is not None or time.monotonic() > end:
                self.close()
                raise RuntimeError(self.log())
            time.sleep(0.2)

    def _is_there(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def pids(self) -> list[int]:
        """Numbers of its processes."""
        return tree_of(self._process.pid)

    def log(self) -> str:
        """The last line that it wrote."""
        self._log.seek(0)
        return (self._log.read().strip().splitlines() or ["no word"])[-1]

    def number(self, name: str) -> float:
        """A number of distca's metrics."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"distca:{name}"))

    def ask(self, asked: Sequence[Asked]) -> list[Answered]:
        """Asks as requests arrive, and reads their streams."""
        return asyncio.run(self._ask(asked))

    async def _ask(self, asked: Sequence[Asked]) -> list[Answered]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=600, limits=limits) as client:
            begin = time.perf_counter()
            return await asyncio.gather(*(self._one(client, each, begin) for each in asked))

    async def _one(self, client: httpx.AsyncClient, asked: Asked, begin: float) -> Answered:
        await asyncio.sleep(begin + asked.arrival - time.perf_counter())
        answered, arrived = Answered(), begin + asked.arrival
        body = {"model": self.model, "prompt": asked.prompt, "max_tokens": asked.tokens}
        body |= {"temperature": 0, "stream": True}
        async with client.stream("POST", f"{self.url}/v1/completions", json=body) as stream:
            stream.raise_for_status()
            async for line in stream.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                choices = json.loads(line.removeprefix("data: "))["choices"]
                if choices and choices[0]["text"]:
                    answered.text += choices[0]["text"]
                    answered.last = time.perf_counter() - arrived
                    answered.first = answered.first or answered.last
        return answered

    def close(self) -> None:
        """Ends it, and all that it started."""
        pids = self.pids if self._process.poll() is None else []
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            for pid in reversed(pids):
                os.kill(pid, 9)
            self._process.wait()


@contextmanager
def serving(*args: Any, **kwargs: Any) -> Iterator[Server]:
    """Runs a server as long as it is needed."""
    server = Server(*args, **kwargs)
    try:
        yield server
    finally:
        server.close()


def generate(folder: str, batch: int, loads: Sequence[Sequence[Asked]], pipe: Any) -> None:
    """Answers by transformers' `generate`, so many at a time: the main function of a process.

    A batch is as long as its longest answer; all its tokens count as streamed when they are made.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    times: list[float] = []

    def clock(ids: Any, scores: Any) -> Any:
        times.append(time.perf_counter())
        return scores

    def answer(asked: Sequence[Asked], begin: float) -> list[Answered]:
        rows = tokenizer([each.prompt for each in asked], return_tensors="pt", padding=True)
        prompt = rows["input_ids"].shape[1]
        times.clear()
        with torch.no_grad():
            out = model.generate(
                input_ids=rows["input_ids"],
                attention_mask=rows["attention_mask"],
                max_new_tokens=max(each.tokens for each in asked),
                do_sample=False,
                logits_processor=LogitsProcessorList([clock]),
            )
        return [
            Answered(
                tokenizer.decode(row[prompt : prompt + each.tokens], skip_special_tokens=True),
                times[0] - begin - each.arrival,
                times[each.tokens - 1] - begin - each.arrival,
            )
            for row, each in zip(out, asked, strict=True)
        ]

    answer([Asked(0.0, SHORT, 8)], 0.0)
    for load in loads:
        before, begin = time.process_time(), time.perf_counter()
        found: list[Answered] = []
        while len(found) < len(load):
            now = time.perf_counter() - begin
            waiting = [each for each in load[len(found) :] if each.arrival <= now][:batch]
            if waiting:
                found += answer(waiting, begin)
            else:
                time.sleep(load[len(found)].arrival - now)
        pipe.send((found, time.process_time() - before))


def systems(folder: str) -> dict[str, Callable[[list[list[Asked]]], list[Any]]]:
    """What answers loads, by name: a function that gives answers and CPU seconds of each."""

    def generated(batch: int, loads: list[list[Asked]]) -> list[Any]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=generate, args=(folder, batch, loads, theirs), daemon=True)
        process.start()
        found = [ours.recv() for _ in loads]
        process.join()
        return found

    def served(command: Sequence[str], loads: list[list[Asked]]) -> list[Any]:
        found = []
        with serving(command, folder) as server:
            server.ask([Asked(0.0, SHORT, 8)] * 2)
            for load in loads:
                before = cpu_seconds(server.pids)
                answers = server.ask(load)
                found.append((answers, cpu_seconds(server.pids) - before))
        return found

    theirs = [sys.executable, "-m", "transformers.cli.transformers", "serve", folder]
    theirs += ["--device", "cpu", "--port", "{port}", "--log-level", "error"]
    return {
        "`generate`, one at a time": lambda loads: generated(1, loads),
        "`generate`, all that wait": lambda loads: generated(64, loads),
        "`transformers serve`": lambda loads: served(theirs, loads),
        "`transformers serve`, continuous batching": lambda loads: served(
            [*theirs, "--continuous-batching"], loads
        ),
        "`vllm serve`": lambda loads: served(["vllm", "serve", folder, "--port", "{port}"], loads),
        "`distca serve`, 1 rank": lambda loads: served(distca(folder, 1), loads),
        "`distca serve`, 2 ranks": lambda loads: served(distca(folder, 2), loads),
    }


def missing(name: str) -> str | None:
    """Says what a system lacks here."""
    needed = {"`transformers serve`": "accelerate", "`vllm": "vllm"}
    for begin, package in needed.items():
        if name.startswith(begin) and importlib.util.find_spec(package) is None:
            return f"not run: {package} is not installed"
    return None


def distca(folder: str, ranks: int) -> list[str]:
    """The command of our server."""
    command = [sys.executable, "-m", "distca", "serve", folder, "--port", "{port}"]
    command += ["--context-parallel-size", str(ranks), "--context-parallel-threshold", "512"]
    return [*command, "--disable-uvicorn-access-log"]
