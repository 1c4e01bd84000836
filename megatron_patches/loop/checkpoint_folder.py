"""A folder of checkpoints in Megatron-LM's layout: which are whole, and what is wrong with others.

A folder `SAVE` holds a folder `iter_0000010` for each checkpoint, and the file
`latest_checkpointed_iteration.txt`, the tracker. Converters write weights of no iteration: the
folder is then `release`, and so the tracker says.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron_patches.checkpoint_data import read_index
from megatron_patches.loop.failure_report import KnownElsewhere

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
# torch writes each tensor, or object, as a zip archive.
_ITEM_BEGINS, _ITEM_ENDS, _END_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22
# Parts of messages of torch that a file could not be written, which is not OSError.
_OF_TORCH_S_FILES = ("inline_container", "iostream", "PytorchStreamWriter")


def checkpoint_name(root: str | Path, iteration: int) -> Path:
    """Returns the directory of an iteration's checkpoint."""
    return Path(root) / f"iter_{iteration:07d}"


def latest_iteration(root: str | Path) -> int | None:
    """Reads the iteration that the tracker names; None: there is no checkpoint.

    Raises:
        ValueError: the tracker is unreadable, or names a checkpoint that is not there.
    """
    tracker = Path(root) / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(errors="replace").strip()
    if not text.isdigit():
        raise ValueError(
            f"{tracker} holds {text[:40]!r}, which is not an iteration: write one of {root} into it"
            f"{suggest_checkpoint(root)}"
        )
    if not checkpoint_name(root, int(text)).is_dir():
        raise ValueError(
            f"{tracker} names {checkpoint_name(root, int(text))}, which is not there"
            f"{suggest_checkpoint(root)}"
        )
    return int(text)


def refuse_lost_tracker(root: str | Path) -> None:
    """Refuses a folder of checkpoints without its tracker, where a run would begin anew.

    Raises:
        ValueError: it has a whole checkpoint.
    """
    whole = latest_whole_iteration(root)
    if whole is not None:
        raise ValueError(
            f"{Path(root) / TRACKER} is missing, but there are whole checkpoints; the latest is of "
            f"iteration {whole}: write {whole} into that file, or give another --load"
        )


def refuse_to_overwrite(save: str | Path, load: str | Path | None) -> None:
    """Refuses a folder that has the checkpoints of another run, which this one would overwrite.

    Args:
        save: value of `--save`.
        load: value of `--load`.

    Raises:
        ValueError: the folder has a whole checkpoint, and the run does not go on from there.
    """
    if load is not None and Path(load).resolve() == Path(save).resolve():
        return
    whole = latest_whole_iteration(save)
    if whole is not None:
        raise ValueError(
            f"--save {save} has checkpoints up to iteration {whole}, which this run would "
            f"overwrite from iteration 0 on: give --load {save} to go on, or another --save"
        )


def names_a_release(root: str | Path) -> bool:
    """Returns whether the tracker names weights of no iteration, as converters write them."""
    tracker = Path(root) / TRACKER
    return tracker.is_file() and tracker.read_bytes().strip() == RELEASE.encode()


def loaded_checkpoint(root: str | Path, step: int | None) -> Path | None:
    """Returns the folder of the checkpoint that a run loads, or None.

    Args:
        root: value of `--load`.
        step: value of `--ckpt-step`; None: the tracker says which.

    Raises:
        ValueError: the checkpoint is not there, or the tracker is unreadable.
    """
    if names_a_release(root):
        folder = Path(root) / RELEASE
        if step is not None:
            # Megatron-LM would pass the step over.
            raise ValueError(
                f"--ckpt-step {step}: {Path(root) / TRACKER} names the weights in {folder}, which "
                f"Megatron-LM loads whatever the step is: write {step} into that file, or leave "
                "the flag out"
            )
        if not folder.is_dir():
            raise ValueError(
                f"{Path(root) / TRACKER} names {folder}, which is not there"
                f"{suggest_checkpoint(root, folder)}"
            )
        return folder
    if step is None:
        iteration = latest_iteration(root)
        return None if iteration is None else checkpoint_name(root, iteration)
    folder = checkpoint_name(root, step)
    if not folder.is_dir():
        saved = sorted(path.name for path in Path(root).glob("iter_*"))
        raise ValueError(
            f"--ckpt-step {step}: {folder} is not there; --load has "
            f"{', '.join(saved[-5:]) or 'no checkpoint'}"
        )
    return folder


@contextlib.contextmanager
def replaced_when_whole(path: Path) -> Iterator[IO[str]]:
    """Opens a file to write that takes the place of another when it is closed."""
    written = path.with_name(f".{path.name}")
    with written.open("w") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(written, path)


