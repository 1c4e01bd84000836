"""Times of core attention in a step: of kernels, and of waits for exchanges.

On GPUs they are times between CUDA events on the current stream. A step's events are read when they
have happened, after a later step or where the log waits for the GPU anyway. On CPUs a kernel's time
is its thread's CPU time, which does not depend on who else runs, and a wait's is the wall clock's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from distca.attention import Kernel
from distca.attention.kernel import Gradients, KernelTasks, Outputs

Kind = Literal["kernels", "waits"]
_Timed: TypeAlias = "tuple[Kind, torch.cuda.Event, torch.cuda.Event]"
"""Work from one event to another."""


@dataclass
class StepTimes:
    """Seconds of one step on one rank.

    Attributes:
        kernels: time of attention kernels, forward and backward.
        waits: time for which the rank waited for exchanges, late peers included.
    """

    kernels: float = 0.0
    waits: float = 0.0


class AttentionTimes:
    """Adds up the times of each step of training.

    Args:
        device: device that does the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._step: StepTimes | None = None
        # On GPUs: events of the step that runs, and of steps whose events may not have happened.
        self._events: list[_Timed] = []
        self._open: list[tuple[StepTimes, list[_Timed]]] = []
        self._spare: list[torch.cuda.Event] = []
        self._done: list[StepTimes] = []
        self._around_waits: Callable[[], AbstractContextManager[object]] = nullcontext

    @contextlib.contextmanager
    def around_waits(self, context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        """Surrounds each wait of the work inside by a context, so that others' clocks may stop.

        Args:
            context: maker of the context.
        """
        before, self._around_waits = self._around_waits, context
        try:
            yield
        finally:
            self._around_waits = before

    def begin_step(self) -> None:
        """Begins a step. What runs between two steps, as an evaluation, does not count."""
        self._step = StepTimes()

    def end_step(self) -> None:
        step, self._step = self._step, None
        assert step is not None, "no step has begun"
        if self._cuda:
            self._open.append((step, self._events))
            self._events = []
            self._read()
        else:
            self._done.append(step)

    def take(self) -> list[StepTimes]:
        """Returns the steps since the last call, in order, and forgets them.

        Waits until the device has done their work, so that all ranks return equally many.
        """
        for _, events in self._open:
            if events:
                events[-1][2].synchronize()
        self._read()
        done, self._done = self._done, []
        return done

    @contextlib.contextmanager
    def span(self, kind: Kind) -> Iterator[None]:
        """Adds the time of the work inside to the step, if one has begun."""
        with self._around_waits() if kind == "waits" else nullcontext(), self._timed(kind):
            yield

    @contextlib.contextmanager
    def _timed(self, kind: Kind) -> Iterator[None]:
        if self._step is None:
            yield
        elif self._cuda:
            begin, end = self._event(), self._event()
            begin.record()
            yield
            end.record()
            self._events.append((kind, begin, end))
        else:
            clock = time.thread_time if kind == "kernels" else time.perf_counter
            start = clock()
            yield
            seconds = clock() - start
            setattr(self._step, kind, getattr(self._step, kind) + seconds)

    def _event(self) -> torch.cuda.Event:
        if self._spare:
            return self._spare.pop()
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def _read(self) -> None:
        """Adds up the events of steps that have all happened, the oldest first."""
        while self._open:
            step, events = self._open[0]
            if events and not events[-1][2].query():  # type: ignore[no-untyped-call]
                return
            for kind, begin, end in events:
                setattr(step, kind, getattr(step, kind) + begin.elapsed_time(end) / 1e3)
                self._spare += [begin, end]
            self._done.append(step)
            del self._open[0]


@dataclass(frozen=True)
class TimedKernel:
    """An attention kernel whose time is measured.

    Attributes:
        kernel: the kernel.
        times: where the time is added.
    """

    kernel: Kernel
    times: AttentionTimes

    def forward(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        tasks: KernelTasks,
        into: Outputs | None = None,
    ) -> Outputs:
        """See `Kernel.forward`."""
        with self.times.span("kernels"):
            return self.kernel.forward(q_THD, k_THD, v_THD, tasks, into)

    def backward(
        self,
        dout_THD: torch.Tensor,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor,
        tasks: KernelTasks,
        into: Gradients | None = None,
    ) -> Gradients:
        """See `Kernel.backward`."""
        with self.times.span("kernels"):
            return self.kernel.backward(dout_THD, q_THD, k_THD, v_THD, out_THD, lse_TH, tasks, into)
