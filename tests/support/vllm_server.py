"""`vllm serve` with the connector, and `distca prefill` beside it, as a user starts them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
MIN_TOKENS = 64


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


def environment() -> dict[str, str]:
    """Of both commands."""
    return os.environ | {
        "PYTHONPATH": str(ROOT),
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

    def answers(self, bodies: Sequence[dict[str, Any]], at_once: int = 64) -> list[Any]:
        """Answers to requests, many at once; None for those that were given up."""
        return asyncio.run(self._answers(bodies, at_once))

    async def _answers(self, bodies: Sequence[dict[str, Any]], at_once: int) -> list[Any]:
        line = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(base_url=self.url, timeout=600) as client:

            async def ask(body: dict[str, Any]) -> Any:
                async with line:
                    return await _ask(client, dict(body))

            return await asyncio.gather(*map(ask, bodies))


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    """Asks for an answer; `give_up` is the seconds after which the client goes away."""
    route, give_up = body.pop("route", "/v1/completions"), body.pop("give_up", None)
    try:
        async with asyncio.timeout(give_up):
            if not body.get("stream"):
                found = await client.post(route, json=body)
                found.raise_for_status()
                (choice,) = found.json()["choices"]
                return choice["text"] if "text" in choice else choice["message"]["content"]
            text = ""
            async with client.stream("POST", route, json=body) as lines:
                async for line in lines.aiter_lines():
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line[6:])["choices"]
                        text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            return text
    except TimeoutError:
        return None


@contextmanager
def vllm_serve(folder: Path, address: str, port: int, log: Path, *flags: str) -> Iterator[Server]:
    """`vllm serve` with the connector."""
    command = [
        # `vllm serve` looks for a package named vllm, and that for CPUs is named otherwise.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--served-model-name", "model", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "8192", "--max-num-batched-tokens", "2048", "--port", str(port)),
        *("--kv-transfer-config", connector(address, distca_connect_seconds=1), *flags),
    ]
    with started(command, log) as process:
        url = f"http://127.0.0.1:{port}"
        due = time.monotonic() + 400
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < due, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield Server(url, folder, address, log)


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
