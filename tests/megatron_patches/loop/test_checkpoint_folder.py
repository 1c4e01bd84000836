"""Which checkpoints of a folder are whole, and what is said of others and of saving that fails."""

from __future__ import annotations

import errno
import functools
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megatron_patches.loop.checkpoint_folder import (
    RELEASE,
    TRACKER,
    checkpoint_name,
    explaining_loading,
    explaining_saving,
    find_corruption,
    latest_iteration,
    latest_whole_iteration,
    loaded_checkpoint,
    replaced_when_whole,
    suggest_checkpoint,
)
from megatron_patches.loop.failure_report import KnownElsewhere
from support.whole_runs import whole_run, write_documents


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of two iterations, the files of megatron-core 0.16."""
    for iteration in (3, 6):
        checkpoint = checkpoint_name(tmp_path, iteration)
        tensors = {"weight": torch.ones(1000), "bias": torch.ones(10)}
        dcp.save(tensors, checkpoint_id=checkpoint, no_dist=True)
        (checkpoint / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
        torch.save({"iteration": iteration}, checkpoint / "common.pt")
    (tmp_path / TRACKER).write_text("6")
    return tmp_path


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("harm", [cut, Path.unlink], ids=["cut off", "missing"])
@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt", ".metadata", "metadata.json"])
def test_a_file_that_is_not_whole_is_named_with_the_checkpoint_to_load(folder, name, harm) -> None:
    assert find_corruption(checkpoint_name(folder, 6)) is None
    assert latest_whole_iteration(folder) == 6
    file = checkpoint_name(folder, 6) / name
    harm(file)
    found = find_corruption(checkpoint_name(folder, 6))
    assert found is not None
    assert (name if harm is Path.unlink else str(file.parent)) in found
    assert ("missing" in found) == (harm is Path.unlink)
    assert latest_whole_iteration(folder) == 3
    for iteration in (None, 6):
        with (
            pytest.raises(ValueError, match=r"iter_0000006.* is of iteration 3: --ckpt-step 3$"),
            explaining_loading(folder, iteration),
        ):
            raise RuntimeError("PytorchStreamReader failed")


@pytest.mark.parametrize("part", ["all", "begin", "end"])
def test_a_file_of_zeros_is_named_with_the_checkpoint_to_load(folder, part: str) -> None:
    file = checkpoint_name(folder, 6) / "__0_0.distcp"
    held = bytearray(file.read_bytes())
    half = len(held) // 2
    zeroed = {"all": slice(None), "begin": slice(half), "end": slice(half, None)}[part]
    held[zeroed] = bytes(len(held[zeroed]))
    file.write_bytes(held)
    found = find_corruption(checkpoint_name(folder, 6))
    assert found == f"{file} is corrupt: no tensors lie where the index says"
    assert latest_whole_iteration(folder) == 3
    assert suggest_checkpoint(folder, checkpoint_name(folder, 6)).endswith("--ckpt-step 3")


def test_a_release_that_is_not_whole_is_named(folder) -> None:
    release = checkpoint_name(folder, 6).rename(folder / RELEASE)
    (folder / TRACKER).write_text("release\n")
    assert loaded_checkpoint(folder, None) == release
    with pytest.raises(ValueError, match=r"--ckpt-step 3: .* write 3 into that file"):
        loaded_checkpoint(folder, 3)
    cut(release / "__0_0.distcp")
    end = f"is of iteration 3: write 3 into {folder / TRACKER}$"
    with pytest.raises(ValueError, match=f"cut off.*{end}"), explaining_loading(folder, None):
        raise RuntimeError("PytorchStreamReader failed")
    shutil.rmtree(release)
    with pytest.raises(ValueError, match=f"release, which is not there.*{end}"):
        loaded_checkpoint(folder, None)


def test_other_errors_of_loading_are_left_as_they_are(folder) -> None:
    with pytest.raises(ValueError, match="another model"), explaining_loading(folder, None):
        raise ValueError("another model")
    # Bytes in the middle of a file are wrong.
    of_ranks = CheckpointException("read", {1: (RuntimeError("bad pickle\nand more"), None)})
    with (
        pytest.raises(ValueError, match=r"loaded: on rank 1, bad pickle\. .*--ckpt-step 3$"),
        explaining_loading(folder, None),
    ):
        raise of_ranks
    # One of another format has no such files.
    for path in checkpoint_name(folder, 6).iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="other format"), explaining_loading(folder, None):
        raise ValueError("other format")


def test_a_tracker_that_cannot_be_read_is_refused(folder) -> None:
    assert latest_iteration(folder) == 6
    (folder / TRACKER).write_text("")
    with pytest.raises(ValueError, match=r"holds ''.* is of iteration 6: --ckpt-step 6"):
        latest_iteration(folder)
    (folder / TRACKER).write_text("7")
    with pytest.raises(ValueError, match=r"0000007, which is not there.*--ckpt-step 6"):
        latest_iteration(folder)
    (folder / TRACKER).unlink()
    assert latest_iteration(folder) is None


def test_a_file_is_replaced_when_the_new_one_is_whole(folder) -> None:
    tracker = folder / TRACKER
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space"), replaced_when_whole(tracker):
        raise full
    assert tracker.read_text() == "6"
    with replaced_when_whole(tracker) as file:
        file.write("9")
        file.flush()
        assert tracker.read_text() == "6"
    assert tracker.read_text() == "9"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r": \[Errno 28\] No space left"),
        (
            CheckpointException("write", {1: (RuntimeError("Worker failure: no space"), None)}),
            ": on rank 1, no space",
        ),
        (RuntimeError("[enforce fail at inline_container.cc:672] . "), "where .* bytes are free"),
    ],
    ids=["here", "on a rank", "in torch"],
)
def test_saving_that_fails_says_why_and_what_is_left(folder, error, message) -> None:
    end = "; the latest whole one is of iteration 6$"
    with pytest.raises(ValueError, match=f"{folder}.*{message}.*{end}"), explaining_saving(folder):
        raise error


def test_a_rank_that_does_not_know_why_saving_failed_says_so(folder) -> None:
    with pytest.raises(KnownElsewhere), explaining_saving(folder):
        raise CheckpointException("write", {})
    with pytest.raises(RuntimeError, match="Connection closed"), explaining_saving(folder):
        raise RuntimeError("Connection closed by peer")


FLAGS = """
    --distca --tensor-model-parallel-size 2 --sequence-parallel --seq-length 128 --split 80,10,10
    --hidden-size 64 --micro-batch-size 1 --global-batch-size 2 --train-iters 4 --save-interval 2
    --lr 1e-2 --lr-decay-style constant --eval-iters 0 --eval-interval 100
    --distca-max-document-length 128 --distca-transport collective
