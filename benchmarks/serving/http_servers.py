"""Servers of OpenAI's routes in processes of their own, for benchmarks."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

VOCABULARY = 1000


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
    """Writes a Llama of random weights whose tokens are words, and which never stops."""
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
