"""What a search finds for a system: its best configuration, with figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.simulate.breakdown import Breakdown
from distca.simulate.trials import Trial
from distca.simulate.workload import Candidate


@dataclass(frozen=True)
class Choice:
    """A system in its best configuration.

    Attributes:
        system: one of `SYSTEMS`.
        candidate: best configuration; None: all are out of memory, or nothing divides.
        seconds: time of an iteration, the mean over all batches.
        tokens_per_second: throughput of all GPUs together.
        memory_gb: memory of the GPU that needs most, over all batches.
        idle: share of the time in which compute is not busy.
        exposed: share of the time in which compute waits for exchanges, and for others in them.
        tried: number of configurations that divide the workload.
        simulated: number of configurations that ran.
        out_of_memory: number of configurations that are known not to fit.
        seconds_of_batches: time of the iteration of each batch.
        parts: what the first batch's time is spent on; None: that was not asked for.
        from_parts: number of batches of whose iteration only a part was simulated.
    """

    system: str
    candidate: Candidate | None
    seconds: float
    tokens_per_second: float
    memory_gb: float
    idle: float
    exposed: float
    tried: int
    simulated: int
    out_of_memory: int
    seconds_of_batches: tuple[float, ...] = ()
    parts: Breakdown | None = None
    from_parts: int = 0

    @classmethod
    def of(
        cls,
        system: str,
        best: Candidate | None,
        trials: Sequence[Trial],
        tried: int,
        simulated: int,
        out_of_memory: int,
    ) -> Choice:
        """Sums up the trials of a system's best configuration.

        Args:
            system: one of `SYSTEMS`.
            best: the configuration, or None.
            trials: its figures in each batch.
            tried, simulated, out_of_memory: as above.
        """
        counts = tried, simulated, out_of_memory
        if best is None:
            none = float("nan")
            return cls(system, None, none, none, none, none, none, *counts)
        seconds = sum(trial.seconds for trial in trials)
        return cls(
            system,
            best,
            seconds / len(trials),
            sum(trial.tokens for trial in trials) / seconds,
            max(trial.memory_gb for trial in trials),
            float(np.mean([trial.idle for trial in trials])),
            float(np.mean([trial.exposed for trial in trials])),
            *counts,
            tuple(trial.seconds for trial in trials),
            trials[0].parts,
            sum(trial.from_part for trial in trials),
        )
