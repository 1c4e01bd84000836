"""A process that has imported what takes long, and forks for each run of pytest.

The imports of torch and transformers are most of what a quick test takes. Nothing of the project
is imported before a fork, so a run sees the files as they are then, and decides as a fresh process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # This file is run by its path as well, in copies that have no folder `mutation`.
    from mutation.copies import Copy

IMPORTED = (
    "pytest",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
)
"""What a fork does not import again. None of it imports the project."""
_READY = "ready\n"


class Warm:
    """Runs pytest in a copy, each time in a fork of one process.

    Args:
        copy: where it runs.
        imported: modules that the process imports first.
    """

    def __init__(self, copy: Copy, imported: Sequence[str] = IMPORTED) -> None:
        self._copy, self._printed = copy, copy.root.parent / "printed"
        pipe = subprocess.PIPE
        command = copy.command(__file__, *imported)
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        if self._told() != _READY:
            raise RuntimeError(f"cannot import {', '.join(imported)}")

    def run(self, arguments: Sequence[str], seconds: float) -> tuple[int | None, str]:
        """Runs `python -m pytest`, and ends what it leaves behind.

        Args:
            arguments: pytest's.
            seconds: that it may take.

        Returns:
            Its exit code, which is negative for a signal and None if it took longer; and what it
            printed.

        Raises:
            RuntimeError: the process that forks is gone.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(self._printed), *arguments]) + "\n")
        in_time, _, _ = select.select([self._process.stdout], [], [], seconds)
        self._copy.end_processes(but=self._process.pid)
        if not (told := self._told()):
            raise RuntimeError("the process that forks has ended")
        return int(told) if in_time else None, self._printed.read_text(errors="replace")

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def _told(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def _serve(imported: Sequence[str]) -> None:
    # As `python -m pytest` has it.
    sys.path[0] = os.getcwd()
    for name in imported:
        importlib.import_module(name)
    # A collection in a fork would write to the pages of all that was imported.
    gc.collect()
    gc.freeze()
    print(_READY, end="", flush=True)
    for line in sys.stdin:
        printed, *arguments = json.loads(line)
        if (fork := os.fork()) == 0:
            _run_pytest(printed, arguments)
        _, status = os.waitpid(fork, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run_pytest(printed: str, arguments: Sequence[str]) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for file, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(file, number)
    sys.argv = ["pytest", *arguments]
    # With `__main__` and its end as they are of `python -m pytest`.
    runpy.run_module("pytest", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve(sys.argv[1:])
