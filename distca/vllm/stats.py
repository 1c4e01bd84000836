"""What the connector counts, for vLLM's log and its `/metrics`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from distca.prefill.client import Outcome

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
"""Upper bounds of the histogram of seconds."""


class PrefillStats(KVConnectorStats):
    """Counts of some steps. vLLM adds up those of its scheduler and workers.

    Its `data` has, as vLLM sends it between processes:

    * `declined`: requests that vLLM computes itself, by reason;
    * `asked`: `requests` and `tokens` that prefill ranks are asked for;
    * `ended`: loads that have ended, by outcome;
    * `tokens`: tokens whose keys and values were loaded;
    * `bytes`: bytes of keys and values that all workers received;
    * `seconds`: of each load, from the request to the last row.
    """

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.reset()
        if data:
            self._add(data)

    def reset(self) -> None:
        """Starts counting again."""
        self.data: dict[str, Any] = {
            "declined": {},
            "asked": {},
            "ended": {},
            "tokens": 0,
            "bytes": 0,
            "seconds": [],
        }

    def decline(self, reason: str) -> None:
        """Counts a request that vLLM computes itself."""
        _count(self.data["declined"], {reason: 1})

    def ask(self, tokens: int) -> None:
        """Counts a request that prefill ranks are asked for."""
        _count(self.data["asked"], {"requests": 1, "tokens": tokens})

    def end(self, outcome: Outcome, tokens: int, seconds: float) -> None:
        """Counts a load that has ended."""
        _count(self.data["ended"], {outcome: 1})
        if outcome == "loaded":
            self.data["tokens"] += tokens
            self.data["seconds"].append(seconds)

    def receive(self, count: int) -> None:
        """Counts bytes that a worker received."""
        self.data["bytes"] += count

    def is_empty(self) -> bool:
        """Returns whether nothing was counted."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> PrefillStats:
        """Adds what another process counted."""
        self._add(other.data)
        return self

    def _add(self, data: Mapping[str, Any]) -> None:
        for name in ("declined", "asked", "ended"):
            _count(self.data[name], data[name])
        for name in ("tokens", "bytes", "seconds"):
            self.data[name] += data[name]

    def reduce(self) -> dict[str, int | float]:
        """Returns what stands in a line of vLLM's log."""
        asked, ended, seconds = (self.data[name] for name in ("asked", "ended", "seconds"))
        return {
            "prompts asked for": asked.get("requests", 0),
            "loaded": ended.get("loaded", 0),
            "failed": ended.get("failed", 0),
            "cancelled": ended.get("cancelled", 0),
            "computed by vLLM": sum(self.data["declined"].values()),
            "tokens loaded": self.data["tokens"],
            "MB": round(self.data["bytes"] / 1e6, 1),
            "median seconds": round(statistics.median(seconds), 3) if seconds else 0.0,
        }


def _count(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count


class Tally:
    """Counts of a half of the connector until vLLM takes them, which it does twice in each step.

    Most steps count nothing, and should cost nothing here.
    """

    def __init__(self) -> None:
        self._counts: PrefillStats | None = None

    @property
    def counts(self) -> PrefillStats:
        """What was counted since the last `take`."""
        if self._counts is None:
            self._counts = PrefillStats()
        return self._counts

    def take(self) -> PrefillStats | None:
        """Returns what was counted, and starts again; None: there is nothing."""
        taken, self._counts = self._counts, None
        return taken


class PrefillMetrics(KVConnectorPromMetrics):
    """The same as metrics of Prometheus, with the labels of vLLM's own."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def counter(name: str, text: str, *labels: str) -> Any:
            names, engines = [*labelnames, *labels], self.per_engine_labelvalues.values()
            metric = self._counter_cls(
                name=f"vllm:distca_{name}", documentation=text, labelnames=names
            )
            if not labels:
                # Shown as 0 before anything is counted.
                for each in engines:
                    metric.labels(*each)
            return metric

        self._declined = counter(
            "declined_requests", "Requests that vLLM prefills itself, by reason.", "reason"
        )
        self._asked = {
            name: counter(f"asked_{name}", f"{name.capitalize()} that prefill ranks are asked for.")
            for name in ("requests", "tokens")
        }
        self._ended = counter(
            "loads", "Prompts whose keys and values were loaded, or not.", "outcome"
        )
        self._sums = {
            "tokens": counter("loaded_tokens", "Tokens whose keys and values were loaded."),
            "bytes": counter("received_bytes", "Bytes of keys and values from prefill ranks."),
        }
        self._seconds = self._histogram_cls(
            name="vllm:distca_load_seconds",
            documentation="Seconds from asking for a prompt to its last keys and values.",
            labelnames=labelnames,
            buckets=_BUCKETS,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds counts to the metrics of an engine."""
        labels, counts = self.per_engine_labelvalues[engine_idx], transfer_stats_data
        for metric, found in ((self._declined, "declined"), (self._ended, "ended")):
            for label, count in counts[found].items():
                metric.labels(*labels, label).inc(count)
        for name, count in counts["asked"].items():
            self._asked[name].labels(*labels).inc(count)
        for name, metric in self._sums.items():
            metric.labels(*labels).inc(counts[name])
        for seconds in counts["seconds"]:
            self._seconds.labels(*labels).observe(seconds)
