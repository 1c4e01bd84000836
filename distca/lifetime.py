"""How processes end: by signals, and with the process that started them.

`python -m distca.lifetime PID MODULE ...` runs a module with its arguments, and ends with process
PID, which has started it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

_PR_SET_PDEATHSIG = 1
_SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_SECONDS_TO_END = 2.0
_SECONDS_HELD_BACK = 0.02


MOST_ON_CPUS = 64
"""Most processes of a model on a machine without GPUs: each has a copy of the libraries."""


def check_processes(count: int, gpus: int, what: str) -> None:
    """Refuses more processes of a model than a machine can run.

    Args:
        count: number of processes.
        gpus: GPUs of the machine.
        what: what asks for them, for the message.

    Raises:
        ValueError: there are fewer GPUs, or there are none and the processes are very many.
    """
    if gpus and count > gpus:
        raise ValueError(
            f"{what}: each process needs a GPU, and there are {gpus}: give fewer, or set "
            "CUDA_VISIBLE_DEVICES= to run on CPUs"
        )
    if not gpus and count > MOST_ON_CPUS:
        raise ValueError(f"{what}: give at most {MOST_ON_CPUS} on CPUs")


def end_with_parent() -> None:
    """Lets the kernel kill this process with the thread that started it, where it can (Linux)."""
    import ctypes

    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_torchrun() -> None:
    """Lets this process, one of torchrun's, end with it, also where it is killed.

    Called before anything slow, on the main thread.
    """
    launcher = os.getppid()
    end_with_parent()
    if os.getppid() != launcher:
        os._exit(1)


class Ended(KeyboardInterrupt):
    """Raised in the main thread if a signal asks the process to end."""


class EndAtSignals:
    """Ends a command's process at SIGINT and SIGTERM.

    A signal raises `Ended` in the main thread, so that files are closed and other processes ended
    on the way out. Then the process writes one line to standard error and exits with 128 plus the
    signal's number. It does so after two seconds in any case, since libraries may catch `Ended`,
    and at once if there is a second signal. While a module is being imported `Ended` is held back:
    some modules in C++ abort if an exception comes then.

    Args:
        name: name of the command, with which the line begins.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._number: int | None = None
        self._told = False
        self._held_back = self._sent_again = False
        self._reads, self._writes = os.pipe()

    @property
    def asked(self) -> bool:
        """Whether a signal has asked for the end: errors that follow are only its consequences."""
        return self._number is not None

    def run(self, command: Callable[[], int]) -> int:
        """Runs a command on the main thread, and returns its exit status unless a signal comes.

        Afterwards signals have their default actions: nothing is left to clean up.
        """
        # A signal may come at any line, also in the handlers' own.
        try:
            try:
                for each in _SIGNALS:
                    signal.signal(each, self._take)
                threading.Thread(target=self._watch, daemon=True).start()
                return command()
            finally:
                self._held_back = False
                for each in _SIGNALS:
                    signal.signal(each, signal.SIG_DFL)
        finally:
            if self.asked:
                self._exit()

    def _take(self, number: int, frame: FrameType | None) -> None:
        again, self._sent_again = self._sent_again, False
        if self.asked and not self._held_back:
            if again:
                # `Ended` was raised just before.
                return
            self._exit()
        first, self._number = not self.asked, number
        self._held_back = _is_importing(frame)
        if first:
            os.write(self._writes, b"1")
        if self._held_back:
            return
        # Where `Ended` cannot be passed on, as in a callback, Python would write a traceback.
        sys.unraisablehook = lambda unraisable: None
        raise Ended

    def _watch(self) -> None:
        """Waits for a signal, and then for the end, on a thread that is there before either."""
        os.read(self._reads, 1)
        main = threading.main_thread().ident
        end = time.monotonic() + _SECONDS_TO_END
        while time.monotonic() < end:
            time.sleep(_SECONDS_HELD_BACK)
            if self._held_back and main is not None and self._number is not None:
                # The import may have ended.
                self._sent_again = True
                signal.pthread_kill(main, self._number)
        self._exit()

    def _exit(self) -> None:
        assert self._number is not None
        if not self._told:
            self._told = True
            line = f"{self._name}: {_SIGNALS[signal.Signals(self._number)]}\n"
            with contextlib.suppress(OSError):
                os.write(2, line.encode())
        os._exit(128 + self._number)


def _is_importing(frame: FrameType | None) -> bool:
    """Returns whether a module is being imported where a signal came."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib."):
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Holds SIGINT and SIGTERM back while the context is open.

    Processes that are started meanwhile never get them: Ctrl-C in a terminal goes to all processes,
    and the one that started the others ends them.
    """
    held: list[int] = []
    handlers = {}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        if threading.current_thread() is threading.main_thread():
            # The mask is this thread's. Python calls handlers here for signals that others get.
            for each in _SIGNALS:
                # A handler of a library in C could not be put back.
                if signal.getsignal(each) is not None:
                    handlers[each] = signal.signal(each, lambda number, frame: held.append(number))
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in held[:1]:
            signal.raise_signal(number)


def start_process(
    started: list[BaseProcess],
    function: Callable[..., object],
    *arguments: object,
    pipe: Connection,
) -> None:
    """Starts a process that runs a function.

    It gets no SIGINT and no SIGTERM. It ends with this process, even if that ends before the
    function's module is imported.

    Args:
        started: list that the `multiprocessing.Process` is added to before a signal is taken.
        function: function of a module.
        arguments: arguments of the function.
        pipe: its last argument: an end of a pipe, which only the process keeps.
    """
    import multiprocessing
    from multiprocessing import resource_tracker

    # It would let signals through again if it started with the process.
    resource_tracker.ensure_running()
    # Pickled here, so that the process imports nothing of it before it is tied to this one.
    call = pickle.dumps((function, arguments))
    process = multiprocessing.get_context("spawn").Process(
        target=_run, args=(os.getpid(), call, pipe), daemon=True
    )
    with signals_held():
        process.start()
        started.append(process)
    pipe.close()


def _run(parent: int, call: bytes, pipe: Connection) -> None:
    """Runs the function of `start_process`."""
    end_with_parent()
    if os.getppid() != parent:
        return
    function, arguments = pickle.loads(call)
    function(*arguments, pipe)


def _run_module(parent: int, module: str, arguments: list[str]) -> None:
    """Runs a module as `python -m` does, in a process that ends with its parent."""
    import runpy

    end_with_parent()
    if os.getppid() != parent:
        sys.exit(1)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_module(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
