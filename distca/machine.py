"""What a machine is called, and how many processes it runs."""

from __future__ import annotations

import platform
from pathlib import Path

MOST_ON_CPUS = 64
"""Most processes of a model on a machine without GPUs: each has a copy of the libraries."""


def check_processes(count: int, gpus: int, what: str) -> None:
    """Refuses more processes of a model than a machine can run.

    Args:
        count: number of processes.
        gpus: GPUs of the machine.
        what: what asks for them, for the message.

    Raises:
        ValueError: there are fewer GPUs, or there are none and the processes are very many.
    """
    if gpus and count > gpus:
        raise ValueError(
            f"{what}: each process needs a GPU, and there are {gpus}: give fewer, or set "
            "CUDA_VISIBLE_DEVICES= to run on CPUs"
        )
    if not gpus and count > MOST_ON_CPUS:
        raise ValueError(f"{what}: give at most {MOST_ON_CPUS} on CPUs")


def cpu_name() -> str:
    """Returns the name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
