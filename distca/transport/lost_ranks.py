"""Errors of torch.distributed that come of another rank: it has ended, or calls something else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from distca.transport.base import TransportError

_LOST = ("onnection", "roken pipe", "remote process", "was aborted")
"""Parts of what gloo, NCCL and the store say if another rank's process has ended."""
_WAITED = ("imed out", "imeout", "timing out")
"""Parts of what they say if another rank has not answered in time."""


class LostRankError(TransportError):
    """Raised if another rank has ended, does not answer, or calls something else.

    Its cause (`__cause__`) is the error of gloo or NCCL.
    """


def is_lost_connection(error: BaseException) -> bool:
    """Returns whether an error looks like one of an operation whose other rank has ended."""
    return isinstance(error, LostRankError) or _says(error, _LOST)


def is_time_limit(error: BaseException) -> bool:
    """Returns whether an error looks like one of an operation that waited for too long."""
    return _says(error, _WAITED)


def _says(error: BaseException, parts: tuple[str, ...]) -> bool:
    text = str(error)
    # The time limit of a kernel is not one of another rank.
    if not isinstance(error, RuntimeError) or "CUDA error" in text:
        return False
    return any(part in text for part in parts)


@contextlib.contextmanager
def naming_lost_ranks(operation: str) -> Iterator[None]:
    """Says in our words that another rank is lost, where gloo and NCCL say it in theirs.

    Other errors pass as they are.

    Args:
        operation: what the ranks do together inside, for the message.

    Raises:
        LostRankError: another rank has ended or does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        known = isinstance(error, TransportError)
        if known or not (is_lost_connection(error) or is_time_limit(error)):
            raise
        ours = dist.get_rank() if dist.is_initialized() else "?"
        raise LostRankError(
            f"rank {ours} cannot finish {operation}, since another rank has ended, does not "
            "answer, or calls something else: look for the first error in the output of all "
            f"ranks; torchrun names the rank that failed first ({_first_line(error)})"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