""".split()


def failing_save(flags: list[str], save: str) -> str:
    """Trains where rank 1 has no room for the second checkpoint."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import training

    saves: list[int] = []
    write, save_one = filesystem_async._write_item, training.save_checkpoint

    @functools.wraps(save_one)
    def counted(iteration: int, *args: Any, **named: Any) -> Any:
        saves.append(iteration)
        return save_one(iteration, *args, **named)

    @functools.wraps(write)
    def limited(*args: Any, **named: Any) -> Any:
        if dist.get_rank() == 1 and len(saves) == 2:
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            except OSError:
                # As torch does when it closes the archive.
                raise RuntimeError("[enforce fail at inline_container.cc:672] . ")  # noqa: B904
        return write(*args, **named)

    with (
        mock.patch.object(filesystem_async, "_write_item", limited),
        mock.patch.object(training, "save_checkpoint", counted),
    ):
        try:
            whole_run([*flags, "--save", save])
        except (ValueError, KnownElsewhere) as error:
            return f"{type(error).__name__}: {error}"
    return "saved"


def test_a_disk_that_is_full_on_one_rank_is_named(ranks, tmp_path) -> None:
    data = write_documents(tmp_path / "documents", [100, 300, 20] * 30)
    save = tmp_path / "checkpoints"
    found = ranks.run(failing_save, [*FLAGS, "--data-path", data], str(save), world_size=2)
    expected = f"ValueError: a checkpoint cannot be saved in {save}: on rank 1, [Errno 28] No space"
    assert found[0].startswith(expected)
    assert found[0].endswith("; the latest whole one is of iteration 2")
    # Where only the first rank knows, the other leaves it to that one.
    assert "cannot be saved" in found[1]
    assert latest_iteration(save) == 2
    assert find_corruption(checkpoint_name(save, 2)) is None
    # Megatron-LM leaves what was written, which nothing takes for a checkpoint.
    assert find_corruption(checkpoint_name(save, 4)) is not None
    assert latest_whole_iteration(save) == 2
