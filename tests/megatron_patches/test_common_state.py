"""What checkpoints keep beside tensors: of other versions, and of unknown origin."""

from __future__ import annotations

import sys
import types
from argparse import Namespace
from enum import Enum
from pathlib import Path

import pytest
import torch

from megatron_patches.common_state import read_common_state
from support.malicious import Runs


@pytest.fixture
def newer(monkeypatch) -> type[Enum]:
    """A class of Megatron's flags that the installed version lacks."""
    name = "megatron.core.of_a_newer_version"
    module = types.ModuleType(name)
    module.Scope = Enum("Scope", {"WIDE": 3}, module=name)
    monkeypatch.setitem(sys.modules, name, module)
    return module.Scope


def test_flags_of_classes_that_this_version_lacks_do_not_hinder(newer, tmp_path, monkeypatch):
    flags = Namespace(num_layers=4, scope=newer.WIDE, dtype=torch.bfloat16)
    torch.save({"args": flags, "iteration": 7}, tmp_path / "common.pt")
    monkeypatch.delitem(sys.modules, newer.__module__)
    common = read_common_state(tmp_path)
    assert (common["iteration"], common["args"].num_layers) == (7, 4)
    assert common["args"].dtype is torch.bfloat16
    assert common["args"].scope.values == (3,)


def test_a_checkpoint_of_unknown_origin_runs_nothing(tmp_path):
    torch.save({"args": Runs(tmp_path / "ran")}, tmp_path / "common.pt")
    with pytest.raises(ValueError, match="only running code"):
        read_common_state(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_an_object_among_tensors_is_read_as_data_too(tmp_path):
    save_among_tensors({"iteration": 7}, tmp_path / "ours")
    assert read_common_state(tmp_path / "ours") == {"iteration": 7}
    save_among_tensors(Runs(tmp_path / "ran"), tmp_path / "theirs")
    with pytest.raises(ValueError, match="only running code"):
        read_common_state(tmp_path / "theirs")
    assert not (tmp_path / "ran").exists()


def save_among_tensors(value: object, folder: Path) -> None:
    """Does what megatron-core does from 0.19 on."""
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, state_dict_saver

    state_dict_saver.save(
        {"common_state/shard_0_1": [value]},
        storage_writer=FileSystemWriter(folder),
        planner=DefaultSavePlanner(flatten_state_dict=False),
        no_dist=True,
    )
