"""Files of JSON that a user names, which may be anything."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 30
"""Largest file that is read: devices such as `/dev/zero` have no end."""
_CHUNK_BYTES = 1 << 20


class _TwiceError(ValueError):
    """An object has a key twice."""


def check_file(path: Path, wanted: str) -> None:
    """Checks that there is a file. A pipe is no regular file, and serves.

    Args:
        path: the file.
        wanted: what to give, for the message, such as "give a list of lengths".

    Raises:
        ValueError: there is none, or it is a folder.
    """
    try:
        folder = stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{path} does not exist: {wanted}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}: {wanted}") from error
    if folder:
        raise ValueError(f"{path} is a folder: {wanted}")


def read_text(path: Path, wanted: str) -> str:
    """Reads a file of UTF-8 text, with a byte order mark or without.

    Args:
        path: the file.
        wanted: what to give, for the message.

    Raises:
        ValueError: there is no file, it cannot be read, it is too large, or it is not UTF-8.
    """
    check_file(path, wanted)
    found = bytearray()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                found += chunk
                if len(found) > _MOST_BYTES:
                    raise ValueError(f"{path} has more than {_MOST_BYTES:,} bytes: {wanted}")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}: {wanted}") from error
    try:
        return found.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {wanted}") from error


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
