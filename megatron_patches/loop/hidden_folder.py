"""Hidden folders beside another one, in which jobs on several machines make what it will be.

A job that is ended removes its folder. One that is killed cannot, and the next job does so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_SIGN = "in use"
"""File of a folder, which its process keeps locked, and touches."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Ended(BaseException):
    """Raised in the main thread if a signal asks the process to end."""


@contextlib.contextmanager
def hidden_folder(beside: Path, patience: float) -> Iterator[tuple[Path, Path]]:
    """Gives a new folder beside another one, and removes it at the end.

    First it removes folders of the same kind whose processes have ended.

    Args:
        beside: folder whose name the new one has, with a dot before and letters behind.
        patience: seconds for which a process of another machine may give no sign.

    Yields:
        The folder, and a file to touch more often than that.

    Raises:
        OSError: the folder cannot be made.
    """
    prefix = f".{beside.name}."
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=beside.parent))
    try:
        sign = folder / _SIGN
        with sign.open("w", encoding="utf-8") as locked:
            with contextlib.suppress(OSError):
                fcntl.flock(locked, fcntl.LOCK_EX)
                # Only where there are locks.
                locked.write(_machine())
                locked.flush()
            # The file system's clock may differ from this machine's.
            last = sign.stat().st_mtime - patience
            for other in beside.parent.iterdir():
                if other.name.startswith(prefix) and other != folder and _is_left(other, last):
                    shutil.rmtree(other, ignore_errors=True)
            yield folder, sign
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _machine() -> str:
    """Returns what this machine has in common with no other, until it is started again."""
    return _BOOT.read_text(encoding="utf-8").strip() if _BOOT.is_file() else ""


def _is_left(folder: Path, last: float) -> bool:
    """Returns whether the process of a folder has ended, or gave no sign since `last`.

    Locks show the end of a process of this machine; whether of others, is up to the file system.
    """
    try:
        if not folder.is_dir() or folder.stat().st_uid != os.getuid():
            return False
        sign = folder / _SIGN
        if not sign.exists():
            # Another command's, which touches no file but those that it writes.
            return max(each.stat().st_mtime for each in (folder, *folder.rglob("*"))) < last
        with sign.open("r+", encoding="utf-8") as locked:
            if os.fstat(locked.fileno()).st_mtime < last:
                return True
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return locked.read() == _machine() != ""
    except OSError:
        # It is locked, or gone by now.
        return False


@contextlib.contextmanager
def cleaned_up_at_signals() -> Iterator[None]:
    """Lets SIGINT, SIGTERM and SIGHUP leave the context by an exception, and act only then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def take(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) == 1:
            raise _Ended

    before = {each: signal.getsignal(each) for each in _SIGNALS}
    # A handler of a library in C could not be put back, and what is passed over stays so.
    before = {each: old for each, old in before.items() if old not in (None, signal.SIG_IGN)}
    try:
        try:
            for each in before:
                signal.signal(each, take)
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
    finally:
        for number in came[:1]:
            signal.raise_signal(number)
