"""A planner in a process of its own, so that planning takes no time from the launches of kernels.

A thread that plans holds the interpreter's lock, for which the thread that launches kernels then
waits. The process imports no torch: it starts in a fraction of a second, and takes little memory.

It reads pickled arguments from a pipe, and writes what a function makes of them to another. It ends
when its parent does, however and whenever that ends, and writes nothing about it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, Generic, TypeVar

from distca.lifetime import end_with_parent, signals_held

Result = TypeVar("Result")

# On the command line, not through the pipe: so it can read them even if the parent is gone.
_MAIN = """
import sys
parent, *sys.path[:] = sys.argv[1:]
from distca.schedule.training.planner_process import serve
serve(int(parent))
"""
_SECONDS_TO_END = 5


class ProcessEndedError(RuntimeError):
    """Raised if a process has ended that a call was sent to."""


class PlannerProcess(Generic[Result]):
    """A function that runs in a process of its own, one call at a time.

    To be made on the main thread: the process is killed when the thread that made it ends.

    Args:
        function: function of this package; it, its arguments and its results can be pickled.
        name: what errors call the process.
    """

    def __init__(
        self, function: Callable[..., Result], name: str = "the planner's process"
    ) -> None:
        self._name = name
        # Signals are for the rank, which may go on for a while: Ctrl-C, or notice of the end.
        with signals_held():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(os.getpid()), *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        try:
            self._send(function)
        except BrokenPipeError:
            raise self._death() from None

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def __call__(self, *arguments: object) -> Result:
        """Calls the function, and waits for its result without holding the interpreter's lock.

        Raises:
            ProcessEndedError: the process has ended.
            Exception: what the function raised.
        """
        assert self._process.stdout is not None
        try:
            self._send(arguments)
            succeeded, value = pickle.load(self._process.stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            raise self._death() from None
        if not succeeded:
            raise value
        return value

    def close(self) -> None:
        """Ends the process. A call that another thread waits for raises a ProcessEndedError."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            # What was not read is lost.
            self._process.stdin.close()

    def _send(self, value: object) -> None:
        assert self._process.stdin is not None
        pickle.dump(value, self._process.stdin, pickle.HIGHEST_PROTOCOL)
        self._process.stdin.flush()

    def _death(self) -> ProcessEndedError:
        try:
            code = self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return ProcessEndedError(
            f"{self._name} {self.pid} ended with exit code {code}"
            + (", killed: is there memory left?" if code == -signal.SIGKILL else "")
        )


def serve(parent: int) -> None:
    """Answers calls until the pipe is closed. The main function of the process.

    Args:
        parent: number of the process that started this one.
    """
    requests, answers = sys.stdin.buffer, _take_over_stdout()
    end_with_parent()
    if os.getppid() != parent:
        return
    try:
        function = _receive(requests)
        while True:
            arguments = _receive(requests)
            try:
                answer = True, function(*arguments)
            except Exception as error:
                answer = False, error
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
    except (EOFError, BrokenPipeError):
        return


def _receive(pipe: BinaryIO) -> Any:
    """Reads a value from a pipe.

    Raises:
        EOFError: the pipe was closed, perhaps in the midst of the value.
    """
    try:
        return pickle.load(pipe)
    except pickle.UnpicklingError as error:
        # The other process was killed while it wrote.
        raise EOFError from error


def _take_over_stdout() -> BinaryIO:
    """Returns the pipe, and lets what the function prints go to standard error instead."""
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return pipe
