"""Reports why a rank fails in one line for the job, and ends the rank.

torchrun ends the other ranks as soon as one has ended, and reports the first failure. A rank leaves
its traceback to torch's error handler (that of `torch.distributed.elastic`'s `record`), and says in
one line why it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from distca.transport import TransportError
from distca.transport.lost_ranks import is_lost_connection, is_time_limit
from megatron_patches.loop.messages import ERROR_FILE

logger = logging.getLogger(__name__)

_FRAMES = 6
PATIENCE = 2.0
"""Seconds in which torchrun ends the other ranks of a machine after one of them."""


class KnownElsewhere(Exception):
    """A failure whose cause another rank knows and reports."""


@contextlib.contextmanager
def ending_the_job_on_failure(
    environment: Mapping[str, str], end_if_late: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Ends a rank that fails inside at once, with a status other than 0 and one message.

    Ranks wait a little before they say what another one may say first: the first rank doesn't, the
    first of a machine waits less than the others, and a rank that lost another one waits longest.

    Args:
        environment: environment variables of this process, which are torchrun's interface.
        end_if_late: ends the process by a line if other ranks are late or gone, else returns.
    """
    try:
        yield
    except BaseException as error:
        # Megatron-LM's loop leaves by `sys.exit` when it has done all.
        if isinstance(error, SystemExit) and not error.code:
            raise
        code = error.code if isinstance(error, SystemExit) else 1
        try:
            if not isinstance(error, SystemExit):
                if _may_be_another_s(error):
                    end_if_late()
                _report(error, environment)
        finally:
            logging.shutdown()
            # Ordinary exit would wait for peers and threads that will not end.
            os._exit(code if type(code) is int else 1)


def _report(error: BaseException, environment: Mapping[str, str]) -> None:
    """Says why this rank ends, unless torchrun ends it before."""
    explained = isinstance(error, ValueError | KnownElsewhere)
    if not explained and not _is_another_s(error):
        get_error_handler().record_exception(error)
    time.sleep(_patience(error, environment))
    # What is critical is the cause, which `CauseHandler` leaves to torchrun.
    level = logging.ERROR if _is_another_s(error) else logging.CRITICAL
    if explained:
        logger.log(level, "error: %s", error)
    elif ERROR_FILE in environment:
        only = "".join(traceback.format_exception_only(error)).rstrip()
        logger.log(level, "error: %s", only)
    else:
        logger.log(level, "%s", shortened_traceback(error))


def _patience(error: BaseException, environment: Mapping[str, str]) -> float:
    """Returns the seconds in which another rank may report what this one would."""
    if int(environment.get("WORLD_SIZE", 1)) == 1:
        return 0.0
    if _is_another_s(error):
        return 3 * PATIENCE
    if int(environment.get("RANK", 0)) == 0:
        return 0.0
    return PATIENCE if int(environment.get("LOCAL_RANK", 0)) == 0 else 2 * PATIENCE


def _may_be_another_s(error: BaseException) -> bool:
    """Returns whether an error may come of waiting for another rank for too long."""
    waited = isinstance(error, TransportError) or is_time_limit(error)
    return waited or (_is_another_s(error) and not isinstance(error, KnownElsewhere))


def _is_another_s(error: BaseException) -> bool:
    """Returns whether an error looks like one that came of another rank's."""
    return is_lost_connection(error) or isinstance(error, KnownElsewhere | dist.DistError)


def shortened_traceback(error: BaseException) -> str:
    """Returns the traceback of an error with only the innermost frames, and without its causes."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = traceback.format_list(frames[-_FRAMES:])
    left_out = len(frames) - len(frames[-_FRAMES:])
    head = f"  ({left_out} outer calls)\n" if left_out else ""
    return "".join([head, *lines, *traceback.format_exception_only(error)]).rstrip()
