"""Reads what torchrun writes into the environment of the processes that it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass

_RUN = "TORCHELASTIC_RUN_ID"
_NUMBERS = (
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT",
    "RANK",
    "LOCAL_RANK",
)
"""Variables of torchrun that are numbers, in the order of `Torchrun`."""


@dataclass(frozen=True)
class Torchrun:
    """How torchrun has started this process.

    Attributes:
        world_size: processes of the job.
        local_world_size: processes of this machine.
        machines: machines of the job.
        restarts: how often the processes of this machine were started again.
        rank: number of this process in the job.
        local_rank: number of this process on its machine.
    """

    world_size: int
    local_world_size: int
    machines: int
    restarts: int
    rank: int
    local_rank: int


def read_torchrun() -> Torchrun | None:
    """Returns how torchrun has started this process; None: it has not.

    Raises:
        ValueError: some of what torchrun sets is missing, or no number.
    """
    if _RUN not in os.environ:
        return None
    numbers = []
    for name in _NUMBERS:
        value = os.environ.get(name)
        if value is None or not value.isdecimal():
            found = "is not set" if value is None else f"is {value!r}"
            raise ValueError(
                f"{_RUN} is set, as torchrun does, but {name} {found}: start this by torchrun, or "
                f"unset {_RUN}"
            )
        numbers.append(int(value))
    return Torchrun(*numbers)
