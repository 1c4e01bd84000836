"""Prefetching: a thread makes the next values while the present one is used."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, NoReturn, TypeVar

Value = TypeVar("Value")

# Seconds for which a process that ends waits for the value that a thread is making.
PATIENCE_AT_EXIT_S = 10.0


class Prefetcher(Generic[Value]):
    """An iterator whose values a thread makes, up to `depth` ahead.

    An exception in the thread is raised to the consumer in place of the value that it was for.

    Args:
        values: source of the values, used by the thread alone.
        depth: finished values that may wait, at least 1.

    Attributes:
        seconds_waited: seconds that the last `next()` waited for its value, 0 if it was finished.
    """

    def __init__(self, values: Iterator[Value], depth: int = 1) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}: at least one value must be made ahead")
        self.seconds_waited = 0.0
        self._finished: queue.Queue[Callable[[], Value]] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._make, args=(values,), name="distca-prefetch", daemon=True
        )
        self._thread.start()
        # The interpreter ends its daemon threads, which aborts the process where one is in C++.
        atexit.register(self._end)

    def _make(self, values: Iterator[Value]) -> None:
        while not self._stop.is_set():
            try:
                value = next(values)
            except BaseException as error:
                # The consumer is to see StopIteration, too.
                self._put(_raiser(error))
                return
            self._put(lambda value=value: value)  # type: ignore[misc]

    def _put(self, result: Callable[[], Value]) -> None:
        while not self._stop.is_set():
            try:
                self._finished.put(result, timeout=0.1)
                return
            except queue.Full:
                continue

    def __iter__(self) -> Prefetcher[Value]:
        return self

    def __next__(self) -> Value:
        if self._stop.is_set():
            raise StopIteration
        try:
            result = self._finished.get_nowait()
            self.seconds_waited = 0.0
        except queue.Empty:
            start = time.perf_counter()
            result = self._finished.get()
            self.seconds_waited = time.perf_counter() - start
        try:
            return result()
        except BaseException:
            self._stop.set()
            atexit.unregister(self._end)
            raise

    def _end(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_AT_EXIT_S)

    def close(self) -> None:
        """Ends the thread, and drops the values that it made."""
        self._stop.set()
        self._thread.join()
        atexit.unregister(self._end)


def _raiser(error: BaseException) -> Callable[[], NoReturn]:
    def raise_it() -> NoReturn:
        raise error

    return raise_it
