"""Stage: random exchanges over each transport, byte by byte, and a peer that dies."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec

import torch
import torch.distributed as dist

from distca.commands.verify.dying_peer import lose_a_peer
from distca.commands.verify.stage import SEND, Context, Fault, Found, NotRun
from distca.transport import CollectiveTransport, Transport, new_exchange_group
from distca.transport.compiled_cuda import find_nvshmem
from distca.transport.random_exchanges import Exchanges

_EXCHANGES, _LARGEST = 40, 200_000
_TIMEOUT = timedelta(seconds=60)


def check_transports(context: Context) -> Found:
    """Exchanges random bytes over each transport that these ranks can use, then loses a peer."""
    if context.size == 1:
        raise NotRun("one rank exchanges nothing")
    figures, said = {}, []
    for name, make, members in _transports(context):
        transport = make()
        chosen = list(itertools.combinations(range(context.size), 2)) if members else ()
        begin = time.perf_counter()
        wrong = Exchanges(transport, 1, _LARGEST, members=chosen).run(_EXCHANGES)
        if wrong:
            raise Fault(
                f"{name}: {wrong:,} bytes that rank {context.rank} received are not what was sent",
                f"choose another --distca-transport, and {SEND}",
            )
        context.synchronize()
        figures[f"seconds of {name}"] = context.largest(time.perf_counter() - begin)
        transport.close()
        said.append(name)
    if context.local_rank == 0:
        # NCCL refuses two ranks on one GPU.
        seconds = lose_a_peer(context.folder, on_gpus=context.on_gpu and context.local_size > 1)
        figures["seconds until a dead peer is seen"] = seconds
    dist.barrier(group=context.control)
    return Found(f"{', '.join(said)}: all bytes right; a peer that dies ends the others", figures)


def _transports(context: Context) -> list[tuple[str, Callable[[], Transport], bool]]:
    """Name of each transport that these ranks can use, what makes it, and whether members of an
    exchange alone take part."""
    ranks, device = list(range(context.size)), context.device

    def group() -> dist.ProcessGroup:
        made = new_exchange_group(ranks, _TIMEOUT)
        assert made is not None
        return made

    def collective(members: bool) -> Callable[[], Transport]:
        return lambda: CollectiveTransport(group(), device, members_only=members)

    if not context.on_gpu:
        found = [
            ("gloo with all ranks", collective(False), False),
            ("gloo with members only", collective(True), True),
        ]
        if context.local_size == context.size:
            found.append(("shared memory", lambda: _shared_memory(group()), False))
        return found
    found = [
        ("NCCL with all ranks", collective(False), False),
        ("NCCL with members only", collective(True), True),
    ]
    if find_spec("nvshmem") is not None and find_nvshmem() is not None:
        found.append(("NVSHMEM", lambda: _nvshmem(group(), device), False))
    return found


def _shared_memory(group: dist.ProcessGroup) -> Transport:
    from distca.transport.shared_memory import SharedMemoryTransport

    return SharedMemoryTransport(group, _TIMEOUT)


def _nvshmem(group: dist.ProcessGroup, device: torch.device) -> Transport:
    from distca.transport.nvshmem import NvshmemTransport

    return NvshmemTransport(group, device, _TIMEOUT)
