"""Stage: which GPUs reach each other's memory, and what moves between ranks each second."""

from __future__ import annotations

import socket

import torch

from distca.attention.kernel_timing import fastest
from distca.commands.verify.stage import Context, Found
from distca.transport import Channel, ChannelBytes, CollectiveTransport, MessageSizes
from distca.transport.collective import new_exchange_group

_LEAST, _MOST = 1 << 20, 1 << 27
_CHANNEL = Channel("dispatch", 0)


def measure_links(context: Context) -> Found:
    """Measures copies of one device, and messages between neighbouring ranks."""

    def copy(nbytes: int) -> None:
        torch.zeros(nbytes, dtype=torch.uint8, device=context.device).clone()

    nbytes = context.largest_size(_LEAST, _MOST, copy)
    figures = {"copy_gb_per_s": -context.largest(-_copying(context, nbytes))}
    said = [f"copies {figures['copy_gb_per_s']:.1f} GB/s"]
    if context.on_gpu:
        said += _to_host(context, nbytes, figures)
        said += _peers(context)
    if context.size > 1:
        said += _messages(context, nbytes, figures)
    return Found(", ".join(said), figures)


def _copying(context: Context, nbytes: int) -> float:
    """GB/s that are read and written where rows are copied on the device."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    seconds = fastest(copy, context.synchronize, 0.2)
    return 2 * nbytes / seconds / 1e9


def _to_host(context: Context, nbytes: int, figures: dict[str, float]) -> list[str]:
    """Measures copies between the GPU and pinned memory of the host."""
    on_gpu = torch.zeros(nbytes, dtype=torch.uint8, device=context.device)
    pinned = torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
    for name, target, source in (
        ("to host", pinned, on_gpu),
        ("from host", on_gpu, pinned),
    ):

        def copy(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
            target.copy_(source, non_blocking=True)

        speed = nbytes / fastest(copy, context.synchronize, 0.2) / 1e9
        figures[f"{name}, GB/s"] = -context.largest(-speed)
    return [f"{name} {figures[f'{name}, GB/s']:.1f} GB/s" for name in ("to host", "from host")]


def _peers(context: Context) -> list[str]:
    """Says which GPUs of a machine cannot reach each other's memory."""
    count = torch.cuda.device_count()
    apart = [
        f"{one}-{other}"
        for one in range(count)
        for other in range(one + 1, count)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    if count < 2:
        return []
    if not apart:
        return [f"all {count} GPUs are peers"]
    return [f"no peers, so that rows go through the host: GPUs {', '.join(apart)}"]


def _messages(context: Context, nbytes: int, figures: dict[str, float]) -> list[str]:
    """Measures messages of all ranks at once, for each distance between sender and receiver."""
    group = new_exchange_group(list(range(context.size)))
    assert group is not None
    transport = CollectiveTransport(group, context.device)
    transport.reserve({_CHANNEL: ChannelBytes(nbytes, nbytes)})
    said = []
    machines = context.gather(socket.gethostname())
    distances = {"node_gb_per_s": 1} if context.local_size > 1 else {}
    if len(set(machines)) > 1:
        distances["network_gb_per_s"] = context.local_size
    for name, distance in distances.items():
        after = (context.rank + distance) % context.size
        before = (context.rank - distance) % context.size
        sizes = MessageSizes(
            tuple(nbytes * (rank == after) for rank in range(context.size)),
            tuple(nbytes * (rank == before) for rank in range(context.size)),
            (0,) * context.size,
        )

        def exchange(sizes: MessageSizes = sizes) -> None:
            transport.staging(_CHANNEL, nbytes)
            pending = transport.start("dispatch", _CHANNEL, sizes)
            pending.wait()
            pending.release()

        # All ranks run the same number of times: by a budget each would stop on its own.
        seconds = fastest(exchange, context.synchronize, 0.0)
        figures[name] = nbytes / context.largest(seconds) / 1e9
        where = "inside a machine" if name == "node_gb_per_s" else "between machines"
        said.append(f"messages {where} {figures[name]:.2f} GB/s each way")
    transport.close()
    return said
