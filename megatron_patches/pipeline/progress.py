"""How far a rank has come in a run: kept in memory at every step, and read when a rank is late."""

from __future__ import annotations

from dataclasses import dataclass, field

from distca.transport import Transport


@dataclass
class Progress:
    """The phase that a rank is in. Setting it costs no more than an assignment.

    Attributes:
        phase: what the rank does.
        iteration: iteration that runs, counted from 1; 0 before the first.
        begun: number of iterations that this process has begun.
        entered: number of phases entered so far, equal on all ranks with a model in one phase.
        is_idle: whether this is a dedicated server that waits for its next global batch.
        transport: transport whose exchanges are counted; None: nothing was exchanged yet.
    """

    phase: str = "the start"
    iteration: int = 0
    begun: int = 0
    entered: int = 0
    is_idle: bool = False
    transport: Transport | None = field(default=None, repr=False)

    def enter(self, phase: str, is_idle: bool = False) -> None:
        """Begins a phase."""
        self.phase, self.is_idle = phase, is_idle
        self.entered += 1

    def begin(self, iteration: int) -> None:
        self.iteration = iteration
        self.begun += 1
        self.enter("forward and backward passes")

    @property
    def exchanges(self) -> int:
        """Number of exchanges started so far, equal on all ranks that have come equally far."""
        return 0 if self.transport is None else self.transport.exchanges_started

    def __str__(self) -> str:
        return f"iteration {self.iteration}, {self.phase}" if self.iteration else self.phase
