"""Folders that `distca convert` writes: whole or not at all, and refused before any work."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_patches.convert.folder import check_free, filled_whole, write_weights, written_whole
from support.converted import convert, refused
from support.forks import forking
from support.small_families import save_family


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A fresh process for the commands: saving starts children, which `ranks` may not have."""
    with ProcessPoolExecutor(1, forking()) as pool:
        yield pool


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Lets files of more than 50 KiB fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50 << 10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def both_ways_on_a_full_disk(work: Path) -> tuple[str, str, list[str]]:
    """What is said where neither direction can write, and what is in the checkpoint's folder."""
    with small_files():
        there = refused(work / "model", "--to", work / "checkpoint")
    left = [each.name for each in (work / "checkpoint").iterdir()]
    convert(work / "model", "--to", work / "checkpoint")
    with small_files():
        back = refused("--checkpoint", work / "checkpoint", "--to", work / "back")
    return there, back, left


def test_a_full_disk_leaves_nothing_behind(process, tmp_path: Path) -> None:
    save_family("llama", tmp_path / "model")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "notes").write_text("mine")
    there, back, left = process.submit(both_ways_on_a_full_disk, tmp_path).result(timeout=200)
    assert left == ["notes"]
    assert f"cannot be saved in {tmp_path}/checkpoint: " in there
    assert there.endswith(f"; --to {tmp_path}/checkpoint stays as it was")
    assert "weights cannot be written, where" in back
    assert {each.name for each in tmp_path.iterdir()} == {"model", "checkpoint"}
    assert {each.name for each in (tmp_path / "checkpoint").iterdir()} == {
        *("notes", "tokenizer", "iter_0000000", "latest_checkpointed_iteration.txt")
    }


@pytest.mark.parametrize("where", ["file", "file/x", "/proc/x", "/proc/x/y"])
def test_folders_that_cannot_be_are_refused_at_once(tmp_path: Path, where: str) -> None:
    from megatron_patches.convert.to_hugging_face import to_hugging_face
    from megatron_patches.convert.to_megatron import to_megatron

    (tmp_path / "file").write_text("mine")
    place = tmp_path / where
    for work in (
        # What they are to convert is not there, which they would say next.
        lambda: to_megatron(tmp_path / "nothing", place, bf16=True),
        lambda: to_hugging_face(tmp_path / "nothing", place),
    ):
        with pytest.raises(ValueError, match=f"--to {place} (is a file|cannot be written: /)"):
            work()
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_in_folders_that_are_not_there_yet(tmp_path: Path) -> None:
    check_free(tmp_path / "a" / "b", force=False)
    assert [*tmp_path.iterdir()] == []


class Killed(BaseException):
    """As if the process ended."""


def test_a_folder_is_filled_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "checkpoint"

    def write(end: BaseException | None) -> None:
        with filled_whole(folder, "tracker") as written:
            for name in ("part", "tracker", "zone"):
                (written / name).mkdir() if name == "part" else (written / name).write_text("x")
            (written / "part" / "weights").write_text("new")
            if end:
                raise end

    with pytest.raises(Killed):
        write(Killed())
    assert not folder.exists()
    (folder / "part").mkdir(parents=True)
    for name in ("part/old", "notes"):
        (folder / name).write_text("mine")
    with pytest.raises(Killed):
        write(Killed())
    assert {str(each.relative_to(folder)) for each in folder.rglob("*")} == {
        *("part", "part/old", "notes")
    }
    write(None)
    assert {str(each.relative_to(folder)) for each in folder.rglob("*")} == {
        *("part", "part/weights", "notes", "tracker", "zone")
    }


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    with small_files(), pytest.raises(OSError, match=r"weights cannot be written, where .* free"):
        write_weights(tmp_path, [("w", torch.zeros(1 << 16))])


def fill_checkpoint(folder: Path) -> contextlib.AbstractContextManager[Path]:
    return filled_whole(folder, "tracker")


def fill_model(folder: Path) -> contextlib.AbstractContextManager[Path]:
    return written_whole(folder, force=False)


@pytest.mark.parametrize("way", [fill_checkpoint, fill_model])
@pytest.mark.parametrize("is_there", [False, True])
def test_the_slower_of_two_is_refused(tmp_path: Path, way, is_there: bool) -> None:
    folder = tmp_path / "out"
    if is_there:
        folder.mkdir()

    def write(written: Path, content: str) -> None:
        (written / "part").mkdir()
        for name in ("part/weights", "tracker"):
            (written / name).write_text(content)

    def write_twice() -> None:
        with way(folder) as slower:
            with way(folder) as faster:
                write(faster, "fast")
            write(slower, "slow")

    with pytest.raises(ValueError, match=f"--to {folder} was written by another process meanwhile"):
        write_twice()
    files = {each.relative_to(folder): each for each in folder.rglob("*") if each.is_file()}
    assert {str(name): file.read_text() for name, file in files.items()} == {
        **{"part/weights": "fast", "tracker": "fast"}
    }
    assert [*tmp_path.iterdir()] == [folder]


def fill(folder: Path, content: str) -> str:
    """Fills a folder with some files as other processes do, and says what came of it."""
    try:
        with filled_whole(folder, "tracker") as written:
            for name in (*map(str, range(200)), "tracker"):
                (written / name).write_text(content)
    except ValueError as error:
        return str(error)
    return content


def test_of_processes_at_once_one_fills_a_folder(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, forking()) as pool:
        for round_ in range(10):
            folder = tmp_path / str(round_)
            said = [*pool.map(fill, [folder] * 4, "abcd", timeout=60)]
            (winner,) = (each for each in said if len(each) == 1)
            assert all("by another process meanwhile" in each for each in said if each != winner)
            assert {each.read_text() for each in folder.iterdir()} == {winner}
            assert len([*folder.iterdir()]) == 201
