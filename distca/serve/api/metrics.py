"""Numbers of a server, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from distca.serve.engine.messages import Stats

_LONG = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5, 10, 20, 40, 80)


class Metrics:
    """Counters and times of requests, and the engine's numbers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.stats: Stats | None = None
        self.registry.register(_OfEngine(self))
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "from a request's arrival to its first token"
        )
        self.per_token = self._histogram(
            "time_per_output_token_seconds", "from a token of an answer to the next"
        )
        self.request = self._histogram(
            "e2e_request_latency_seconds", "from a request's arrival to its end"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "tokens of prompts")
        self.generation_tokens = self._counter("generation_tokens", "tokens of answers")
        self.finished = Counter(
            "distca:request_success",
            "answers by the reason of their end",
            ["finished_reason"],
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort"):
            self.finished.labels(reason)

    def text(self) -> bytes:
        """Returns all numbers in Prometheus's format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"distca:{name}", what, buckets=_LONG, registry=self.registry)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"distca:{name}", what, registry=self.registry)


class _OfEngine(Collector):
    """The engine's numbers, as of its last iteration."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        stats = self._metrics.stats
        if stats is None:
            return
        blocks = GaugeMetricFamily(
            "distca:kv_blocks", "blocks of keys and values by rank", labels=["rank", "state"]
        )
        total = used = 0
        for rank, each in enumerate(stats.ranks):
            for state in ("free", "referenced", "cached"):
                blocks.add_metric([str(rank), state], getattr(each, state))
            total += each.free + each.referenced + each.cached
            used += each.referenced
        yield blocks
        for name, what, value in (
            ("num_requests_running", "sequences that run", stats.running),
            ("num_requests_waiting", "sequences that wait", stats.waiting),
            ("kv_cache_usage_perc", "part of all blocks that sequences hold", used / total),
        ):
            yield GaugeMetricFamily(f"distca:{name}", what, value=value)
        for name, what, value in (
            ("num_preemptions", "times that a sequence gave up its blocks", stats.preemptions),
            ("prefix_cache_queries", "tokens looked up in the prefix cache", stats.looked_up),
            ("prefix_cache_hits", "tokens found in the prefix cache", stats.found),
            ("computed_tokens", "tokens fed to the model", stats.computed),
            ("iterations", "iterations of the engine", stats.iterations),
            ("bytes_moved", "bytes that ranks sent each other", stats.bytes_moved),
            ("plan_seconds", "seconds for plans, the slowest rank's", stats.plan_seconds),
            ("schedule_seconds", "seconds for scheduling", stats.schedule_seconds),
            ("step_seconds", "seconds of all iterations", stats.step_seconds),
        ):
            yield CounterMetricFamily(f"distca:{name}", what, value=value)
