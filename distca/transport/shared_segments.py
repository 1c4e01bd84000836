"""Memory that the processes of one machine share."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import torch
import torch.distributed as dist

from distca.transport.agreement import on_all_ranks

# Path by which other processes open a process's file, which has no name that could be left over.
_FILE_OF_PROCESS = "/proc/{process}/fd/{file}"


def machine_id() -> str:
    """Returns an identifier that all processes under one running kernel share."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()


class SymmetricMemory:
    """Zeroed memory of equal size on every rank, mapped by all ranks. Collective.

    The memory has no name: the system frees it when the last process that maps it ends, however
    it ends. It counts as memory of the process and not of `/dev/shm`.

    Args:
        group: ranks, all on one machine.
        nbytes: bytes of each rank.
        held: lock this rank's part until the process ends; others see by the lock that it lives.

    Attributes:
        parts: memory of each rank, uint8 `[nbytes]`.
        files: file descriptor of each rank's part, to query its lock; empty if not `held`.

    Raises:
        TransportError: memory is short, or cannot be opened by another rank; every rank raises it.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, held: bool = False) -> None:
        nbytes = max(nbytes, mmap.PAGESIZE)
        opened: list[int] = []

        def make() -> tuple[int, int]:
            opened.append(os.memfd_create("distca"))
            # Takes the memory now: a shortage is an error here, not a signal at the first write.
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
            # Collective, so that no rank goes on before all have mapped all parts.
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
        """Closes the files; the memory is freed with the last tensor."""
        for number in self.files:
            os.close(number)
        self.files, self.parts = [], []
