"""Writes files whole: what a failed write leaves is the file that was there before."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def writing(path: Path, cure: str = "") -> Iterator[Path]:
    """Yields a path for a file that takes another's place when it is whole.

    If the block fails, the older file stays as it was, and nothing else is left. Folders that are
    missing are made; if the block fails, they are removed. Devices and pipes, such as
    `/dev/stdout`, are written to directly. A link stays, and its target is replaced.

    Args:
        path: file to write. The path that is yielded has its suffix.
        cure: what the error advises.

    Raises:
        ValueError: the file cannot be written.
    """
    made: list[Path] = []
    written = None
    try:
        target = path.resolve()
        mode = target.stat().st_mode if target.exists() else None
        if mode is not None and not stat.S_ISREG(mode):
            yield path
            return
        made = _make_folder(target.parent)
        # Other processes may write the same file.
        written = target.with_name(f".distca-{os.getpid()}-{os.urandom(4).hex()}{target.suffix}")
        yield written
        if mode is not None:
            written.chmod(stat.S_IMODE(mode))
        written.replace(target)
        made = []
    except BrokenPipeError:
        raise
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(f"{path} cannot be written: {why}" + (cure and f": {cure}")) from error
    finally:
        if written is not None:
            with contextlib.suppress(OSError):
                written.unlink(missing_ok=True)
        for folder in reversed(made):
            # Another process may have written there in the meantime.
            with contextlib.suppress(OSError):
                folder.rmdir()


def write_text(path: Path, text: str, cure: str = "", errors: str = "strict") -> None:
    """Writes a file of UTF-8, whole; see `writing`.

    Args:
        path: file to write.
        text: its content.
        cure: what the error advises.
        errors: what is done with what is no UTF-8, as in `str.encode`.

    Raises:
        ValueError: the file cannot be written.
    """
    with writing(path, cure) as written:
        written.write_text(text, encoding="utf-8", errors=errors)


def _make_folder(folder: Path) -> list[Path]:
    """Makes a folder and those above it; returns those that were missing, the highest first."""
    missing: list[Path] = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    made: list[Path] = []
    try:
        for each in reversed(missing):
            each.mkdir(exist_ok=True)
            made.append(each)
    except OSError:
        for each in reversed(made):
            with contextlib.suppress(OSError):
                each.rmdir()
        raise
    return made
