"""Ranks that are forks of a process which has imported what takes long."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def run_ranks(ranks: int, seconds: float, run: Callable[[int, Path], Any]) -> list[Any] | str:
    """Runs a function as each rank, in a fork of this process.

    Args:
        ranks: number of ranks.
        seconds: time after which they hang.
        run: takes a rank's number and a folder that the ranks share; returns what can be pickled.

    Returns:
        What each rank returned, or why one failed.
    """
    with tempfile.TemporaryDirectory() as place:
        folder, children = Path(place), dict[int, int]()
        for rank in range(ranks):
            child = os.fork()
            if not child:
                with suppress(BaseException):
                    _run(rank, folder, run)
                os._exit(0)
            children[child] = rank
        end = time.monotonic() + seconds
        found: list[Any] = [None] * ranks
        try:
            while children:
                ended, _ = os.waitpid(-1, os.WNOHANG)
                if ended:
                    rank = children.pop(ended)
                    written = folder / f"found {rank}"
                    if not written.exists():
                        return f"rank {rank} ends early"
                    failed, found[rank] = pickle.loads(written.read_bytes())
                    if failed:
                        return f"rank {rank}: {found[rank]}"
                elif time.monotonic() > end:
                    return f"it does not end in {seconds:g} s"
                else:
                    time.sleep(0.05)
        finally:
            for child in children:
                os.kill(child, 9)
                os.waitpid(child, 0)
    return found


def _run(rank: int, folder: Path, run: Callable[[int, Path], Any]) -> None:
    """Runs a rank in a fork, and writes what it returned or why it failed."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    try:
        from distca.lifetime import end_with_parent

        end_with_parent()
        told = False, run(rank, folder)
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:160]
        told = True, f"{type(error).__name__}: {text} ({Path(last.filename).name}:{last.lineno})"
    (folder / f"found {rank}").write_bytes(pickle.dumps(told))


def import_transformers() -> None:
    """Imports what most models of transformers need, and nothing of the project."""
    import transformers.models.gemma3.modeling_gemma3  # noqa: F401

    assert "distca" not in sys.modules
