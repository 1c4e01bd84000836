"""The messages of a rank."""

from __future__ import annotations

import logging
import sys
import time
from typing import NoReturn

logger = logging.getLogger(__name__)

_UNTIL_THE_FIRST_HAS_TOLD = 20.0
"""Seconds within which ranks that were started together are equally far."""


def message_handlers(rank: int) -> list[logging.Handler]:
    """Makes handlers that send messages to standard output and errors to the other."""
    messages, errors = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stderr)
    messages.addFilter(lambda record: record.levelno < logging.ERROR)
    messages.setFormatter(
        logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s")
    )
    errors.setLevel(logging.ERROR)
    errors.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s"))
    return [messages, errors]


def message_level(rank: int) -> int:
    """Returns the level from which a rank's messages are shown: the first tells what it does."""
    return logging.INFO if rank == 0 else logging.WARNING


def exit_with_message(message: str, rank: int) -> NoReturn:
    """Ends a rank because of flags with which all ranks end: the first one says why.

    The launcher ends all as soon as one has ended, so the others leave it the time to.
    """
    if rank == 0:
        logger.critical("error: %s", message)
    else:
        time.sleep(_UNTIL_THE_FIRST_HAS_TOLD)
    sys.exit(2)
