"""What a machine is called."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_CPUS, _MEMORY = Path("/proc/cpuinfo"), Path("/proc/meminfo")


def cpu_name() -> str:
    """Returns the name of this machine's processor."""
    return _field("model name", _CPUS) or platform.processor() or platform.machine()


def machine_name() -> str:
    """Returns the processor's name, the number of cores, and the memory in GB of 1e9 bytes.

    The name is followed by family and model where Linux says them: virtual machines may show the
    name of a brand alone. What the system does not say is left out.
    """
    name = cpu_name()
    numbers = [_field(key, _CPUS) for key in ("cpu family", "model")]
    if all(numbers):
        name += " (family {}, model {})".format(*numbers)
    cores = os.cpu_count()
    parts = [name, "1 core" if cores == 1 else f"{cores} cores"]
    # "24683652 kB", which are units of 1,024 bytes.
    kibibytes = _field("MemTotal", _MEMORY).split(" ")[0]
    if kibibytes:
        parts.append(f"{int(kibibytes) * 1024 / 1e9:.0f} GB of memory")
    return ", ".join(parts)


def _field(key: str, file: Path) -> str:
    """Returns the first value of a key in a file of Linux; "": there is none."""
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return ""
