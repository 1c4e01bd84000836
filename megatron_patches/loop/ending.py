"""The end of a rank: with one message for the whole job, and with no process left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch.distributed as dist

from distca.lifetime import end_with_parent
from megatron_patches.loop.peers import Peers

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NO_SIGNAL = b"\0"
_FRAMES = 6
_PATIENCE = 2.0


@contextlib.contextmanager
def ending_the_job_on_failure(
    environment: Mapping[str, str], applies: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Makes a rank that fails inside end at once with a status other than 0.

    The launcher then ends the other ranks. One rank of the job logs a message: the first that
    fails, or where a rank was killed the first that misses it.

    Args:
        environment: environment variables of this process, which tell torchrun's.
        applies: function that tells, of a failure, whether to do so; else the error goes on.
    """
    peers = Peers.by_torchrun(environment)
    end = _End(peers)
    with _heard_signals(end, applies):
        try:
            yield
        except BaseException as error:
            # Megatron-LM's loop leaves by `sys.exit` when it has done all.
            if (isinstance(error, SystemExit) and not error.code) or not applies():
                raise
            code = error.code if isinstance(error, SystemExit) else 1
            end.of_process(code if type(code) is int else 1, partial(_message, error, peers))


class KnownElsewhere(Exception):
    """A failure of which another rank knows the cause, and tells it."""


def _message(error: BaseException, peers: Peers) -> str | None:
    """Returns what this rank tells of its failure; None: nothing, or another rank does."""
    if isinstance(error, SystemExit):
        return None
    lost = None if isinstance(error, ValueError) else peers.lost()
    patience = 0.0 if lost or not _is_another_s(error) else _PATIENCE
    if not peers.first_to_tell(patience):
        return None
    if lost is not None:
        return f"error: the job ends, since {lost}"
    if isinstance(error, ValueError | KnownElsewhere):
        return f"error: {error}"
    return shortened_traceback(error)


def _is_another_s(error: BaseException) -> bool:
    """Whether an error looks like one that came of another rank's."""
    lost_connection = isinstance(error, RuntimeError) and "onnection" in str(error)
    return lost_connection or isinstance(error, KnownElsewhere | dist.DistError)


def shortened_traceback(error: BaseException) -> str:
    """Returns the traceback of an error with the innermost frames alone, and without its causes."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = traceback.format_list(frames[-_FRAMES:])
    left_out = len(frames) - len(frames[-_FRAMES:])
    head = f"  ({left_out} outer calls)\n" if left_out else ""
    return "".join([head, *lines, *traceback.format_exception_only(error)]).rstrip()


class _End:
    """The end of this process, which only one of its threads may bring about."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._begun = threading.Lock()

    def of_process(self, code: int, message: Callable[[], str | None]) -> None:
        """Logs a message, if there is one, and ends the process."""
        # Another thread that is here already ends the process.
        self._begun.acquire()
        try:
            text = message()
            if text is not None:
                logger.critical("%s", text)
        except Exception:
            # The end comes all the same.
            logger.exception("no message could be made")
        finally:
            logging.shutdown()
            # Ordinary exit would wait for peers and threads that will not end.
            os._exit(code)

    def by_signal(self, number: int) -> None:
        """Ends the process because of a signal; nobody else may have told why."""
        name = signal.Signals(number).name

        def message() -> str | None:
            lost = self.peers.lost() if number == signal.SIGTERM else None
            if not self.peers.first_to_tell():
                return None
            return f"error: the job ends, since {lost}" if lost else f"the job ends by {name}"

        self.of_process(128 + number, message)


@contextlib.contextmanager
def _heard_signals(end: _End, applies: Callable[[], bool]) -> Iterator[None]:
    """Lets a thread end the process by Ctrl-C or SIGTERM, which the main one may not notice.

    It may wait in a collective whose other ranks have gone. A loop that installs a handler of its
    own, as for `--exit-signal-handler`, takes the signal over.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def pass_on(number: int, frame: object) -> None:
        """Leaves the signal to the thread, which reads its number from the pipe."""
        if not applies():
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)

    def listen() -> None:
        while (numbers := os.read(read_end, 1)) != _NO_SIGNAL:
            if signal.getsignal(numbers[0]) is pass_on and applies():
                end.by_signal(numbers[0])

    def let_end_by_itself() -> None:
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            if signal.getsignal(number) is pass_on:
                signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, pass_on) for number in _SIGNALS}
    wakeup_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    _prepare_forks(let_end_by_itself)
    listener = threading.Thread(target=listen, name="distca-signals", daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            if signal.getsignal(number) is pass_on:
                signal.signal(number, handler)
        os.write(write_end, _NO_SIGNAL)
        listener.join()
        os.close(write_end)
        os.close(read_end)


def _prepare_forks(in_child: Callable[[], None]) -> None:
    """Lets the kernel end forked processes with this one, and calls a function in them.

    No signal comes to a forked process before that: it would be taken for this one's.
    """
    forking = threading.local()

    def before() -> None:
        # The kernel ends a process with the thread that forked it: others may end before.
        forking.on_main_thread = threading.current_thread() is threading.main_thread()
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def after_in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def after_in_child() -> None:
        in_child()
        if forking.on_main_thread:
            end_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    os.register_at_fork(
        before=before, after_in_parent=after_in_parent, after_in_child=after_in_child
    )
