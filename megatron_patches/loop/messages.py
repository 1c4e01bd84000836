"""The messages of a rank."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

logger = logging.getLogger(__name__)

_UNTIL_THE_FIRST_HAS_TOLD = 20.0
"""Seconds within which ranks that were started together are equally far."""


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable that names torchrun's file for the error of a rank."""


class CauseHandler(logging.Handler):
    """Leaves why a rank ends, its first critical message, to torchrun, which shows it at its end.

    Args:
        path: torchrun's file for the error of this rank.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(logging.CRITICAL)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        # As torch's error handler writes it, which shows a traceback.
        extra = {"py_callstack": text, "timestamp": str(int(record.created))}
        try:
            with self._path.open("x") as file:
                json.dump({"message": {"message": text, "extraInfo": extra}}, file)
        except OSError:
            # It has the traceback, or torchrun has gone.
            return


def message_handlers(rank: int, environment: Mapping[str, str]) -> list[logging.Handler]:
    """Makes handlers that send messages to standard output and errors to the other.

    Args:
        rank: number of this rank.
        environment: environment variables of this process, which are torchrun's interface.
    """
    causes: list[logging.Handler] = []
    if ERROR_FILE in environment:
        causes.append(CauseHandler(Path(environment[ERROR_FILE])))
    messages, errors = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stderr)
    messages.addFilter(lambda record: record.levelno < logging.ERROR)
    messages.setFormatter(
        logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s")
    )
    errors.setLevel(logging.ERROR)
    errors.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s"))
    return [messages, errors, *causes]


def message_level(rank: int) -> int:
    """Returns the level from which a rank's messages are shown: the first tells what it does."""
    return logging.INFO if rank == 0 else logging.WARNING


def show_our_messages(rank: int, environment: Mapping[str, str]) -> None:
    """Shows what DistCA logs, and leaves Megatron-LM's logging as it is."""
    for package in ("distca", "megatron_patches"):
        ours = logging.getLogger(package)
        if not ours.handlers:
            ours.handlers = message_handlers(rank, environment)
            ours.setLevel(message_level(rank))
            ours.propagate = False


class FirstReads(logging.Filter):
    """Passes what megatron-core says of an index when it reads it first: each split reads each."""

    _BEGINS = "Load the _IndexReader from "

    def __init__(self) -> None:
        super().__init__()
        self._read: set[str] = set()
        self._again = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether a message is of a first reading, or a warning."""
        text = record.getMessage()
        if text.startswith(self._BEGINS):
            self._again = text in self._read
            self._read.add(text)
        # The lines that follow name no file.
        return not self._again or record.levelno >= logging.WARNING


def says_how_it_saves(record: logging.LogRecord) -> bool:
    """Returns whether a message is megatron-core's warning of how it saves, from every rank."""
    return record.getMessage().startswith("MCore's async save is deprecated")


def leave_out_repetitions(rank: int) -> None:
    """Leaves out what megatron-core says again, of another split or on another rank.

    Args:
        rank: number of this rank.
    """
    core = "megatron.core"
    logging.getLogger(f"{core}.datasets.indexed_dataset").addFilter(FirstReads())
    if rank != 0:
        log = logging.getLogger(f"{core}.dist_checkpointing.strategies.torch")
        log.addFilter(lambda record: not says_how_it_saves(record))


def exit_with_message(message: str, rank: int) -> NoReturn:
    """Ends a rank because of flags with which all ranks end: the first one says why.

    The launcher ends all as soon as one has ended, so the others leave it the time to.
    """
    if rank == 0:
        logger.critical("error: %s", message)
    else:
        time.sleep(_UNTIL_THE_FIRST_HAS_TOLD)
    sys.exit(2)
