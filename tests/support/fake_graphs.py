"""Graphs where there is no GPU: the operations of a capture are noted, and run again on replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What they return depends on numbers on the device, for which the host would wait.
ASKING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class _Noted(TorchDispatchMode):
    """Runs operations, and notes them with their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func not in ASKING, f"{func} cannot be captured"
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, _tensors(result)))
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


class FakeCapture:
    """A `Capture` that counts.

    Attributes:
        graphs: graphs that were captured.
        replays: how often graphs ran.
    """

    def __init__(self) -> None:
        self.graphs = self.replays = 0

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """See `Capture.prepared`."""
        yield

    def begin(self) -> None:
        """See `Capture.begin`."""
        self._noted = _Noted()
        self._noted.__enter__()

    def end(self) -> Callable[[], object]:
        """See `Capture.end`."""
        noted = self._noted
        noted.__exit__(None, None, None)
        self.graphs += 1

        def replay() -> None:
            self.replays += 1
            for func, args, kwargs, results in noted.calls:
                for into, found in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                    if into.data_ptr() != found.data_ptr():
                        into.copy_(found)

        return replay
