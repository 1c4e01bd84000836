"""Progress of `distca simulate`: iterations done, and the system whose configurations run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from distca.progress import progress
from distca.simulate import Candidate
from distca.simulate.trials import Told


@contextlib.contextmanager
def simulating(systems: int) -> Iterator[Told]:
    """Yields what shows each iteration, and how many systems have begun.

    How long the rest takes is not known: it depends on how many configurations are out of memory,
    or clearly slower than others. So the first line says how long most jobs take.

    Args:
        systems: number of systems to compare.
    """
    begun: list[str] = []
    lock = threading.Lock()
    usual = "most jobs take one to three minutes of CPU time"
    with progress("distca simulate", "iterations", doing=usual) as shown:

        def told(candidate: Candidate) -> None:
            # Two systems may run at a time.
            with lock:
                if candidate.system not in begun:
                    begun.append(candidate.system)
                of = f"{len(begun)} of {systems} systems begun"
                shown.describe(f"{of}, now {candidate.system}: {candidate}")
                shown.update()

        yield told
