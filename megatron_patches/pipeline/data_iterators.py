"""The iterators of a run's splits, as the loop takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_patches.pipeline.processes import Control

TRAIN, TEST, VALID = range(3)
"""Numbers of iterators; `VALID` is the first validation set's, after which others count on."""


class ClosableIterator(Protocol):
    """An endless iterator of micro-batches or ticks that threads make ahead."""

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...

    def close(self) -> None:
        """Ends the threads. May be called again."""


class FullValidationIterator(Iterator[Any]):
    """Iterates over a validation set without end; `len()` is the global batches of an epoch.

    Args:
        iterable: iterator over the set's micro-batches or ticks.
        iterations: number of global batches of an epoch.
    """

    def __init__(self, iterable: ClosableIterator, iterations: int) -> None:
        # Named as in Megatron-LM's own wrapper: see `unwrap`.
        self.iterable, self._iterations = iterable, iterations

    def __next__(self) -> Any:
        return next(self.iterable)

    def __len__(self) -> int:
        return self._iterations

    def close(self) -> None:
        """Ends the threads."""
        self.iterable.close()


def unwrap(iterator: Any) -> Any:
    """Returns the iterator inside `FullValidationIterator` and Megatron-LM's wrappers."""
    while hasattr(iterator, "iterable"):
        iterator = iterator.iterable
    return iterator


@dataclass(frozen=True)
class DataIterators:
    """Iterators of the splits; None for a split that is not read.

    Attributes:
        train: iterator of the training split.
        valid: iterator of the validation split; a list of those of several validation sets.
        test: iterator of the test split.
        control: control of the dedicated servers, or None.
        end: function that frees what the splits share, when no micro-batch will follow.
    """

    train: ClosableIterator | None
    valid: ClosableIterator | list[ClosableIterator] | None
    test: ClosableIterator | None
    control: Control | None = None
    end: Callable[[], None] | None = None

    def numbered(self) -> list[ClosableIterator | None]:
        """Returns all iterators, each at its number (`TRAIN`, ...)."""
        sets = self.valid if isinstance(self.valid, list) else [self.valid]
        return [self.train, self.test, *sets]

    def close(self) -> None:
        """Ends the splits' threads and dedicated servers, and frees what the splits share."""
        if self.control is not None:
            self.control.dismiss()
        self.finish()

    def finish(self) -> None:
        """Closes as `close` does on a dedicated server, which was dismissed."""
        for iterator in self.numbered():
            if iterator is not None:
                iterator.close()
        if self.end is not None:
            self.end()
