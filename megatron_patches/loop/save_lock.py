"""A lock on the folder of `--save`, so that no two jobs write checkpoints there."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

LOCK = ".lock"


class SaveLock:
    """A lock that a process holds on a folder until it ends, however it ends.

    A record lock of the file `.lock`, in which its holder is named: the kernel frees it with the
    process, and a server of NFS with the machine. Processes that the holder starts don't inherit
    it, so none that is left over keeps it. The file stays, since another job may be opening it.

    Args:
        file: the file, locked.
        folder: folder of `--save`.
        environment: variables, in which a launcher names the job.
    """

    def __init__(self, file: IO[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._file = file
        self._folder = folder
        self._environment = environment

    @staticmethod
    def take(folder: Path, environment: Mapping[str, str]) -> SaveLock:
        """Locks a folder, which is made if it is missing.

        Args:
            folder: folder of `--save`.
            environment: variables, in which a launcher names the job.

        Raises:
            ValueError: another process holds the lock.
            OSError: the folder cannot be made, or written to.
        """
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            holder = file.read(500).strip() or "another process"
            file.close()
            raise ValueError(
                f"--save {folder} is in use by {holder}: end that job or wait for it, or give "
                "another folder"
            ) from error
        except OSError as error:
            logger.warning(
                "--save %s is on a file system without locks (%s): let no other job save there",
                folder,
                error.strerror,
            )
        file.truncate(0)
        file.write(f"{_this_process(environment)}\n")
        file.flush()
        return SaveLock(file, folder, environment)

    def renew(self) -> None:
        """Locks the folder again if it, or the file in it, was deleted since.

        A deleted file stays locked, but another job would make and lock a new one.

        Raises:
            ValueError: another job has locked the folder since.
            OSError: the folder cannot be made, or written to.
        """
        try:
            there = (self._folder / LOCK).stat()
        except FileNotFoundError:
            there = None
        if there is None or not os.path.samestat(there, os.fstat(self._file.fileno())):
            logger.warning("--save %s was deleted while this job ran: locked again", self._folder)
            replacement = SaveLock.take(self._folder, self._environment)
            self._file.close()
            self._file = replacement._file

    def __enter__(self) -> SaveLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.truncate(0)
        self._file.close()


def _this_process(environment: Mapping[str, str]) -> str:
    job = ""
    if "SLURM_JOB_ID" in environment:
        job = f" of Slurm's job {environment['SLURM_JOB_ID']}"
    elif environment.get("TORCHELASTIC_RUN_ID", "none") != "none":
        job = f" of torchrun's job {environment['TORCHELASTIC_RUN_ID']}"
    since = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()}{job} since {since}"
