"""`vllm serve` with the connector, and `distca prefill` beside it, as a user starts them."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

ROOT = Path(__file__).parents[2]
MIN_TOKENS = 64
LONGEST = 8192
"""Tokens of the longest prompt."""

POSITIONS = LONGEST + 256
"""With room for the answer, and for what surrounds a chat."""


def connector(address: str, **extra: Any) -> str:
    """Value of `--kv-transfer-config`."""
    settings = {"distca_address": address, "distca_min_tokens": MIN_TOKENS} | extra
    return json.dumps(
        {
            "kv_connector": "DistCAConnector",
            "kv_connector_module_path": "distca.vllm",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings,
        }
    )


@functools.cache
def _metadata() -> tempfile.TemporaryDirectory[str]:
    """A folder with what pip would write of the project, by which vLLM finds its plugins."""
    folder = tempfile.TemporaryDirectory(prefix="distca-metadata-")
    written = Path(folder.name) / "distca-0.dist-info"
    written.mkdir()
    (written / "METADATA").write_text("Metadata-Version: 2.1\nName: distca\nVersion: 0\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (written / "entry_points.txt").write_text("\n".join(lines))
    return folder


def environment() -> dict[str, str]:
    """Of both commands, as where the project is installed."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), _metadata().name)),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # A route that forgets vLLM's prefix cache.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


@contextmanager
def started(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen]:
    """Runs a command until it is no more needed."""
    with (
        log.open("a") as file,
        subprocess.Popen(
            command, env=environment(), stdout=file, stderr=subprocess.STDOUT, cwd=log.parent
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


@dataclass(frozen=True)
class Server:
    """A running `vllm serve`.

    Attributes:
        url: where it listens.
        folder: folder of the model.
        address: where prefill ranks are looked for.
        log: what it has said.
    """

    url: str
    folder: Path
    address: str
    log: Path

    def reset(self) -> None:
        """Lets vLLM forget the keys and values of earlier prompts."""
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")
        urllib.request.urlopen(request, timeout=30).close()

    def metrics(self) -> dict[str, float]:
        """Metrics of the connector: names and labels without those of the engine, and values."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        found = [re.match(r"vllm:distca_(\w+)\{(.*)\} (\S+)$", line) for line in lines]
        labels = r'(engine|model_name)="[^"]*",?'
        return {
            match[1] + re.sub(labels, "", match[2]).strip(","): float(match[3])
            for match in found
            if match is not None and not match[1].endswith(("_bucket", "_created"))
        }

    def used(self) -> float:
        """Part of vLLM's blocks that requests hold."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        name = "vllm:kv_cache_usage_perc{"
        (found,) = (float(line.split()[-1]) for line in lines if line.startswith(name))
        return found

    def answers(self, bodies: Sequence[dict[str, Any]], at_once: int = 64) -> list[Any]:
        """Answers to requests, many at once; None for those that were given up."""
        return asyncio.run(self._answers(bodies, at_once))

    async def _answers(self, bodies: Sequence[dict[str, Any]], at_once: int) -> list[Any]:
        line = asyncio.Semaphore(at_once)
        url = f"{self.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600) as client:

            async def ask(body: dict[str, Any]) -> Any:
                async with line:
                    return await _ask(client, dict(body))

            return await asyncio.gather(*map(ask, bodies))


async def _ask(client: openai.AsyncOpenAI, body: dict[str, Any]) -> Any:
    """Asks for an answer; `give_up` is the seconds after which the client goes away."""
    give_up, extra = body.pop("give_up", None), body.pop("extra_body", None)
    route: Any = client.chat.completions if "messages" in body else client.completions
    try:
        async with asyncio.timeout(give_up):
            answer = await route.create(**body, extra_body=extra)
            if not body.get("stream"):
                return _said(answer.choices[0])
            parts = [_said(part.choices[0]) async for part in answer if part.choices]
            return "".join(parts)
    except TimeoutError:
        return None


def _said(choice: Any) -> str:
    """Text of a choice, or of a part of it that was streamed, and arguments of its tool calls."""
    message = getattr(choice, "message", None) or getattr(choice, "delta", None)
    if message is None:
        return str(choice.text)
    calls = message.tool_calls or []
    return (message.content or "") + "".join(each.function.arguments or "" for each in calls)


@contextmanager
def vllm_serve(folder: Path, address: str, port: int, log: Path, *flags: str) -> Iterator[Server]:
    """`vllm serve` with the connector."""
    flags = ("--kv-transfer-config", connector(address, distca_connect_seconds=1), *flags)
    with started(serve_command(folder, port, *flags), log) as process:
        url = f"http://127.0.0.1:{port}"
        due = time.monotonic() + 900
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < due, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield Server(url, folder, address, log)


def serve_command(folder: Path, port: int, *flags: str) -> list[str]:
    """`vllm serve`, as it is called where the package for CPUs is installed."""
    return [
        # `vllm serve` looks for a package named vllm, and that for CPUs is named otherwise.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--served-model-name", "model", "--dtype", "float32", "--enforce-eager"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *(
            "--max-model-len",
            str(POSITIONS),
            "--max-num-batched-tokens",
            "2048",
            "--port",
            str(port),
        ),
        *flags,
    ]


@contextmanager
def prefill(folder: Path, address: str, log: Path, *flags: str) -> Iterator[subprocess.Popen]:
    """`distca prefill` with two ranks."""
    command = [
        *(sys.executable, "-m", "distca", "prefill", str(folder), "--dtype", "float32"),
        *("--context-parallel-size", "2", "--port", address.rsplit(":", 1)[1]),
        *("--max-num-batched-tokens", "1024", "--lease", "6", "--step-timeout", "20", *flags),
    ]
    with started(command, log) as process:
        yield process


def wait_for_vllm(log: Path, workers: int = 1, seconds: float = 600.0) -> None:
    """Waits until the ranks that have started last know vLLM's scheduler and its workers.

    Args:
        log: what the ranks have said.
        workers: number of the workers.
        seconds: how long to wait: a busy machine takes minutes.
    """
    due = time.monotonic() + seconds
    while True:
        said = log.read_text().rpartition("ready at ")[2]
        # A test that asks them, too, calls its engine so.
        if len(re.findall("connected: (?!test,)", said)) > workers:
            return
        assert time.monotonic() < due, f"vLLM does not connect: {said[-4000:]}"
        time.sleep(0.2)
