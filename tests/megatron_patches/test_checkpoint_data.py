"""Checkpoints of unknown origin: no file of theirs runs code, or takes memory that it has not."""

from __future__ import annotations

import io
import pickle
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_patches.checkpoint_data import (
    check_archive,
    load_object,
    read_checkpoints_as_data,
    read_index,
)
from support.malicious import Runs


@pytest.fixture(autouse=True)
def _as_data() -> Iterator[None]:
    """Reading as the loops read, undone at the test's end."""
    with (
        mock.patch.object(filesystem, "pickle", filesystem.pickle),
        mock.patch.object(DefaultLoadPlanner, "load_bytes", DefaultLoadPlanner.load_bytes),
        mock.patch.object(FileSystemReader, "_slice_file", FileSystemReader._slice_file),
    ):
        read_checkpoints_as_data()
        yield


@pytest.fixture
def trace(tmp_path) -> Path:
    """What exists if code has run."""
    return tmp_path / "ran"


def save(folder: Path, **values: Any) -> Path:
    writer = dcp.FileSystemWriter(folder)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(values, storage_writer=writer, planner=planner, no_dist=True)
    return folder


def load(folder: Path, **wanted: Any) -> dict[str, Any]:
    # As megatron-core does.
    dcp.load_state_dict(wanted, FileSystemReader(folder), no_dist=True)
    return wanted


def test_what_checkpoints_hold_is_read_as_it_was_saved(tmp_path) -> None:
    """Weights of each type, and the random states of a rank."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.ones(3)}
    weights = {f"w{d}": torch.ones(3, 2).to(d) for d in (torch.float32, torch.bfloat16)}
    folder = save(tmp_path, rng=[state], **weights)
    found = load(folder, rng=None, **{name: torch.zeros_like(w) for name, w in weights.items()})
    assert found["rng"][0]["python"] == state["python"]
    np.testing.assert_array_equal(found["rng"][0]["numpy"][1], state["numpy"][1])
    for name, weight in weights.items():
        assert torch.equal(found[name], weight)


def test_an_index_runs_nothing(tmp_path, trace) -> None:
    folder = save(tmp_path, weight=torch.ones(3))
    index = folder / ".metadata"
    metadata = read_index(folder)
    metadata.planner_data = Runs(trace)
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"\.metadata holds pathlib.*, which only running code"):
        read_index(folder)
    with pytest.raises(dcp.api.CheckpointException, match="which only running code"):
        load(folder, weight=torch.zeros(3))
    assert not trace.exists()


@pytest.mark.parametrize("name", ["os.system", "filesystem.os.system", "FileSystemWriter"])
def test_an_index_names_no_function_of_an_allowed_module(name, tmp_path) -> None:
    module = "torch.distributed.checkpoint.filesystem"
    text = f"\x80\x04\x8c{chr(len(module))}{module}\x8c{chr(len(name))}{name}\x93."
    (tmp_path / ".metadata").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="which only running code"):
        read_index(tmp_path)


def test_an_index_points_at_no_other_file(tmp_path) -> None:
    folder = save(tmp_path, weight=torch.ones(3))
    index = folder / ".metadata"
    index.write_bytes(index.read_bytes().replace(b"__0_0.distcp", b"/dev/../zero"))
    with pytest.raises(ValueError, match="no file of the checkpoint"):
        read_index(folder)


def test_a_missing_or_cut_index_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"is no whole checkpoint.*metadata"):
        read_index(tmp_path)
    index = save(tmp_path, weight=torch.ones(3)) / ".metadata"
    index.write_bytes(index.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"\.metadata is cut off or corrupt"):
        read_index(tmp_path)


def test_an_object_among_tensors_runs_nothing(tmp_path, trace) -> None:
    """As a random state would, which torch itself unpickles as code."""
    folder = save(tmp_path, rng=[Runs(trace)])
    with pytest.raises(dcp.api.CheckpointException, match=r"rng holds .*pathlib.*, which only"):
        load(folder, rng=None)
    assert not trace.exists()


class TwicePickled:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        content = io.BytesIO()
        torch.save(Runs(self.trace), content)
        return (torch.storage._load_from_bytes, (content.getvalue(),))


@pytest.mark.parametrize("kind", [Runs, TwicePickled])
def test_a_state_of_an_fp8_layer_runs_nothing(kind, trace) -> None:
    """Transformer Engine unpickles bytes that are data to torch."""
    name = "layers.0._extra_state"
    content = bytearray(pickle.dumps(kind(trace)))
    planner = mock.Mock(flatten_state_dict=False, state_dict={})
    item = mock.Mock(dest_index=mock.Mock(fqn=name))

    def read(value: Any) -> None:
        saved = io.BytesIO()
        torch.save(value, saved)
        saved.seek(0)
        DefaultLoadPlanner.load_bytes(planner, item, saved)

    with pytest.raises(ValueError, match="which only running code"):
        read(torch.frombuffer(content, dtype=torch.uint8))
    assert not trace.exists()
    harmless = pickle.dumps({"scale": torch.ones(2), "recipe": None})
    read(torch.frombuffer(bytearray(harmless), dtype=torch.uint8))
    assert planner.state_dict[name].numel() == len(harmless)


def compressed(content: bytes) -> io.BytesIO:
    """The same archive, compressed."""
    result = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as before,
        zipfile.ZipFile(result, "w", zipfile.ZIP_DEFLATED) as after,
    ):
        for part in before.infolist():
            after.writestr(part.filename, before.read(part))
    result.seek(0)
    return result


def test_compressed_archives_are_refused_before_memory_is_taken(tmp_path) -> None:
    """Of a weight, too: 4 KB of zeros could stand for 4 MB, or 4 TB."""
    saved = io.BytesIO()
    torch.save(torch.zeros(1 << 20), saved)
    bomb = compressed(saved.getvalue())
    assert bomb.getbuffer().nbytes < 10_000
    for read in (lambda: check_archive(bomb, "it"), lambda: load_object(bomb, "it")):
        with pytest.raises(ValueError, match="it is compressed"):
            read()
    folder = save(tmp_path, weight=torch.zeros(1 << 20))
    (data,) = folder.glob("*.distcp")
    data.write_bytes(bomb.getvalue().ljust(data.stat().st_size))
    index = read_index(folder)
    (place,) = index.storage_data.values()
    place.length = bomb.getbuffer().nbytes
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(dcp.api.CheckpointException, match="is compressed"):
        load(folder, weight=torch.zeros(1 << 20))


def test_objects_of_an_older_format_are_refused() -> None:
    """It takes memory by its headers."""
    saved = io.BytesIO()
    torch.save([1], saved, _use_new_zipfile_serialization=False)
    saved.seek(0)
    with pytest.raises(ValueError, match=r"nothing that torch\.save wrote"):
        load_object(saved, "it")
