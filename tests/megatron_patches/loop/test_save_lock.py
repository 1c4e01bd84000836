"""The lock of `--save`: held until its process ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_patches.loop.save_lock import LOCK, SaveLock


@pytest.fixture
def holder(tmp_path) -> Iterator[int]:
    """Another process, which holds the lock of a new folder below `tmp_path`."""
    told, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        lock = SaveLock.take(tmp_path / "save", {"SLURM_JOB_ID": "77"})
        os.write(tells, b"x")
        # What a job's processes that outlive it inherit is no lock.
        if os.fork() == 0:
            signal.alarm(10)
        signal.pause()
        del lock
        os._exit(0)
    assert os.read(told, 1) == b"x"
    yield pid
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for end in (told, tells):
        os.close(end)


def test_a_second_job_is_refused_by_name_until_the_first_was_killed(holder, tmp_path) -> None:
    name = f"in use by process {holder} on {socket.gethostname()} of Slurm's job 77 since 2"
    for _ in range(2):
        with pytest.raises(ValueError, match=name) as refused:
            SaveLock.take(tmp_path / "save", {})
        assert len(str(refused.value).splitlines()) == 1
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    with SaveLock.take(tmp_path / "save", {"TORCHELASTIC_RUN_ID": "mine"}):
        text = (tmp_path / "save" / LOCK).read_text()
        assert text.startswith(f"process {os.getpid()} on ")
        assert "torchrun's job mine" in text
    assert (tmp_path / "save" / LOCK).read_text() == ""


def test_a_file_system_without_locks_is_warned_about(tmp_path, monkeypatch, caplog) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with SaveLock.take(tmp_path, {}):
        assert "without locks (No locks available)" in caplog.text
        assert Path(tmp_path, LOCK).read_text().startswith("process ")


def taken_by_another_process(folder: Path) -> bool:
    """Whether another process can lock the folder. Its lock goes with it."""
    pid = os.fork()
    if pid == 0:
        try:
            SaveLock.take(folder, {})
        except ValueError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("deleted", ["folder", "file"])
def test_a_folder_that_was_deleted_is_locked_again(deleted, tmp_path, caplog) -> None:
    folder = tmp_path / "save"
    with SaveLock.take(folder, {}) as lock:
        lock.renew()
        assert "deleted" not in caplog.text
        if deleted == "folder":
            shutil.rmtree(folder)
        else:
            (folder / LOCK).unlink()
        assert taken_by_another_process(folder)
        lock.renew()
        assert "was deleted while this job ran: locked again" in caplog.text
        assert not taken_by_another_process(folder)
    assert taken_by_another_process(folder)


def test_a_deleted_folder_that_another_job_has_locked_is_not_saved_to(holder, tmp_path) -> None:
    folder = tmp_path / "save"
    (folder / LOCK).rename(folder / "theirs")
    with SaveLock.take(folder, {}) as lock:
        (folder / "theirs").rename(folder / LOCK)
        with pytest.raises(ValueError, match=f"in use by process {holder} on "):
            lock.renew()
