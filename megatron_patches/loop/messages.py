"""The messages of a rank."""

from __future__ import annotations

import logging
import sys


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