def find_corruption(checkpoint: Path) -> str | None:
    """Names a file of a checkpoint that is missing, cut off or overwritten, or None.

    Of a file of tensors the size is compared, and the bytes that begin the first tensor and end the
    last one: where a machine lost its power, files may be full of zeros.
    """
    try:
        index = _read_index(checkpoint)
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except Exception as error:
        return f"{checkpoint}'s index is cut off or corrupt ({error})"
    common = checkpoint / "common.pt"
    if "common_state" not in " ".join(index.state_dict_metadata) and not common.exists():
        return f"{common} is missing"
    if common.exists() and not zipfile.is_zipfile(common):
        return f"{common} is cut off or corrupt"
    places: dict[str, list[Any]] = {}
    for place in (index.storage_data or {}).values():
        places.setdefault(place.relative_path, []).append(place)
    for name, of_file in sorted(places.items()):
        file, end = checkpoint / name, max(place.offset + place.length for place in of_file)
        if not file.exists():
            return f"{file} is missing"
        if file.stat().st_size < end:
            return f"{file} is cut off: it has {file.stat().st_size:,} bytes of {end:,}"
        transformed = any(getattr(place, "transform_descriptors", None) for place in of_file)
        if file.suffix == ".distcp" and not transformed and not _begins_and_ends(file, of_file):
            return f"{file} is corrupt: no tensors lie where the index says"
    return None


def _begins_and_ends(file: Path, places: Sequence[Any]) -> bool:
    """Returns whether the first archive of a file begins as one does, and its last one ends so."""
    with file.open("rb") as opened:
        opened.seek(min(place.offset for place in places))
        begins = opened.read(len(_ITEM_BEGINS)) == _ITEM_BEGINS
        opened.seek(max(place.offset + place.length for place in places) - _END_BYTES)
        return begins and opened.read(len(_ITEM_ENDS)) == _ITEM_ENDS


def _read_index(checkpoint: Path) -> Metadata:
    json.loads((checkpoint / "metadata.json").read_text())
    # Raises FileNotFoundError where it is missing.
    (checkpoint / ".metadata").stat()
    return read_index(checkpoint)


def latest_whole_iteration(root: str | Path, but: Path | None = None) -> int | None:
    """Returns the latest iteration whose checkpoint is whole, apart from the folder `but`."""
    names = (path.name.removeprefix("iter_") for path in Path(root).glob("iter_*"))
    for iteration in sorted((int(name) for name in names if name.isdigit()), reverse=True):
        folder = checkpoint_name(root, iteration)
        if folder != but and find_corruption(folder) is None:
            return iteration
    return None


def suggest_checkpoint(root: str | Path, but: Path | None = None) -> str:
    """Returns the end of a message, on which checkpoint to load instead of that of a folder."""
    whole = latest_whole_iteration(root, but)
    if whole is None:
        return ". No other checkpoint there is whole"
    how = f"--ckpt-step {whole}"
    if but is not None and but.name == RELEASE:
        how = f"write {whole} into {Path(root) / TRACKER}"
    return f". The latest other that is whole is of iteration {whole}: {how}"


@contextlib.contextmanager
def explaining_loading(root: str | Path, iteration: int | None) -> Iterator[None]:
    """Lets an error of loading a checkpoint say what is wrong with the checkpoint.

    Args:
        root: folder of the checkpoints.
        iteration: iteration of the checkpoint; None: the tracker says which.

    Raises:
        ValueError: what is wrong, and which checkpoint can be loaded instead.
    """
    checkpoint = loaded_checkpoint(root, iteration)
    if checkpoint is None:
        yield
        return
    # Without any of these files it is of another format.
    ours = (checkpoint / ".metadata").exists() or any(checkpoint.glob("*.distcp"))
    try:
        if ours:
            # torch would warn by a traceback, and go on.
            _read_index(checkpoint)
        yield
    # Not all that torch and Megatron-LM raise here are Exceptions.
    except BaseException as error:
        found = find_corruption(checkpoint) if ours else None
        if found is not None:
            raise ValueError(f"{found}{suggest_checkpoint(root, checkpoint)}") from error
        what, instead = f"{checkpoint} cannot be loaded", suggest_checkpoint(root, checkpoint)
        if isinstance(error, CheckpointException):
            raise _of_ranks(error, what, instead) from error
        if isinstance(error, CheckpointingException):
            said = " ".join(str(error).split())
            raise ValueError(f"{what}: {said[:300]}{instead}") from error
        raise


@contextlib.contextmanager
def explaining_saving(root: str | Path) -> Iterator[None]:
    """Lets an error of saving a checkpoint say why, and which is left.

    Raises:
        ValueError: the reason.
    """
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        what = f"a checkpoint cannot be saved in {root}"
        whole = latest_whole_iteration(root)
        left = "no whole one" if whole is None else f"the latest whole one is of iteration {whole}"
        if isinstance(error, CheckpointException):
            raise _of_ranks(error, what, f"; {left}") from error
        if isinstance(error, OSError):
            raise ValueError(f"{what}: {error}; {left}") from error
        if any(word in str(error) for word in _OF_TORCH_S_FILES):
            free = shutil.disk_usage(root).free
            raise ValueError(f"{what}, where {free:,} bytes are free; {left}") from error
        raise


def _of_ranks(error: CheckpointException, what: str, end: str = "") -> Exception:
    """Returns the error of the first rank that had one; KnownElsewhere: other ranks know it."""
    if not error.failures:
        return KnownElsewhere(what)
    rank, (cause, _) = min(error.failures.items())
    lines = str(cause).removeprefix("Worker failure: ").splitlines()
    return ValueError(f"{what}: on rank {rank}, {lines[0][:120] if lines else repr(cause)}{end}")
