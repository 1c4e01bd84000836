"""Figures of a training step that `throughput.py` keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.training.replay import TimedPass


@dataclass
class Step:
    """Figures of a training step on one rank.

    Attributes:
        seconds: wall time from barrier to barrier, planning included.
        cpu_seconds: CPU time of the process.
        passes: timed passes of plain Megatron's pipeline, on CPUs.
        ticks: CPU seconds of each tick of `--distca`.
        pairs: visible pairs of this rank's kernels in each forward tick of `--distca`, in a layer.
        kernel_seconds: time of core attention's kernels in each tick of `--distca`.
        exposed_seconds: time for which `--distca` waited for exchanges.
        bytes_sent: bytes sent to other ranks, by phase of the exchange.
        peak_bytes: peak size of tensors beside parameters and optimizer; 0 where not measured.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    passes: list[TimedPass] = field(default_factory=list)
    ticks: list[float] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)
    kernel_seconds: list[float] = field(default_factory=list)
    exposed_seconds: float = 0.0
    bytes_sent: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0

    def read_timeline(self, events: list[dict[str, Any]]) -> None:
        """Takes ticks, kernels and waits from the events of `distca.runtime.Trace.take`."""
        ticks = [event for event in events if event["cat"] == "ticks"]
        self.ticks = [tick["tdur"] / 1e6 for tick in ticks]
        self.pairs = [t["args"]["pairs"] for t in ticks if t["args"]["phase"] == "forward"]
        self.kernel_seconds = [0.0] * len(ticks)
        self.exposed_seconds = 0.0
        for event in events:
            if event["cat"] == "kernels":
                self.kernel_seconds[event["args"]["tick"]] += event["dur"] / 1e6
            elif event["cat"] == "exchange" and event["name"].startswith("wait for"):
                self.exposed_seconds += event["dur"] / 1e6


Ranks = list[dict[str, list[list[Step]]]]
"""Steps of each rank by way, batch and round."""
