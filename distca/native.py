"""Native code: compiled at first use and cached by its sources, compiler and flags."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

HOST_COMPILERS = ("c++", "g++", "clang++")
HOST_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra")


def default_cache() -> Path:
    """Folder of compiled files, in the user's cache."""
    return Path.home() / ".cache" / "distca"


def host_compiler(purpose: str, otherwise: str) -> str:
    """Returns the path of this machine's C++ compiler.

    Args:
        purpose: what is compiled with it.
        otherwise: what else a user can do than to install one.

    Raises:
        RuntimeError: no compiler is installed.
    """
    for name in HOST_COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise RuntimeError(
        f"{purpose} is compiled at first use, but there is no C++ compiler "
        f"({', '.join(HOST_COMPILERS)}): install one (such as the package g++), or {otherwise}"
    )


def kept(
    name: str,
    sources: Path,
    key: Sequence[str],
    build: Callable[[Path], None],
    cache: Path | None = None,
) -> Path:
    """Returns the path of a built file, from the cache or built now.

    Args:
        name: name of the file.
        sources: folder of its sources; the content of every file in it counts.
        key: what else the file depends on: compilers, versions, flags, architectures.
        build: writes the file to a given path. Of several processes one calls it.
        cache: folder of compiled files; None: `default_cache()`.

    Raises:
        RuntimeError: the cache cannot be written.
    """
    digest = hashlib.sha256()
    for part in key:
        digest.update(part.encode() + b"\0")
    for file in sorted(path for path in sources.iterdir() if path.is_file()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    folder = (default_cache() if cache is None else cache) / digest.hexdigest()[:32]
    path = folder / name
    if path.exists():
        return path
    try:
        with _locked(folder):
            if not path.exists():
                unfinished = folder / f"unfinished-{os.getpid()}-{name}"
                build(unfinished)
                unfinished.replace(path)
    except OSError as error:
        raise RuntimeError(
            f"compiled files are kept in {folder.parent}, but that fails: {error}. Make it writable"
        ) from error
    return path


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lets one process at a time build in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(command: Sequence[str]) -> str:
    """Runs a program, and returns its output.

    Raises:
        RuntimeError: the program cannot be run, or fails; the message has its last lines.
    """
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        raise RuntimeError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}")
    return done.stdout
