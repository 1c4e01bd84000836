"""Outcome of a simulated iteration: time, memory, bytes and a timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distca.plan.span import Floats, Int64s
from distca.simulate.resources import Span
from distca.timeline import LANES, TimelineEvent, write_trace


@dataclass(frozen=True)
class Outcome:
    """Outcome of one iteration.

    Attributes:
        seconds: time from the start until all gradients are reduced.
        tokens: number of tokens in the global batch.
        gpus: number of GPUs.
        memory_bytes: peak memory of each rank's GPUs, `[ranks]`.
        usable_bytes: memory of a GPU that may be filled.
        computed: seconds that each rank's compute was busy, `[ranks]`.
        exposed: seconds that each rank waited for exchanges, and for others in them, `[ranks]`.
        gathering: part of `exposed` in which keys and values of a context-parallel group are
            gathered, or their gradients reduced, `[ranks]`.
        bytes_sent: bytes that one GPU of each rank sends, `[ranks]`, by phase of the exchange.
        spans: recorded timeline for `save_trace`.
        clock: moment at which each rank has run its last tick and gradients are reduced, `[ranks]`;
            None: the iteration has no ticks.
        bytes_between: bytes that one GPU of each rank sends to each other rank in exchanges,
            `[ranks, ranks]`; None: nothing was recorded.
        spent: in inference, seconds of the rank that ends last by parts of its time, which add up
            to `seconds`.
    """

    seconds: float
    tokens: int
    gpus: int
    memory_bytes: Floats
    usable_bytes: float
    computed: Floats
    exposed: Floats
    gathering: Floats
    bytes_sent: dict[str, Int64s]
    spans: tuple[Span, ...] = ()
    clock: Floats | None = None
    bytes_between: Int64s | None = None
    spent: Mapping[str, float] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether no GPU runs out of memory."""
        return bool(self.memory_bytes.max() <= self.usable_bytes)

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all GPUs together."""
        return self.tokens / self.seconds

    @property
    def idle(self) -> float:
        """Share of all ranks' time in which their compute was not busy."""
        # Rounding may let all ranks compute a little longer than the iteration took.
        return max(1.0 - float(self.computed.mean()) / self.seconds, 0.0)


def save_trace(path: Path, outcome: Outcome) -> None:
    """Writes the recorded timeline of an iteration in the format of `--distca-trace`.

    Args:
        path: a JSON file, to be opened at ui.perfetto.dev.
        outcome: result of a simulation that recorded.

    Raises:
        ValueError: nothing was recorded.
    """
    if not outcome.spans:
        raise ValueError("nothing was recorded: simulate with recording")
    ranks = len(outcome.computed)
    of_rank: list[list[TimelineEvent]] = [[] for _ in range(ranks)]
    for span in sorted(outcome.spans, key=lambda each: (each.rank, each.start, -each.end)):
        of_rank[span.rank].append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.lane,
                "pid": span.rank,
                "tid": LANES.index(span.lane),
                "ts": 1e6 * span.start,
                "dur": 1e6 * (span.end - span.start),
                "tdur": 1e6 * (span.end - span.start),
                "args": span.args,
            }
        )
    titles = [f"server {rank}" for rank in range(ranks)]
    write_trace(path, list(zip(titles, of_rank, strict=True)))
