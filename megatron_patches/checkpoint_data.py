"""Checkpoints read as data: what torch and megatron-core unpickle from their files runs no code.

A checkpoint's tensors are data to torch, but its index `.metadata`, objects among the tensors (such
as random states) and the states of fp8 layers are pickles, which run whatever code they name. Here
they may name plain values, tensors and the classes of the format alone. Archives are read where
they are stored as they are, as torch writes them: compressed ones could take any memory.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import os
import pickle
import types
import zipfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import default_planner, filesystem
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.utils import _ReaderView

# Modules whose dataclasses and enumerations are what an index is made of.
_OF_THE_INDEX = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.sharded_tensor.metadata",
    "megatron.core.dist_checkpointing.strategies.torch",
)
_PLAIN = {
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("builtins", "bytearray"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


class _OfAnUnknownClass:
    """A value of a class that this installation lacks.

    Attributes:
        values: what it was made of.
    """

    def __init__(self, *values: Any) -> None:
        self.values = values


def load_object(content: BinaryIO, name: str) -> Any:
    """Loads an object that `torch.save` wrote.

    Attributes of megatron-core's classes that this version lacks are kept as they are.

    Args:
        content: the file, or a part of one.
        name: what it is, for the message.

    Raises:
        ValueError: there is something in it that only running code could make, or it is no object
            that torch saved.
    """
    # Importing it tells torch which classes are data to it.
    importlib.import_module("megatron.core")
    check_archive(content, name)
    unknown = torch.serialization.get_unsafe_globals_in_checkpoint(content)  # type: ignore[arg-type]
    stand_ins: list[Any] = [
        (_OfAnUnknownClass, unsafe) for unsafe in unknown if unsafe.startswith("megatron.")
    ]
    content.seek(0)
    try:
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(content, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        kept_out = [unsafe for unsafe in unknown if not unsafe.startswith("megatron.")]
        raise ValueError(_refusal(name, kept_out or ["what is no plain value"])) from error


def check_archive(content: BinaryIO, name: str) -> None:
    """Refuses an archive whose parts would take more memory than they take in it.

    Raises:
        ValueError: it is compressed, cut off, or no archive of torch's.
    """
    try:
        with zipfile.ZipFile(content) as archive:
            compressed = any(
                part.compress_type != zipfile.ZIP_STORED or part.file_size != part.compress_size
                for part in archive.infolist()
            )
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise ValueError(
            f"{name} is cut off, or nothing that torch.save wrote: give another checkpoint"
        ) from error
    content.seek(0)
    if compressed:
        raise ValueError(
            f"{name} is compressed, as torch.save writes none, and could fill the memory: give "
            "another checkpoint"
        )


def read_index(checkpoint: Path) -> Metadata:
    """Reads the index of a checkpoint, its `.metadata`.

    Args:
        checkpoint: folder of one iteration, such as `SAVE/iter_0000010`.

    Raises:
        ValueError: it is missing, names other things than an index is made of, or is none.
    """
    try:
        with (checkpoint / ".metadata").open("rb") as file:
            return _load_index(file)
    except OSError as error:
        raise ValueError(f"{checkpoint} is no whole checkpoint: {error}") from error


def _load_index(file: BinaryIO) -> Metadata:
    name = str(getattr(file, "name", ".metadata"))
    try:
        index = _IndexUnpickler(file, name).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
        raise ValueError(
            f"{name} is cut off or corrupt ({error}): give another checkpoint"
        ) from error
    if not isinstance(index, Metadata):
        raise ValueError(f"{name} is no index of a checkpoint: give another one")
    for place in (index.storage_data or {}).values():
        if os.path.basename(place.relative_path) != place.relative_path:
            raise ValueError(
                f"{name} points at {place.relative_path}, which is no file of the checkpoint: give "
                "another one"
            )
    return index


def _refusal(name: str, found: list[str]) -> str:
    return (
        f"{name} holds {', '.join(sorted(found))}, which only running code of it could make: "
        "checkpoints are read as data; save it again without that where you trust it"
    )


class _IndexUnpickler(pickle.Unpickler):
    """An unpickler of what a checkpoint's index is made of.

    Args:
        file: the index.
        name: its name, for the message.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        super().__init__(file)
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module in _OF_THE_INDEX and "." not in name:
            found = super().find_class(module, name)
            if dataclasses.is_dataclass(found) or issubclass(found, Enum):
                return found
        raise ValueError(_refusal(self._name, [f"{module}.{name}"]))


class _ExtraStateUnpickler(pickle.Unpickler):
    """An unpickler that only looks whether a state of an fp8 layer is data.

    Args:
        content: the pickle.
        name: what it is, for the message.
    """

    _TENSORS = ("_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_from_type_v2")
    # The second takes the place of the first in megatron-core from 0.17 on.
    _STORAGES = (
        ("torch.storage", "_load_from_bytes"),
        ("megatron.core.safe_globals", "safe_load_from_bytes"),
    )

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(io.BytesIO(content))
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module in ("torch._utils", "torch._tensor") and name in self._TENSORS:
            return _OfAnUnknownClass
        if (module, name) in self._STORAGES:
            return self._load_storage
        if module == "transformer_engine.common.recipe" and "." not in name:
            return _OfAnUnknownClass
        raise ValueError(_refusal(self._name, [f"{module}.{name}"]))

    @staticmethod
    def _load_storage(content: bytes) -> Any:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _check_extra_state(value: Any, name: str) -> None:
    """Checks a state that a layer of Transformer Engine would unpickle once more."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.numel():
        try:
            _ExtraStateUnpickler(value.numpy().tobytes(), name).load()
        except (pickle.UnpicklingError, EOFError) as error:
            raise ValueError(_refusal(name, ["what is no plain value"])) from error
    elif isinstance(value, io.BytesIO) and value.getbuffer().nbytes:
        load_object(value, name)
        value.seek(0)


def read_checkpoints_as_data() -> None:
    """Makes torch's readers of distributed checkpoints, which megatron-core uses, run no code."""
    if hasattr(filesystem.FileSystemReader._slice_file, "__wrapped__"):
        return
    # `read_metadata` looks it up here; writing is as before.
    vars(filesystem)["pickle"] = types.SimpleNamespace(dump=pickle.dump, load=_load_index)
    default_planner.DefaultLoadPlanner.load_bytes = _load_bytes  # type: ignore[method-assign]
    filesystem.FileSystemReader._slice_file = _checked(  # type: ignore[method-assign]
        filesystem.FileSystemReader._slice_file
    )


def _load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
    """Does what `DefaultLoadPlanner.load_bytes` does, without running code."""
    name = read_item.dest_index.fqn
    found = load_object(value, name)
    if "_extra_state" in name:
        _check_extra_state(found, name)
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], found)
    else:
        self.state_dict[name] = found


class _Part(_ReaderView):
    """A part of a file, which torch's view cannot seek from its end."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_END:
            offset, whence = self.len + offset, os.SEEK_SET
        return super().seek(offset, whence)


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    def slice_file(self: Any, file: Any, place: Any) -> Any:
        part: Any = _Part(file, place.offset, place.length)
        check_archive(part, f"{self.path}/{place.relative_path}")
        return part

    slice_file.__wrapped__ = original  # type: ignore[attr-defined]
    return slice_file
