"""Checkpoints of unknown origin: what torch unpickles from their files runs no code."""

from __future__ import annotations

import pickle
import random
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from megatron_patches import hooks
from megatron_patches.checkpoint_data import read_common_state, read_index
from support.malicious import Runs

ROWS = [hook for hook in hooks.MENDS if hook.module.startswith("torch.distributed.checkpoint")]


@pytest.fixture(autouse=True)
def _as_data() -> Iterator[None]:
    """Reading as runs read, undone at the test's end."""
    undo = [hook for hook in ROWS if "_distca_originals" not in vars(next(hook.places())[0])]
    hooks.apply(ROWS)
    yield
    for hook in undo:
        hook.undo()


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
    dcp.load_state_dict(wanted, dcp.FileSystemReader(folder), no_dist=True)
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
    with pytest.raises(ValueError, match=r"\.metadata holds pathlib.*, which needs code"):
        read_index(folder)
    with pytest.raises(dcp.api.CheckpointException, match="which needs code"):
        load(folder, weight=torch.zeros(3))
    assert not trace.exists()


@pytest.mark.parametrize("name", ["os.system", "filesystem.os.system", "FileSystemWriter"])
def test_an_index_names_no_function_of_an_allowed_module(name, tmp_path) -> None:
    module = "torch.distributed.checkpoint.filesystem"
    text = f"\x80\x04\x8c{chr(len(module))}{module}\x8c{chr(len(name))}{name}\x93."
    (tmp_path / ".metadata").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="which needs code"):
        read_index(tmp_path)


def test_a_missing_or_cut_index_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"is not a whole checkpoint.*metadata"):
        read_index(tmp_path)
    index = save(tmp_path, weight=torch.ones(3)) / ".metadata"
    index.write_bytes(index.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"\.metadata is cut off or corrupt"):
        read_index(tmp_path)


def test_an_object_among_tensors_runs_nothing(tmp_path, trace) -> None:
    """As a random state would, which torch itself unpickles as code."""
    folder = save(tmp_path, rng=[Runs(trace)])
    with pytest.raises(dcp.api.CheckpointException, match=r"rng holds .*pathlib.*, which needs"):
        load(folder, rng=None)
    assert not trace.exists()


def checkpoint_with(common: object, folder: Path) -> Path:
    """A checkpoint as megatron-core begins it, with the file that it had up to 0.18."""
    folder.mkdir()
    (folder / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",'
        ' "common_backend_version": 1}'
    )
    torch.save(common, folder / "common.pt")
    return folder


def test_flags_of_a_run_are_read_as_data(tmp_path, trace) -> None:
    flags = Namespace(num_layers=4, dtype=torch.bfloat16)
    folder = checkpoint_with({"args": flags, "iteration": 7}, tmp_path / "ours")
    assert read_common_state(folder) == {"args": flags, "iteration": 7}
    folder = checkpoint_with({"args": Runs(trace)}, tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"theirs: its flags cannot be read: .*eights"):
        read_common_state(folder)
    assert not trace.exists()
    (folder / "common.pt").write_bytes(b"PK")
    with pytest.raises(ValueError, match="theirs: its flags cannot be read"):
        read_common_state(folder)
