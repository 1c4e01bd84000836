"""What a rank noted in a step, and the new tensors that it made."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LEAST_BYTES = 4096
"""Of a tensor that counts as an allocation."""


def digest(data: bytes) -> str:
    """A short hash."""
    return hashlib.sha256(data).hexdigest()[:16]


def bits(tensor: torch.Tensor) -> str:
    """A hash of a tensor's bits."""
    flat = tensor.detach().contiguous().reshape(-1)
    return digest(flat.view(torch.uint8).numpy().tobytes())


class Log:
    """Lines of one rank in the order of its training thread.

    What other threads do has no order beside it: their lines are sorted.

    Attributes:
        thread: the training thread.
        place: what the training thread does, for new tensors: `kernels`, `exchange` or `other`.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.place = "other"
        self._noted: dict[str, list[Any]] = defaultdict(list)

    def event(self, line: str) -> None:
        """Notes something that happens."""
        own = threading.get_ident() == self.thread
        self._noted["events" if own else "events on other threads"].append(line)

    def note(self, kind: str, value: Any) -> None:
        """Notes a value of another kind than events."""
        self._noted[kind].append(value)

    @contextlib.contextmanager
    def inside(self, place: str) -> Iterator[None]:
        """Whose new tensors those made inside are."""
        before, self.place = self.place, place
        yield
        self.place = before

    def take(self) -> dict[str, list[Any]]:
        """What was noted since the last time."""
        noted, self._noted = self._noted, defaultdict(list)
        if "events on other threads" in noted:
            noted["events on other threads"].sort()
        return dict(noted)


class NewStorages(TorchDispatchMode):
    """Counts operations' results of at least `LEAST_BYTES` that lie in memory of none of their
    arguments, by the log's place; backward passes, which run on the same thread, included.

    Args:
        log: says where the training thread is.

    Attributes:
        counts: `[number, bytes]` by place.
    """

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log
        self.counts: dict[str, list[int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            if storage.nbytes() >= LEAST_BYTES and storage.data_ptr() not in given:
                count = self.counts.setdefault(self._log.place, [0, 0])
                count[0] += 1
                count[1] += storage.nbytes()
        return result
