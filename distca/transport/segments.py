"""Memory that the processes of one machine share."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import torch
import torch.distributed as dist

from distca.transport.agreement import on_all_ranks

# The file of a process is opened by others through this; it has no name that could be left over.
_FILE_OF_PROCESS = "/proc/{process}/fd/{file}"


def machine_id() -> str:
    """The same for all processes that run under one kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()


class SymmetricMemory:
    """As many zeroed bytes on every rank, each rank's mapped by all. Collective.

    The memory has no name: the system frees it when the last process that maps it ends, however
    that comes. It counts as memory of the process and not of `/dev/shm`.

    Args:
        group: the ranks, all on one machine.
        nbytes: of each rank.
        held: keep a lock on this rank's part until the process ends, which others can ask for.

    Attributes:
        parts: each rank's bytes, uint8 `[nbytes]`.
        files: of each rank the file of its part, to ask for its lock; empty if not `held`.

    Raises:
        TransportError: on every rank: there is not enough memory, or a rank's memory cannot be
            opened by another.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, held: bool = False) -> None:
        nbytes = max(nbytes, mmap.PAGESIZE)
        opened: list[int] = []

        def make() -> tuple[int, int]:
            opened.append(os.memfd_create("distca"))
            # Takes the memory now: an error here, not a signal when it is first written.
            os.posix_fallocate(opened[0], 0, nbytes)
            if held:
                fcntl.lockf(opened[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.getpid(), opened[0]

        def map_all() -> list[mmap.mmap]:
            maps = []
            for rank, (process, file) in enumerate(places):
                if rank == me:
                    number = opened[0]
                else:
                    number = os.open(
                        _FILE_OF_PROCESS.format(process=process, file=file),
                        os.O_RDWR | os.O_CLOEXEC,
                    )
                    opened.append(number)
                maps.append(mmap.mmap(number, nbytes))
                order.append(number)
            return maps

        me, order, maps = group.rank(), list[int](), list[mmap.mmap]()
        try:
            places = on_all_ranks(group, make)
            # After this all ranks have mapped all.
            on_all_ranks(group, lambda: maps.extend(map_all()))
        except BaseException:
            for number in opened:
                os.close(number)
            raise
        self.parts = [torch.frombuffer(each, dtype=torch.uint8) for each in maps]
        self.files = order if held else []
        if not held:
            for number in opened:
                os.close(number)

    def close(self) -> None:
        """Lets go of the files; the memory goes with the last tensor."""
        for number in self.files:
            os.close(number)
        self.files, self.parts = [], []
