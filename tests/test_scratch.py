"""Temporary folders of killed processes are removed by the next one."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from distca.scratch import ScratchFolder

HOLD = """
import sys
from distca.scratch import ScratchFolder
folder = ScratchFolder("scratch-")
(folder.path / "weights").mkdir()
(folder.path / "weights" / "a").write_text("a")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def start() -> tuple[subprocess.Popen[str], Path]:
    """Starts a process that has a folder, and returns both."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_goes_with_its_block(place: Path) -> None:
    with ScratchFolder("scratch-") as folder:
        assert folder.parent == place
        (folder / "file").write_text("a")
    assert list(place.iterdir()) == []


def test_removing_twice_is_removing_once(place: Path) -> None:
    folder = ScratchFolder("scratch-")
    folder.remove()
    folder.path.mkdir()
    folder.remove()
    assert folder.path.exists()


def test_a_killed_process_leaves_a_folder_until_the_next_one(place: Path) -> None:
    process, folder = start()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (folder / "weights" / "a").exists()
    with ScratchFolder("another-"):
        assert folder.exists()
    with ScratchFolder("scratch-"):
        assert not folder.exists()


def test_a_living_process_keeps_its_folder(place: Path) -> None:
    process, folder = start()
    with ScratchFolder("scratch-"):
        assert (folder / "weights" / "a").exists()
    process.communicate("")


def test_what_is_no_such_folder_stays(place: Path) -> None:
    """A folder whose lock has no name yet, a file, and a link to something else."""
    (place / "scratch-without").mkdir()
    (place / "scratch-file").write_text("a")
    (place / "mine").write_text("a")
    (place / "scratch-link").mkdir()
    (place / "scratch-link" / "in use").symlink_to(place / "mine")
    with ScratchFolder("scratch-"):
        pass
    names = {each.name for each in place.iterdir()}
    assert names == {"scratch-without", "scratch-file", "mine", "scratch-link"}
