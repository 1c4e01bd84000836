"""What a simulated iteration comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distca.plan.span import Floats, Int64s
from distca.simulate.resources import Span


@dataclass(frozen=True)
class Outcome:
    """One iteration.

    Attributes:
        seconds: from its start until all gradients are reduced.
        tokens: of the global batch.
        gpus: that run it.
        memory_bytes: at most at a time, of each rank's GPUs, `[ranks]`.
        usable_bytes: of a GPU.
        computed: seconds that each rank's compute was busy, `[ranks]`.
        exposed: seconds that each rank waited for exchanges, and for others in them, `[ranks]`.
        gathering: those of them in which keys and values of a context-parallel group are gathered,
            or their gradients reduced, `[ranks]`.
        bytes_sent: by each rank, by phase of the exchange, of one GPU of the rank, `[ranks]`.
        spans: what was recorded, for `save_trace`.
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

    @property
    def fits(self) -> bool:
        """Whether no GPU runs out of memory."""
        return bool(self.memory_bytes.max() <= self.usable_bytes)

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs."""
        return self.tokens / self.seconds

    @property
    def idle(self) -> float:
        """The part of all ranks' time in which their compute was not busy."""
        return 1.0 - float(self.computed.mean()) / self.seconds


def save_trace(path: Path, outcome: Outcome, names: Sequence[str] | None = None) -> None:
    """Writes the timeline of an iteration that was recorded, in the format of `--distca-trace`.

    Args:
        path: a JSON file, to be opened at ui.perfetto.dev.
        outcome: of a simulation that recorded.
        names: of the ranks; default: their numbers.

    Raises:
        ValueError: nothing was recorded.
    """
    from distca.runtime.trace import LANES, write_trace

    if not outcome.spans:
        raise ValueError("nothing was recorded: simulate with recording")
    ranks = len(outcome.computed)
    of_rank: list[list[dict[str, object]]] = [[] for _ in range(ranks)]
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
    titles = names or [f"server {rank}" for rank in range(ranks)]
    write_trace(path, list(zip(titles, of_rank, strict=True)))
