"""Folders of temporary files. If a process is killed, the next one removes its folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

_LOCK = "in use"
"""Name of the file that a folder's process keeps locked."""


class ScratchFolder:
    """A new folder for temporary files.

    Python's `TemporaryDirectory` stays on the disk if its process is killed by SIGKILL. Here the
    next process that makes a folder of the same prefix removes it. It knows by a file in the
    folder, which a living process keeps locked. Threads may share a folder.

    Args:
        prefix: how the folder's name begins.

    Attributes:
        path: the folder.
    """

    def __init__(self, prefix: str) -> None:
        _remove_left(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        # The lock is there before its name is, by which others find it.
        new = self.path / "new"
        self._lock: int | None = os.open(new, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Removes the folder, if that has not been done."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def _remove_left(prefix: str) -> None:
    """Removes this user's folders whose processes have ended."""
    for lock in Path(tempfile.gettempdir()).glob(f"{prefix}*/{_LOCK}"):
        # It may be gone by now, be another user's, or be locked.
        with (
            contextlib.suppress(OSError),
            os.fdopen(os.open(lock, os.O_RDWR | os.O_NOFOLLOW), "r+") as file,
        ):
            if os.fstat(file.fileno()).st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
