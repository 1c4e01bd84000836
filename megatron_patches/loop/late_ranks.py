"""Ends a job in which ranks are late by one line that names them.

torch ends a rank that waited for too long, but only knows the operation that waited. So a thread of
each rank writes how far the rank has come to the store in which the ranks met. When this rank has
not come further for as long as a collective may take, another thread reads twice how far all ranks
have come. A rank that wrote nothing between is stopped or gone. If all wrote, those that came least
far are late. The training thread only assigns a few values in a step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NoReturn

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from megatron_patches.pipeline.progress import Progress

logger = logging.getLogger(__name__)

_PERIODS = 20
_LONGEST_PERIOD = 2.0
_SHORTEST_WINDOW = 3.0
_NAMED = 8
_EXIT_CODE = 1
_UNTIL_ANOTHER_HAS_ENDED = 5.0


@dataclass(frozen=True)
class Seen:
    """What a rank wrote.

    Attributes:
        beat: number of times that it wrote.
        place: where it is, as `host H, local rank L`.
        phase: iteration and phase.
        serves_only: whether it is a dedicated server.
        is_idle: whether it is a dedicated server without a global batch.
        entered: see `Progress`.
        exchanges: see `Progress`.
        waits: whether its training thread waits for other ranks or for the GPU.
        line: innermost Python line of the training thread.
    """

    beat: int
    place: str
    phase: str
    serves_only: bool
    is_idle: bool
    entered: int
    exchanges: int
    waits: bool
    line: str

    @property
    def position(self) -> tuple[str, int, int]:
        """How far it has come."""
        return self.phase, self.entered, self.exchanges


def late_ranks(before: Sequence[Seen | None], now: Sequence[Seen | None]) -> tuple[list[int], bool]:
    """Finds the ranks that are late.

    Args:
        before: what each rank had written some time ago; None: nothing.
        now: what each rank has written now.

    Returns:
        Ranks that all others wait for, and whether they write no more. None: the job goes on, or
        all ranks have come equally far.
    """
    pairs = [*enumerate(zip(before, now, strict=True))]
    if any(old and new and old.position != new.position for _, (old, new) in pairs):
        return [], False
    if silent := [r for r, (old, new) in pairs if new is None or (old and old.beat == new.beat)]:
        return silent, True
    # All ranks start the same exchanges, those of other stages and dedicated servers included.
    behind = {rank: seen for rank, seen in enumerate(now) if seen is not None and not seen.is_idle}
    for key in (_exchanges, _entered, _waits):
        compared = {r: value for r, each in behind.items() if (value := key(each)) is not None}
        if len({*compared.values()}) > 1:
            least = min(compared.values())
            behind = {rank: behind[rank] for rank, value in compared.items() if value == least}
    everyone = sum(not each.is_idle for each in now if each is not None)
    return (sorted(behind) if len(behind) < everyone else []), False


def _exchanges(seen: Seen) -> int | None:
    return seen.exchanges


def _entered(seen: Seen) -> int | None:
    # A dedicated server enters phases of its own.
    return None if seen.serves_only else seen.entered


def _waits(seen: Seen) -> int | None:
    return int(seen.waits)


def describe(late: Sequence[int], now: Sequence[Seen | None], silent: bool, seconds: float) -> str:
    """Returns one line about late ranks.

    Args:
        late: the ranks.
        now: what each rank has written.
        silent: whether they write no more.
        seconds: time for which the others have waited.
    """
    named = []
    for rank in late[:_NAMED]:
        seen = now[rank]
        if seen is None:
            named.append(f"rank {rank}, which never wrote how far it is")
            continue
        reached = f"rank {rank} ({seen.place}), last seen in {seen.phase}"
        named.append(reached if silent else f"{reached} at {seen.line}")
    if len(late) > _NAMED:
        named.append(f"{len(late) - _NAMED} more ranks")
    how = "stopped, gone or cut off" if silent else "late"
    waiting = [seen for rank, seen in enumerate(now) if rank not in late and seen is not None]
    furthest = max(waiting, key=lambda seen: (seen.exchanges, seen.entered), default=None)
    others = "" if furthest is None else f" in {furthest.phase}"
    verb = "is" if len(late) == 1 else "are"
    return f"{'; '.join(named)}, {verb} {how}: the other ranks waited {seconds:.0f} s{others}"


class RankWatch:
    """Watches how far the ranks of a job are, on two threads.

    Args:
        store: store of the job, over a connection that nothing else uses: a call blocks while the
            rank that hosts the store is stopped, and so would others over the same connection.
        rank: rank of this process.
        ranks: number of ranks, dedicated servers included.
        progress: how far this rank is; the calling thread is the one that trains.
        place: where this process is, as `host H, local rank L`.
        serves_only: whether this process is a dedicated server.
        limit: function that returns the seconds for which a rank may wait for others.
        host: rank that hosts the store; None: the launcher does.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        progress: Progress,
        place: str,
        serves_only: bool,
        limit: Callable[[], float],
        host: int | None = None,
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._progress, self._place, self._serves_only = progress, place, serves_only
        self._limit, self._host = limit, host
        self._training = threading.get_ident()
        self._beat = 0
        self._closed, self._asked, self._judged = (threading.Event() for _ in range(3))
        # What all ranks had written when it was read last, and when that was.
        self._reads = False
        self._read: tuple[float, list[Seen | None]] | None = None
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._keep_writing, "distca beat"), (self._watch, "distca watch"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def _period(self) -> float:
        return min(_LONGEST_PERIOD, self._limit() / _PERIODS)

    @property
    def _window(self) -> float:
        """Seconds in which every rank writes several times."""
        return max(_SHORTEST_WINDOW, 4 * self._period)

    @property
    def _patience(self) -> float:
        """Seconds without progress after which the ranks are judged."""
        return max(self._limit() - self._window, self._limit() / 2)

    def close(self) -> None:
        """Ends the threads. May be called again."""
        self._closed.set()
        for thread in self._threads:
            thread.join(self._window)

    def end_if_late(self) -> None:
        """Ends this process by a line if other ranks are late or gone; else returns later."""
        self._judged.clear()
        self._asked.set()
        # Each of the two reads may take a window, and one passes between them.
        self._judged.wait(3 * self._window + 2 * self._period)

    def _keep_writing(self) -> None:
        with contextlib.suppress(DistError, RuntimeError):
            # The store's host ends first where the job ends.
            while not self._closed.is_set():
                self._beat += 1
                self._store.set(str(self._rank), json.dumps(asdict(self._now())))
                if self._reads:
                    self._read = time.monotonic(), self._read_all()
                self._closed.wait(self._period)

    def _now(self) -> Seen:
        waits, line = _place_of(self._training)
        progress = self._progress
        return Seen(
            self._beat,
            self._place,
            str(progress),
            self._serves_only,
            progress.is_idle,
            progress.entered,
            progress.exchanges,
            waits,
            line,
        )

    def _read_all(self) -> list[Seen | None]:
        keys = [str(rank) for rank in range(self._ranks)]
        if self._store.check(keys):
            return [Seen(**json.loads(each)) for each in self._store.multi_get(keys)]
        found = {key: self._store.get(key) for key in keys if self._store.check([key])}
        return [Seen(**json.loads(found[key])) if key in found else None for key in keys]

    def _watch(self) -> None:
        """Judges whether ranks are late when this one has come no further for long, or if asked."""
        progress = self._progress
        position, since = (progress.entered, progress.exchanges), time.monotonic()
        looked = since
        while not self._closed.wait(self._period):
            now = time.monotonic()
            current = progress.entered, progress.exchanges
            # A job that was stopped and goes on as a whole begins to wait anew.
            if current != position or now - looked > self._window:
                position, since = current, now
            looked = now
            if self._asked.is_set() or now - since > self._patience:
                self._judge(since)
                self._asked.clear()
                self._judged.set()
                looked = time.monotonic()

    def _judge(self, since: float) -> None:
        """Reads twice how far all ranks are, and ends the process if some are late."""
        begin = time.monotonic()
        self._reads = True
        before = self._next_read(begin)
        if not self._closed.wait(self._window):
            now = self._next_read(time.monotonic())
            self._reads = False
            waited = time.monotonic() - since
            if now is None:
                if self._host not in (None, self._rank):
                    self._end(
                        f"rank {self._host}, which hosts the job's store, is stopped, gone or cut "
                        f"off: rank {self._rank} waited {waited:.0f} s in {self._progress}"
                    )
            elif before is not None:
                late, silent = late_ranks(before, now)
                if late and late != [self._rank]:
                    if self._store.add("said", 1) > 1:
                        # Another rank says it, and ends first, as the rank that failed.
                        self._closed.set()
                        time.sleep(_UNTIL_ANOTHER_HAS_ENDED)
                        _end_process()
                    self._end(describe(late, now, silent, waited))

    def _next_read(self, after: float) -> list[Seen | None] | None:
        """Returns what is read from a moment on; None: the store did not answer."""
        deadline = after + self._window
        while (read := self._read) is None or read[0] < after:
            if time.monotonic() > deadline or self._closed.wait(self._period / 4):
                return None
        return read[1]

    def _end(self, line: str) -> NoReturn:
        logger.critical("error: %s", line)
        _end_process()


def _end_process() -> NoReturn:
    logging.shutdown()
    # The training thread waits for ranks that will not answer.
    os._exit(_EXIT_CODE)


_WAITING = (".wait(", ".item()", ".tolist()", "synchronize(")


def _place_of(thread: int) -> tuple[bool, str]:
    """Returns whether a thread waits for others, and the line of Python that it is at."""
    import linecache

    frame = sys._current_frames().get(thread)
    if frame is None:
        return False, "its end"
    file, number = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(file, number)
    waits = "torch/distributed/" in file or any(each in source for each in _WAITING)
    return waits, f"{'/'.join(file.split('/')[-2:])}:{number} ({frame.f_code.co_name})"


def watch_ranks(
    args: Namespace,
    dedicated: int,
    progress: Progress,
    environment: Mapping[str, str],
) -> RankWatch | None:
    """Starts to watch the ranks of a job, which have met; None: it is one rank, or met otherwise.

    Args:
        args: Megatron-LM's arguments, whose world size counts processes with a model alone.
        dedicated: number of processes that only serve.
        progress: how far this rank is.
        environment: variables of this process, which are the launcher's interface.
    """
    ranks = args.world_size + dedicated
    if ranks == 1 or "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
        return None

    def limit() -> float:
        after_init = args.distributed_timeout_seconds_after_init
        # As Megatron-LM, after the first iteration of this process.
        if after_init is not None and progress.begun > 1:
            return float(after_init)
        return 60.0 * args.distributed_timeout_minutes

    store = TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    hosted_by_launcher = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    local = environment.get("LOCAL_RANK", "0")
    return RankWatch(
        PrefixStore(f"distca progress {attempt}", store),
        args.rank,
        ranks,
        progress,
        f"host {socket.gethostname()}, local rank {local}",
        args.rank >= args.world_size,
        limit,
        None if hosted_by_launcher else 0,
    )
