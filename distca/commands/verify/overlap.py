"""Stage: measures how much of an exchange a kernel hides that runs at the same time."""

from __future__ import annotations

import torch

from distca.attention import KernelTasks, select_kernel
from distca.attention.kernel_timing import fastest
from distca.commands.verify.stage import Context, Found, NotRun
from distca.transport import Channel, ChannelBytes, CollectiveTransport, MessageSizes, Pending
from distca.transport.collective import new_exchange_group

_CHANNEL = Channel("dispatch", 0)
_LEAST_TOKENS, _MOST_TOKENS = 256, 16_384
_LEAST_BYTES, _MOST_BYTES = 1 << 18, 1 << 26


def measure_overlap(context: Context) -> Found:
    """Times the kernel alone, an exchange among all ranks alone, and both together."""
    if context.size == 1:
        raise NotRun("one rank exchanges nothing")
    group = new_exchange_group(list(range(context.size)))
    assert group is not None
    transport = CollectiveTransport(group, context.device)
    kernel = select_kernel(context.device.type)
    rows = [
        torch.randn(_MOST_TOKENS, heads, 128, device=context.device, dtype=context.dtype)
        for heads in (8, 2, 2)
    ]

    def compute(tokens: int) -> None:
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

    transport.reserve({_CHANNEL: ChannelBytes(*[_MOST_BYTES * (context.size - 1)] * 2)})
    tokens = context.largest_size(_LEAST_TOKENS, _MOST_TOKENS, compute)
    each = context.largest_size(_LEAST_BYTES, _MOST_BYTES // (context.size - 1), exchange)

    def both() -> None:
        pending = begin(each)
        compute(tokens)
        pending.wait()
        pending.release()

    # All ranks run the same number of times: three, without a budget of seconds.
    alone, moved, together = (
        context.largest(fastest(run, context.synchronize, 0.0))
        for run in (lambda: compute(tokens), lambda: exchange(each), both)
    )
    transport.close()
    hidden = min(max((alone + moved - together) / min(alone, moved), 0.0), 1.0)
    return Found(
        f"kernel {1e3 * alone:.2f} ms, exchange {1e3 * moved:.2f} ms, both {1e3 * together:.2f} "
        f"ms: {hidden:.0%} of the shorter is hidden",
        {"kernel_ms": 1e3 * alone, "exchange_ms": 1e3 * moved, "hidden": hidden},
    )
