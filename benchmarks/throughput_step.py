"""What `benchmarks/throughput.py` keeps of each training step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from replay import Pass


@dataclass
class Step:
    """What a rank saw of a training step.

    Attributes:
        seconds: from barrier to barrier, planning included.
        cpu_seconds: of the process.
        passes: of plain Megatron's pipeline, on CPUs.
        ticks: CPU seconds of each tick of `--distca`.
        pairs: that this rank's kernels had in each forward tick of `--distca`, in a layer.
        kernel_seconds: of core attention in each tick of `--distca`.
        exposed_seconds: for which `--distca` waited for exchanges.
        bytes_sent: to other ranks, by phase of the exchange.
        peak_bytes: tensors that were there at once, beside parameters and optimizer; 0 where it was
            not measured.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    passes: list[Pass] = field(default_factory=list)
    ticks: list[float] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)
    kernel_seconds: list[float] = field(default_factory=list)
    exposed_seconds: float = 0.0
    bytes_sent: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0

    def read_timeline(self, events: list[dict[str, Any]]) -> None:
        """Takes ticks, kernels and waits from what `distca.runtime.Trace.take` gave."""
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
"""Of each rank by way, batch and round."""
