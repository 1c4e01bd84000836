"""Opens the tensors of a Hugging Face checkpoint by name, without reading them."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import torch

_SAFETENSORS, _PICKLED = "model.safetensors", "pytorch_model.bin"
_ADAPTER = "adapter_config.json"
FLOATING_POINT = ("F64", "F32", "F16", "BF16")
"""Data types that weights may have, by the names of safetensors."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


Where: TypeAlias = "slice | tuple[slice, ...]"
"""Which part of a tensor is read."""


class Content(Protocol):
    """Values of a tensor that are read on demand."""

    def __getitem__(self, where: Where, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint. Indexing reads the part that is asked for.

    transformers takes it as a value of a `state_dict`: of such a value it only asks for `[...]`.

    Attributes:
        shape: its shape.
        dtype: its data type, by the names of safetensors.
        content: a slice of safetensors or a tensor; both are read from the file on demand.
    """

    shape: tuple[int, ...]
    dtype: str
    content: Content

    def __getitem__(self, where: Where) -> torch.Tensor:
        return self.content[where]


@contextmanager
def open_tensors(path: str) -> Iterator[dict[str, StoredTensor]]:
    """Opens all weight files of a checkpoint, and gives their tensors by name.

    Args:
        path: folder of the model, or its name on the Hugging Face hub.

    Raises:
        ValueError: there are no weights, a file is missing or damaged, or two files have a tensor
            of the same name.
    """
    tensors: dict[str, StoredTensor] = {}
    owners: dict[str, str] = {}
    with ExitStack() as stack:
        for file in weight_files(path):
            found = (
                _open_safetensors(file, stack)
                if file.suffix == ".safetensors"
                else _open_pickled(file)
            )
            for name, tensor in found.items():
                if name in tensors:
                    raise ValueError(
                        f"{path} has two tensors {name!r}, in {owners[name]} and in {file.name}: "
                        "save the model again with transformers' save_pretrained"
                    )
                tensors[name], owners[name] = tensor, file.name
        yield tensors


def weight_files(path: str) -> list[Path]:
    """Returns the files that transformers reads the weights of a checkpoint from.

    Args:
        path: folder of the model, or its name on the Hugging Face hub.

    Raises:
        ValueError: there are none, one that the index names is missing, or the index is damaged.
    """
    if _find(path, _ADAPTER) is not None:
        raise ValueError(
            f"{path} has an adapter, which is not applied: merge it into the model with peft's "
            f"merge_and_unload, or remove {_ADAPTER}"
        )
    for name in (_SAFETENSORS, _PICKLED):
        if (one := _find(path, name)) is not None:
            return [one]
        if (index := _find(path, f"{name}.index.json")) is not None:
            return _shards(path, index)
    raise ValueError(f"{path} has no weights: add its {_SAFETENSORS}")


def _shards(path: str, index: Path) -> list[Path]:
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = list(dict.fromkeys(listed.values()))
        usable = all(isinstance(name, str) and Path(name).name == name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError):
        usable = False
    if not usable or not names:
        raise ValueError(
            f"{path}: {index.name} is damaged: it must name a file of this folder for each tensor "
            "in its weight_map"
        )
    files = {name: _find(path, name) for name in names}
    missing = [name for name, file in files.items() if file is None]
    if missing:
        raise ValueError(f"{path} lacks files that {index.name} names: {abbreviated(missing)}")
    return [file for file in files.values() if file is not None]


def abbreviated(names: list[str], most: int = 3) -> str:
    """Joins names, and counts those beyond the first few."""
    shown = ", ".join(each if each.isprintable() else repr(each) for each in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _find(path: str, name: str) -> Path | None:
    from transformers.utils import cached_file

    try:
        found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from None
    return None if found is None else Path(found)


def _damaged(file: Path, error: Exception) -> ValueError:
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    return ValueError(f"{file} is damaged and cannot be read: {reason}: download it again")


def _open_safetensors(file: Path, stack: ExitStack) -> dict[str, StoredTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        opened = stack.enter_context(safe_open(file, framework="pt"))
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(file, error) from None
    return {
        name: StoredTensor(tuple(each.get_shape()), each.get_dtype(), each)
        for name, each in slices.items()
    }


def _open_pickled(file: Path) -> dict[str, StoredTensor]:
    """Opens what torch.save wrote; nothing but tensors is unpickled."""
    try:
        # Only files of torch 1.6 and later are archives, which can be mapped into memory.
        mapped = zipfile.is_zipfile(file)
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        # torch advises to load whatever it is.
        raise _damaged(file, ValueError("it is no pickle of tensors alone")) from None
    # Bytes that are no pickle raise whatever they are taken for.
    except Exception as error:
        raise _damaged(file, error) from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(each, torch.Tensor) for name, each in found.items()
    ):
        raise ValueError(f"{file} is no dictionary of tensors, as torch.save writes a state dict")
    return {
        name: StoredTensor(tuple(each.shape), _DTYPES.get(each.dtype, str(each.dtype)), each)
        for name, each in found.items()
    }
