"""What is replaced in how Megatron-LM's own loop saves and loads checkpoints.

Its folder of an iteration gets its files one by one, and the tracker names it when all are written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from megatron_patches.loop.checkpoint_folder import (
    TRACKER,
    explaining_loading,
    explaining_saving,
    latest_iteration,
    replaced_when_whole,
)
from megatron_patches.loop.kept_tokenizer import keep_tokenizer


def explain_saving(theirs: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Saves as Megatron-LM does, with the tokenizer, and says why where that fails."""
    from megatron.training import get_args

    with explaining_saving(get_args().save):
        if dist.get_rank() == 0:
            keep_tokenizer(get_args())
        return theirs(*args, **named)


def explain_loading(theirs: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Loads as Megatron-LM does, and says what is wrong with a checkpoint that cannot be loaded."""
    from megatron.training import get_args

    root = get_args().load
    if root is None:
        return theirs(*args, **named)
    _check_tracker(Path(root))
    with explaining_loading(root, get_args().ckpt_step):
        return theirs(*args, **named)


def _check_tracker(root: Path) -> None:
    """Refuses a tracker that cannot be read, of which Megatron-LM makes a successful end."""
    tracker = root / TRACKER
    # Weights alone, such as converted ones, are of no iteration.
    if tracker.is_file() and tracker.read_text(errors="replace").strip() != "release":
        latest_iteration(root)


def open_tracker_whole(theirs: Callable[..., Any], path: Any, mode: str = "r", *more: Any) -> Any:
    """Opens a file as Megatron-LM does, but a tracker is replaced when the new one is whole."""
    if mode == "w" and Path(path).name == TRACKER and Path(path).parent.is_dir():
        return replaced_when_whole(Path(path))
    return theirs(path, mode, *more)


class WholeTracker:
    """Files of one or many storages, as 0.19's loop opens them, but a tracker is replaced.

    Args:
        theirs: megatron-core's `maybe_msc`.
    """

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def open(self, *args: Any, **named: Any) -> contextlib.AbstractContextManager[IO[str]]:
        """Opens a file; see `open_tracker_whole`."""
        opened: contextlib.AbstractContextManager[IO[str]] = open_tracker_whole(
            self._theirs.open, *args, **named
        )
        return opened
