"""A real Prometheus that scrapes this machine's ports, and the queries of dashboards."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.ports import free_port

ROOT = Path(__file__).parents[2]


def program(name: str) -> str:
    """Returns the path of one of Debian's programs; skips the test where it is missing."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"there is no {name}: apt-get install {name}")
    return path


def queries_of(dashboard: str) -> dict[str, list[str]]:
    """Returns the queries of each panel of a dashboard, by its title.

    Grafana's variables have the values that it gives them when all is chosen.
    """
    made = json.loads((ROOT / "launch" / "grafana" / f"{dashboard}.json").read_text())
    names = [each["name"] for each in made["templating"]["list"]]
    found: dict[str, list[str]] = {}
    for panel in made["panels"]:
        assert panel["title"] not in found
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "10m")
            for name in names:
                query = re.sub(rf"\${name}\b", ".*", query)
            assert "$" not in query
            found.setdefault(panel["title"], []).append(query)
    return found


class Prometheus:
    """A server of Prometheus.

    Args:
        port: its port.
    """

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/query?"

    def ask(self, query: str) -> list[dict[str, Any]]:
        """Returns the series that a query gives now; fails if the query is wrong."""
        with urllib.request.urlopen(
            self._url + urllib.parse.urlencode({"query": query}), timeout=30
        ) as page:
            answer = json.load(page)
        assert answer["status"] == "success", answer
        return answer["data"]["result"]

    def wait_for(self, query: str, seconds: float = 120) -> list[dict[str, Any]]:
        """Waits until a query gives something."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError):
                if found := self.ask(query):
                    return found
            assert time.monotonic() < end, f"{query} gives nothing"
            time.sleep(1.0)


@contextlib.contextmanager
def prometheus(folder: Path, ports: Sequence[int]) -> Iterator[Prometheus]:
    """Runs a Prometheus that scrapes some ports of this machine every second."""
    path, port = program("prometheus"), free_port()
    targets = [f"127.0.0.1:{each}" for each in ports]
    jobs = [{"job_name": "tested", "static_configs": [{"targets": targets}]}]
    # JSON is YAML.
    settings = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(settings))
    command = [path, f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "prometheus.log").open("w") as log, running([*command], log):
        yield Prometheus(port)


@contextlib.contextmanager
def running(command: Sequence[str], log: Any) -> Iterator[None]:
    """Runs a program until it is no more needed."""
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
