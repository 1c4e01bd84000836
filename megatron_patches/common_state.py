"""What a checkpoint keeps beside tensors, read as data, whatever megatron-core wrote it.

Up to 0.18 it is the file `common.pt`, from 0.19 on an object among the tensors. Its flags are of
classes that other versions may not have: attributes of unknown classes are kept as they are, and no
code of theirs runs.
"""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem


def read_common_state(checkpoint: str | Path) -> dict[str, Any]:
    """Reads what is no tensor of a checkpoint.

    Args:
        checkpoint: folder of one iteration, such as `SAVE/iter_0000010`.

    Raises:
        pickle.UnpicklingError: there is something in it that only running code could make.
    """
    file = Path(checkpoint) / "common.pt"
    if file.exists():
        with file.open("rb") as content:
            common: dict[str, Any] = _load(content)
        return common
    (common,) = _load(_object_among_tensors(checkpoint))
    return common


def _object_among_tensors(checkpoint: str | Path) -> io.BytesIO:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    name = ShardedObject("common_state", None, (1,), (0,)).unique_key
    found: dict[str, Any] = {name: io.BytesIO()}
    reader = FileSystemReader(checkpoint)
    state_dict_loader.load(found, storage_reader=reader, planner=_KeepBytes(), no_dist=True)
    content: io.BytesIO = found[name]
    return content


class _KeepBytes(DefaultLoadPlanner):
    """A planner that does not unpickle objects, as torch's would by running their code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value


class _OfAnUnknownClass:
    """A value of a class that this megatron-core lacks.

    Attributes:
        values: what it was made of.
    """

    def __init__(self, *values: Any) -> None:
        self.values = values


def _load(content: BinaryIO) -> Any:
    # Importing it tells torch which classes are data to it.
    importlib.import_module("megatron.core")
    unknown = torch.serialization.get_unsafe_globals_in_checkpoint(content)
    stand_ins: list[Any] = [
        (_OfAnUnknownClass, name) for name in unknown if name.startswith("megatron.")
    ]
    content.seek(0)
    with torch.serialization.safe_globals(stand_ins):
        return torch.load(content, map_location="cpu", weights_only=True)
