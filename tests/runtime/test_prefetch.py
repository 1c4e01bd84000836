"""What comes next is made while the present runs: values, ticks, a global batch's plans."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest

from distca.runtime import Prefetcher
from support.models import make_run, memory_stream, parse
from support.pretraining import ROOT
from support.ranks import forget_megatron

PATIENCE = 20
"""Seconds until what was not made is said not to come."""


class Made:
    """Things that one thread notes and another waits for."""

    def __init__(self) -> None:
        self._things: set[Any] = set()
        self._changed = threading.Condition()

    def note(self, thing: Any) -> None:
        with self._changed:
            self._things.add(thing)
            self._changed.notify_all()

    def comes(self, thing: Any) -> bool:
        """Whether it was made, or is by itself soon."""
        with self._changed:
            return self._changed.wait_for(lambda: thing in self._things, PATIENCE)


def test_the_next_value_is_made_while_this_one_is_held() -> None:
    """Without being asked for, up to the end; and none before the room for it is there."""
    made, count, depth = Made(), 6, 2

    def values() -> Iterator[int]:
        for number in range(count):
            made.note(number)
            yield number
        made.note("the end")

    ahead = Prefetcher(values(), depth)
    for number in range(count):
        assert next(ahead) == number
        following = number + 1
        assert made.comes(following if following < count else "the end")
        # So many wait, and the thread holds one more.
        assert not any(n in made._things for n in range(number + depth + 2, count))
    with pytest.raises(StopIteration):
        next(ahead)
    ahead.close()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_errors_of_the_thread_are_the_consumers(error: type[BaseException]) -> None:
    """All kinds: who waited for a value that never comes would hang."""

    def values() -> Iterator[int]:
        yield 7
        raise error("no more")

    ahead, seen, done = Prefetcher(values()), list[Any](), threading.Event()

    def consume() -> None:
        seen.append(next(ahead))
        try:
            next(ahead)
        except BaseException as raised:
            seen.append(raised)
        # What failed is at its end.
        seen.extend(ahead)
        done.set()

    threading.Thread(target=consume, daemon=True).start()
    assert done.wait(PATIENCE), "the consumer waits"
    value, raised = seen
    assert (value, type(raised), str(raised)) == (7, error, "no more")
    ahead.close()


def test_the_time_that_is_waited_is_told() -> None:
    made, go_on = Made(), threading.Event()

    def values() -> Iterator[int]:
        yield 0
        made.note("more")
        go_on.wait(PATIENCE)
        yield 1
        yield 2
        made.note("all")

    ahead = Prefetcher(values())
    assert made.comes("more")
    assert next(ahead) == 0
    assert ahead.seconds_waited == 0
    threading.Timer(0.05, go_on.set).start()
    assert next(ahead) == 1
    assert 0 < ahead.seconds_waited < PATIENCE
    assert made.comes("all")
    assert next(ahead) == 2
    assert ahead.seconds_waited == 0
    ahead.close()
    assert list(ahead) == []
    with pytest.raises(ValueError, match="depth is 0"):
        Prefetcher(values(), 0)


def test_one_value_waits_unless_more_are_asked_for() -> None:
    made = Made()

    def values() -> Iterator[int]:
        for number in itertools.count():
            made.note(number)
            yield number

    ahead = Prefetcher(values())
    # The one that waits, and the one that the thread holds until there is room for it.
    assert made.comes(1)
    assert ahead._finished.maxsize == 1
    ahead.close()


def run_python(code: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, cwd=ROOT)


def test_a_process_ends_without_its_prefetchers() -> None:
    """A rank that fails does not wait for values that nobody will take."""
    done = run_python(
        "import itertools; from distca.runtime import Prefetcher; "
        "print(next(Prefetcher(itertools.count())))"
    )
    assert done.stdout == b"0\n"


def test_a_process_that_ends_while_a_thread_computes_is_not_aborted() -> None:
    """Python ends daemon threads by an unwinding that torch's C++ answers with `abort`."""
    done = run_python(
        "import itertools, torch; from distca.runtime import Prefetcher\n"
        "a = torch.randn(600, 600)\n"
        "ahead = Prefetcher(((a @ a).sum() for _ in itertools.count()), 10_000)\n"
        "for _ in range(5): next(ahead)"
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_process_ends_although_a_value_never_comes() -> None:
    done = run_python(
        "import threading; from distca.runtime import prefetch\n"
        "prefetch.PATIENCE_AT_EXIT_S = 0.1\n"
        "prefetch.Prefetcher(iter(threading.Event().wait, None))"
    )
    assert done.returncode == 0


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_plans_of_the_next_tick_are_made_while_this_one_s_kernels_run(
    ranks, micro_batches: int
) -> None:
    """Those of the next global batch, too, with all its plans: while the last kernels run."""
    seq_length, steps = 128, 2
    flags = ["--distca", "--seq-length", str(seq_length)]
    flags += ["--global-batch-size", str(2 * micro_batches)]
    lengths = [200, 56] * micro_batches * (steps + 2)
    ticks = 2 * micro_batches
    expected = list(itertools.product(range(steps), range(ticks)))
    found = ranks.run(ticks_held_until_the_next_is_made, flags, lengths, steps, world_size=2)
    assert found == [expected] * 2


def ticks_held_until_the_next_is_made(
    flags: Sequence[str], lengths: Sequence[int], steps: int
) -> list[tuple[int, int]]:
    """The ticks, by step and number, whose kernels saw the next tick come. Collective."""

    from megatron_patches.batches.ticks import PlannedIterator, TickInput, TickMaker
    from support import training

    args = parse(flags)
    training.initialize(args)
    made = Made()
    seen: list[tuple[int, int]] = []
    held: list[tuple[int, int]] = []
    make_ticks, give = TickMaker.ticks, PlannedIterator.__next__
    steps_planned = itertools.count()

    def noted(self: TickMaker, *planned: Any) -> Iterator[TickInput]:
        step = next(steps_planned)
        for number, tick in enumerate(make_ticks(self, *planned)):
            made.note((step, number))
            yield tick

    def given(self: PlannedIterator) -> TickInput:
        tick = give(self)
        step, number = held[-1] if held else (0, -1)
        last = number + 1 == len(tick.schedule.ticks)
        held.append((step + 1, 0) if last else (step, number + 1))
        return tick

    def computing(compute: Callable[..., Any]) -> Callable[..., Any]:
        def computed(*arguments: Any, **options: Any) -> Any:
            step, number = held[-1]
            ticks = 2 * args.global_batch_size // args.data_parallel_size
            following = (step, number + 1) if number + 1 < ticks else (step + 1, 0)
            assert made.comes(following), f"{following} is not made while {held[-1]} runs"
            if held[-1] not in seen:
                seen.append(held[-1])
            return compute(*arguments, **options)

        return computed

    with (
        mock.patch.object(TickMaker, "ticks", noted),
        mock.patch.object(PlannedIterator, "__next__", given),
    ):
        run, maker = make_run(args, memory_stream(lengths))
        kernel = maker.runtime.core_attention.kernel.kernel
        kernel.forward, kernel.backward = computing(kernel.forward), computing(kernel.backward)
        for _ in range(steps):
            training.train_step(run)
        run.data.close()
    forget_megatron()
    return seen
