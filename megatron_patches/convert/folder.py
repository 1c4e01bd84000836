"""Folders that are there whole or not at all, and the weights in them."""

from __future__ import annotations

import contextlib
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

_WEIGHTS = ("model*.safetensors", "*.safetensors.index.json", "pytorch_model*")


@contextlib.contextmanager
def written_whole(folder: Path, force: bool) -> Iterator[Path]:
    """Gives a folder beside another one to write into, which takes its place at the end.

    If the block raises, or the process is killed, the other one stays as it was.

    Args:
        folder: folder to write.
        force: replace a folder that has files. Files of other names are kept, but weights.

    Raises:
        ValueError: it is a file, or has files already and `force` is not given.
    """
    check_free(folder, force)
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        written, before = Path(scratch) / "written", Path(scratch) / "before"
        written.mkdir()
        yield written
        if folder.is_dir():
            stale = {each for pattern in _WEIGHTS for each in folder.glob(pattern)}
            for kept in set(folder.iterdir()) - stale:
                if not (written / kept.name).exists():
                    copy = shutil.copytree if kept.is_dir() else shutil.copy2
                    copy(kept, written / kept.name)
            folder.rename(before)
        try:
            written.rename(folder)
        except OSError:
            if before.is_dir():
                before.rename(folder)
            raise


def check_free(folder: Path, force: bool) -> None:
    """Refuses a folder that cannot be written.

    Raises:
        ValueError: it is a file, or has files already and `force` is not given.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--to {folder} is a file: give a folder")
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"--to {folder} has files already: give another folder, or --force to replace them"
        )


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
    """
    from safetensors.torch import save_file

    parts: list[Path] = []
    names: dict[str, int] = {}
    held: dict[str, torch.Tensor] = {}
    size = total = 0

    def write() -> None:
        path = folder / f"part-{len(parts)}"
        save_file(held, path, metadata={"format": "pt"})
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
