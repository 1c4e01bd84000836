"""Scratch copies of the working tree, in which tests run and files are mutated."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

PACKAGES = ("distca", "megatron_patches")
"""Whose code is mutated."""
_MARK = "MUTATION_COPY"


def files_of(root: Path) -> list[str]:
    """Returns what git knows or would add, relative to the top folder of its working tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return sorted(name for name in {*done.stdout.split("\0")} - {""} if (root / name).is_file())


@dataclass(frozen=True)
class Copy:
    """A scratch copy.

    Attributes:
        root: its top folder.
    """

    root: Path

    def command(self, *arguments: str, **environment: str) -> list[str]:
        """Returns a command that runs Python in the copy, and imports from it."""
        variables = environment | {
            _MARK: str(self.root),
            "PYTHONPATH": f"{self.root}:{self.root / 'tests'}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            # Of pytest's summary, which names the test that failed.
            "COLUMNS": "400",
        }
        settings = [f"{name}={value}" for name, value in variables.items()]
        unset = ["-u", "PYTEST_CURRENT_TEST", "-u", "COVERAGE_PROCESS_START"]
        return ["env", *unset, "-C", str(self.root), *settings, sys.executable, *arguments]

    def end_processes(self, but: int | None = None) -> None:
        """Kills what was started in the copy and still runs, in whichever session.

        Args:
            but: number of a process that is left alone.
        """
        for _ in range(20):
            every = (process for process in psutil.process_iter() if process.pid != but)
            running = [process for process in every if self._started(process)]
            for process in running:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if not running:
                return
            time.sleep(0.05)

    def _started(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(_MARK) == str(self.root)
        except (psutil.Error, OSError):
            return False


@contextlib.contextmanager
def copied(root: Path, files: list[str]) -> Iterator[Copy]:
    """Makes a copy of a working tree's files; ends its processes and removes it at the end."""
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        copy = Copy(Path(folder).resolve() / "copy")
        for name in files:
            (copy.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy.root / name)
        packages = [name for name in PACKAGES if (copy.root / name).is_dir()]
        # Times of files are too coarse to tell a mutant from the file that it replaces.
        compiling = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", *packages]
        subprocess.run(copy.command(*compiling), check=True)
        for package in packages:
            show = f"import {package}; print({package}.__path__[0])"
            imported = subprocess.check_output(copy.command("-c", show), text=True).strip()
            assert Path(imported).is_relative_to(copy.root), f"{imported}, not {copy.root}"
        try:
            yield copy
        finally:
            copy.end_processes()
