"""The CPUs that a rank runs on: those of its GPU's NUMA node.

A launch crosses to the GPU through the CPU that it comes from: from another socket it takes longer,
and the kernel moves threads between sockets as it likes.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

_SYSFS = Path("/sys")
# The thread that launches kernels, and the planner or a thread of the data beside it.
_FEWEST_CPUS = 2


def stay_near_gpu(device: int, sysfs: Path = _SYSFS) -> None:
    """Keeps this process, and what it starts, on the CPUs of its GPU's NUMA node.

    On all of them, so that the planner's process and threads of the data need not share a core with
    the thread that launches kernels. Whoever has bound this process differently from its parent
    (torchrun's --numa-binding, Slurm, numactl) knows better: then nothing changes, nor where the
    machine does not tell the node.

    Args:
        device: number of the GPU.
        sysfs: folder in which the kernel describes the machine.
    """
    try:
        allowed, of_parent = os.sched_getaffinity(0), os.sched_getaffinity(os.getppid())
    except OSError:
        return
    if len(allowed) < _FEWEST_CPUS:
        logger.warning(
            "this rank may use one CPU alone, which its planner and its data share with the "
            "launches of kernels: give it more, such as srun --cpu-bind=none or --cpus-per-task 8"
        )
        return
    node = _cpus_near(device, sysfs) & allowed
    if allowed != of_parent or node == allowed or len(node) < _FEWEST_CPUS:
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            # Threads that have a place of their own keep it.
            if os.sched_getaffinity(thread) == allowed:
                os.sched_setaffinity(thread, node)
        except OSError:
            # It has ended.
            continue
    logger.info("this rank runs on the %d CPUs of its GPU's NUMA node", len(node))


def _cpus_near(device: int, sysfs: Path) -> set[int]:
    """Returns the CPUs of a GPU's NUMA node; none, where the machine does not tell."""
    gpu: Any = torch.cuda.get_device_properties(device)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
        # One node, or a virtual machine that hides them, is -1.
        listed = (sysfs / f"devices/system/node/node{node}/cpulist").read_text().strip()
    except (OSError, ValueError):
        return set()
    cpus: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
