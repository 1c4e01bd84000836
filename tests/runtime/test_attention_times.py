"""Times of kernels and waits in a step, by a thread's CPU time and by CUDA's events."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from distca.runtime.attention_times import AttentionTimes, StepTimes


def spin(seconds: float) -> None:
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


def test_a_cpu_s_kernels_take_cpu_time_and_its_waits_wall_time() -> None:
    times = AttentionTimes(torch.device("cpu"))
    with times.span("kernels"):
        spin(0.01)
    for sleeps in (0.0, 0.05):
        times.begin_step()
        with times.span("kernels"):
            spin(0.02)
            time.sleep(sleeps)
        with times.span("waits"):
            time.sleep(sleeps)
        times.end_step()
        # As an evaluation between two steps.
        with times.span("kernels"):
            spin(0.01)
    first, second = times.take()
    for step in (first, second):
        assert step.kernels == pytest.approx(0.02, abs=0.008)
    assert second.waits >= 0.05 > first.waits
    assert times.take() == []


@dataclass
class Clock:
    """A GPU's clock, in milliseconds, and how far its work is done."""

    now: float = 0.0
    done: float = 0.0
    made: int = 0
    waits: int = 0


def fake_events(clock: Clock) -> type:
    """Makes a class of events of that GPU."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            clock.made += 1
            self.at = 0.0

        def record(self) -> None:
            self.at = clock.now

        def query(self) -> bool:
            return self.at <= clock.done

        def synchronize(self) -> None:
            clock.waits += self.at > clock.done
            clock.done = max(clock.done, self.at)

        def elapsed_time(self, end: Any) -> float:
            assert end.query(), "it would wait for the GPU"
            return float(end.at - self.at)

    return Event


def test_a_gpu_s_events_are_read_when_they_have_happened(monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", fake_events(clock))
    times = AttentionTimes(torch.device("cuda"))

    def step(milliseconds: float) -> None:
        times.begin_step()
        for kind, factor in (("kernels", 1), ("waits", 2), ("kernels", 3)):
            with times.span(kind):  # type: ignore[arg-type]
                clock.now += factor * milliseconds
        times.end_step()

    step(1000.0)
    clock.done = 6000.0
    step(10.0)
    # Events of the first step are used again.
    assert clock.made == 12
    step(100.0)
    assert clock.waits == 0
    # All ranks have as many steps, also if some GPU is not done.
    taken = times.take()
    assert clock.waits == 2
    assert taken == [StepTimes(4.0, 2.0), StepTimes(0.04, 0.02), StepTimes(0.4, 0.2)]
    step(1.0)
    assert times.take() == [StepTimes(0.004, 0.002)]
    assert clock.made <= 18
