"""Checkpoints read as data: what torch unpickles from their files runs no code.

A checkpoint's tensors are data to torch. Its index `.metadata` and the objects among its tensors
(random states, flags) are pickles: torch would run the code that they name. `hooks` makes torch
read objects by `weights_only`, with the classes that megatron-core calls safe, and the index by an
unpickler of the classes that an index is made of.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import io
import pickle
import types
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

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


def read_common_state(checkpoint: str | Path) -> dict[str, Any]:
    """Reads what a checkpoint keeps beside tensors: the flags and the progress of its run.

    Args:
        checkpoint: folder of one iteration, such as `SAVE/iter_0000010`.

    Raises:
        ValueError: it is missing or corrupt, or holds something that is no data.
    """
    from megatron.core import dist_checkpointing

    try:
        common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(checkpoint))
    except (CheckpointException, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{checkpoint}: its flags cannot be read: {_first_line(error)}") from error
    return common


def _first_line(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    said = str(next(iter(failures.values()))[0] if failures else error)
    return said.removeprefix("Worker failure: ").split("\n", 1)[0][:200]


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
        raise ValueError(f"{checkpoint} is not a whole checkpoint: {error}") from error


def _load_index(file: BinaryIO) -> Metadata:
    name = str(getattr(file, "name", ".metadata"))
    try:
        index = _IndexUnpickler(file, name).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
        raise ValueError(
            f"{name} is cut off or corrupt ({error}): give another checkpoint"
        ) from error
    if not isinstance(index, Metadata):
        raise ValueError(f"{name} is not an index of a checkpoint: give another one")
    return index


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
        raise ValueError(_refusal(self._name, f"{module}.{name}"))


def _refusal(name: str, found: str) -> str:
    return (
        f"{name} holds {found}, which needs code of the checkpoint to run. Checkpoints are read as "
        "data: save it again without that where you trust it"
    )


def index_read_as_data(theirs: Any) -> Any:
    """Replaces the `pickle` by which torch's reader loads an index; dumping is as before."""
    return types.SimpleNamespace(dump=theirs.dump, load=_load_index)


def objects_read_as_data(theirs: Callable[..., None]) -> Callable[..., None]:
    """Makes torch's planner load objects among tensors without running code."""

    @functools.wraps(theirs)
    def load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
        # Importing it tells torch which classes are data.
        importlib.import_module("megatron.core")
        from megatron.core.rerun_state_machine import Call, Caller

        name = read_item.dest_index.fqn
        try:
            # In the state of a step that is to run again, and missing in megatron-core's list.
            with torch.serialization.safe_globals([Call, Caller]):
                found = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            value.seek(0)
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(value)  # type: ignore[arg-type]
            raise ValueError(_refusal(name, ", ".join(unsafe) or "no plain value")) from error
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], found)
        else:
            self.state_dict[name] = found

    return load_bytes
