"""Files of JSON that a user names, which may be anything."""

from __future__ import annotations

import json
import os
import select
import stat
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 30
"""Largest file that is read: devices such as `/dev/zero` have no end."""
_CHUNK_BYTES = 1 << 20
_PATIENCE_SECONDS = 60.0
"""Longest wait for what another program writes into a pipe."""


class _TwiceError(ValueError):
    """An object has a key twice."""


def check_file(path: Path, wanted: str, flag: str = "") -> None:
    """Checks that there is a file. A pipe is no regular file, and serves.

    Args:
        path: the file.
        wanted: what to give, for the message, such as "give a list of lengths".
        flag: the flag that names the file, for the message; empty: the message has no flag.

    Raises:
        ValueError: there is none, or it is a folder.
    """
    name = f"{flag} {path}".strip()
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{name} does not exist: {wanted}") from error
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}: {wanted}") from error
    if stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{name} is a folder: {wanted}")


def read_text(path: Path, wanted: str, flag: str = "") -> str:
    """Reads a file of UTF-8 text, with a byte order mark or without.

    Args:
        path: the file.
        wanted: what to give, for the message.
        flag: see `check_file`.

    Raises:
        ValueError: there is no file, it cannot be read, it is too large, it is not UTF-8, or it is
            a pipe into which nothing is written for a minute.
    """
    check_file(path, wanted, flag)
    name = f"{flag} {path}".strip()
    too_large = f"{name} has more than {_MOST_BYTES:,} bytes: {wanted}"
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(too_large)
    found = bytearray()
    try:
        # Nobody may ever open the other end of a pipe.
        with open(path, "rb", buffering=0, opener=_without_waiting) as file:
            written = select.poll()
            written.register(file, select.POLLIN)
            while True:
                if not written.poll(1000 * _PATIENCE_SECONDS):
                    raise ValueError(
                        f"{name} is a pipe into which nothing was written for "
                        f"{_PATIENCE_SECONDS:g} s: {wanted}"
                    )
                chunk = file.read(_CHUNK_BYTES)
                if chunk == b"":
                    break
                # None: another process has read it.
                found += chunk or b""
                if len(found) > _MOST_BYTES:
                    raise ValueError(too_large)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}: {wanted}") from error
    try:
        return found.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: {wanted}") from error


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def parse_json(text: str, place: str, wanted: str) -> Any:
    """Returns the value that JSON has.

    Args:
        text: the JSON.
        place: where it is, for the message.
        wanted: what to give, for the message.

    Raises:
        ValueError: it is not JSON, an object has a key twice, or a number has too many digits.
    """
    try:
        return json.loads(text, object_pairs_hook=_as_object)
    except _TwiceError as error:
        raise ValueError(f"{place}: {error}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON ({error}): {wanted}") from error
    except ValueError as error:
        # Python's own message says how a program may allow more digits.
        raise ValueError(f"{place} has a number of too many digits: {wanted}") from error


def _as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _TwiceError(f"an object has {json.dumps(twice)} twice: give it once")
    return found
