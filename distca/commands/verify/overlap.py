"""Stage: measures how much of an exchange a kernel hides that runs at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from distca.attention import KernelTasks, PagedKernel, select_kernel
from distca.attention.flash import FlashAttn3Kernel
from distca.attention.kernel_timing import fastest
from distca.commands.verify.stage import Context, Found, NotRun
from distca.transport import Channel, ChannelBytes, CollectiveTransport, MessageSizes, Pending
from distca.transport.collective import new_exchange_group

_CHANNEL = Channel("dispatch", 0)
_LEAST_TOKENS, _MOST_TOKENS = 256, 16_384
_LEAST_BYTES, _MOST_BYTES = 1 << 18, 1 << 26
MARGINS = (0, 4, 8, 16, 24, 32)
"""Numbers of multiprocessors that FlashAttention 3 is tried with leaving free."""


@dataclass(frozen=True)
class _Times:
    """Seconds of a kernel, of an exchange, and of both at the same time."""

    alone: float
    moved: float
    together: float

    @property
    def hidden(self) -> float:
        """Part of the shorter one that the other hides."""
        saved = self.alone + self.moved - self.together
        return min(max(saved / min(self.alone, self.moved), 0.0), 1.0)

    def __str__(self) -> str:
        # Both cannot take less than the longer one: what they do is chance.
        noise = max(self.alone, self.moved) - self.together
        chance = f" (times vary by at least {1e3 * noise:.2f} ms)" if noise > 0 else ""
        return (
            f"kernel {1e3 * self.alone:.2f} ms, exchange {1e3 * self.moved:.2f} ms, both "
            f"{1e3 * self.together:.2f} ms: {self.hidden:.0%} of the shorter is hidden{chance}"
        )


def measure_overlap(context: Context) -> Found:
    """Times the kernel alone, an exchange among all ranks alone, and both together.

    FlashAttention 3 is timed with several numbers of multiprocessors that it leaves free; that
    counts with which both together take least.
    """
    if context.size == 1:
        raise NotRun("one rank exchanges nothing")
    kernel = select_kernel(context.device.type)
    if not isinstance(kernel, FlashAttn3Kernel):
        return _found(_timed(context, [kernel])[0])
    by_margin = dict(zip(MARGINS, _timed(context, map(FlashAttn3Kernel, MARGINS)), strict=True))
    best = min(by_margin, key=lambda margin: by_margin[margin].together)
    none = by_margin[0].together
    more = f"; {best} multiprocessors left free, with none both take {1e3 * none:.2f} ms"
    found = _found(by_margin[best])
    return Found(found.text + more, found.figures | {"sm_margin": best, "no_margin_ms": 1e3 * none})


def _found(times: _Times) -> Found:
    kernel, exchange = 1e3 * times.alone, 1e3 * times.moved
    figures = {"kernel_ms": kernel, "exchange_ms": exchange, "hidden": times.hidden}
    return Found(str(times), figures)


def _timed(context: Context, kernels: Iterable[PagedKernel]) -> list[_Times]:
    """Times each kernel on the same rows, and beside the same exchange. Collective."""
    group = new_exchange_group(list(range(context.size)))
    assert group is not None
    transport = CollectiveTransport(group, context.device)
    rows = [
        torch.randn(_MOST_TOKENS, heads, 128, device=context.device, dtype=context.dtype)
        for heads in (8, 2, 2)
    ]

    def compute(kernel: PagedKernel, tokens: int) -> None:
        edges = torch.tensor([0, tokens], dtype=torch.int32)
        q, k, v = (each[:tokens] for each in rows)
        kernel.forward(q, k, v, KernelTasks(edges, edges, True, None, 0.1))

    def begin(each: int) -> Pending:
        others = tuple(each * (rank != context.rank) for rank in range(context.size))
        return transport.start(
            "dispatch", _CHANNEL, MessageSizes(others, others, (0,) * context.size)
        )

    def exchange(each: int) -> None:
        pending = begin(each)
        pending.wait()
        pending.release()

    def both(kernel: PagedKernel) -> None:
        pending = begin(each)
        compute(kernel, tokens)
        pending.wait()
        pending.release()

    def seconds(run: Callable[[], None]) -> float:
        # All ranks run the same number of times: three, without a budget of seconds.
        return context.largest(fastest(run, context.synchronize, 0.0))

    transport.reserve({_CHANNEL: ChannelBytes(*[_MOST_BYTES * (context.size - 1)] * 2)})
    first, *others = kernels
    tokens = context.largest_size(_LEAST_TOKENS, _MOST_TOKENS, partial(compute, first))
    each = context.largest_size(_LEAST_BYTES, _MOST_BYTES // (context.size - 1), exchange)
    moved = seconds(partial(exchange, each))
    found = [
        _Times(seconds(partial(compute, kernel, tokens)), moved, seconds(partial(both, kernel)))
        for kernel in (first, *others)
    ]
    transport.close()
    return found
