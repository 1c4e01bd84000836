"""Folders that are there whole or not at all, and the weights in them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

BYTES_OF_A_FILE = 5 * 2**30
"""Most bytes of weights in one file, as transformers has it."""

_LOCK = ".being filled"
"""File that a process locks while it moves files into a folder."""

_WEIGHTS = ("model*.safetensors", "*.safetensors.index.json", "pytorch_model*")


@contextlib.contextmanager
def written_whole(folder: Path, force: bool) -> Iterator[Path]:
    """Gives a folder beside another one to write into, which takes its place at the end.

    If the block raises, or the process is killed, the other one stays as it was.

    Args:
        folder: folder to write.
        force: replace a folder that has files. Files of other names are kept, but weights.

    Raises:
        ValueError: it is a file, or cannot be made, or `force` is not given and it has files, be it
            that another process wrote them meanwhile.
    """
    check_free(folder, force)
    given, folder = folder, folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        written, before = Path(scratch) / "written", Path(scratch) / "before"
        written.mkdir()
        yield written
        if force and folder.is_dir():
            stale = {each for pattern in _WEIGHTS for each in folder.glob(pattern)}
            for kept in set(folder.iterdir()) - stale:
                if not (written / kept.name).exists():
                    copy = shutil.copytree if kept.is_dir() else shutil.copy2
                    copy(kept, written / kept.name)
            folder.rename(before)
        try:
            written.rename(folder)
        except OSError as error:
            if before.is_dir():
                before.rename(folder)
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise _filled_by_another(given) from error
            raise


@contextlib.contextmanager
def filled_whole(folder: Path, last: str) -> Iterator[Path]:
    """Gives a folder in or beside another one to write into, whose files move there at the end.

    If the block raises, or the process is killed, the other one stays as it was. Else it has the
    last file only if it has all others. Its own files stay where they have other names. Of several
    processes that fill one folder, the first does, and the others raise.

    Args:
        folder: folder to fill.
        last: name of the file that makes the others count.

    Raises:
        ValueError: it is a file, or cannot be made, or another process has filled it meanwhile.
    """
    check_fillable(folder)
    given, folder = folder, folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A folder that is there may be on a disk of its own.
    home = folder if folder.is_dir() else folder.parent
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=home) as scratch:
        written = Path(scratch) / folder.name
        written.mkdir()
        yield written
        folder.mkdir(exist_ok=True)
        with _alone_in(folder):
            if (folder / last).exists():
                raise _filled_by_another(given)
            for file in sorted(written.iterdir(), key=lambda each: each.name == last):
                place = folder / file.name
                if place.is_dir():
                    shutil.rmtree(place)
                file.replace(place)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Waits until no other process is in this context with the same folder."""
    path = folder / _LOCK
    while True:
        with path.open("w") as lock:
            # Where the file system has no locks, processes must not be as close as this.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                is_there = os.path.samestat(path.stat(), os.fstat(lock.fileno()))
            except FileNotFoundError:
                is_there = False
            if not is_there:
                # The process that was waited for has removed it.
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _filled_by_another(folder: Path) -> ValueError:
    return ValueError(
        f"--to {folder} was written by another process meanwhile, and stays as that left it: give "
        "another folder"
    )


def check_free(folder: Path, force: bool) -> None:
    """Refuses a folder that `written_whole` cannot write.

    Raises:
        ValueError: it is a file, or cannot be made, or has files already and `force` is not given.
    """
    _check_place(folder, folder.resolve().parent)
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"--to {folder} has files already: give another folder, or --force to replace them"
        )


def check_fillable(folder: Path) -> None:
    """Refuses a folder that `filled_whole` cannot fill.

    Raises:
        ValueError: it is a file, or cannot be made or written.
    """
    _check_place(folder, folder.resolve())


def _check_place(folder: Path, place: Path) -> None:
    """Checks that a folder can be made in a place that may not be there yet."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--to {folder} is a file: give a folder")
    while not place.exists():
        place = place.parent
    try:
        tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=place).cleanup()
    except OSError as error:
        raise ValueError(
            f"--to {folder} cannot be written: {place}: {error.strerror}: give another folder"
        ) from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file of transformers' settings."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_weights(
    folder: Path, weights: Iterable[tuple[str, torch.Tensor]], most_bytes: int = BYTES_OF_A_FILE
) -> None:
    """Writes weights as safetensors, with an index where one file does not hold them all.

    Args:
        folder: folder to write into, which has files of the wanted mode.
        weights: weights by their names, which are held until a file is full.
        most_bytes: size of a file, unless one tensor is larger.

    Raises:
        OSError: a file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    parts: list[Path] = []
    names: dict[str, int] = {}
    held: dict[str, torch.Tensor] = {}
    size = total = 0

    def write() -> None:
        path = folder / f"part-{len(parts)}"
        try:
            save_file(held, path, metadata={"format": "pt"})
        except SafetensorError as error:
            free = shutil.disk_usage(folder).free
            raise OSError(
                f"weights cannot be written, where {free:,} bytes are free: {error}"
            ) from error
        # safetensors makes its file readable for the owner only, whatever the umask is.
        path.chmod(0o666 & ~_umask())
        parts.append(path)
        held.clear()

    for name, weight in weights:
        count = weight.nbytes
        if held and size + count > most_bytes:
            write()
            size = 0
        # Views of one tensor are not saved.
        held[name] = weight.detach().cpu().clone(memory_format=torch.contiguous_format)
        names[name] = len(parts)
        size, total = size + count, total + count
    write()
    if len(parts) == 1:
        parts[0].rename(folder / "model.safetensors")
        return
    files = [f"model-{each + 1:05}-of-{len(parts):05}.safetensors" for each in range(len(parts))]
    for part, file in zip(parts, files, strict=True):
        part.rename(folder / file)
    index = {name: files[number] for name, number in sorted(names.items())}
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": index},
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
