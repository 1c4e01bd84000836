"""Reads what torchrun writes into the environment of the processes that it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Torchrun:
    """How torchrun has started this process.

    Attributes:
        world_size: processes of the job.
        local_world_size: processes of this machine.
        machines: machines of the job.
        restarts: how often the processes of this machine were started again.
    """

    world_size: int
    local_world_size: int
    machines: int
    restarts: int


def read_torchrun() -> Torchrun | None:
    """Returns how torchrun has started this process; None: it has not."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    names = "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"
    return Torchrun(*(int(os.environ[name]) for name in names))
