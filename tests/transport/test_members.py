"""Exchanges among members: ranks that neither send nor receive are left out, whoever is slow."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distca.transport import Channel, ChannelBytes, CollectiveTransport, Transport
from distca.transport.collective import send_in_one_batch
from distca.transport.shared_memory import SharedMemoryTransport
from support.exchanges import CHANNELS, Exchanges, sizes_of
from support.ranks import Ranks

RANKS, CPU = 4, torch.device("cpu")
MEMBERS = ((0, 1), (1, 2), (0, 2, 3))


class CountedGroup:
    """The group of all ranks, whose operations are counted by name."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        if name not in ("rank", "size", "name"):
            self.calls[name] += 1
        return getattr(dist.group.WORLD, name)


class InOneBatch(CollectiveTransport):
    """The transport as it is with NCCL, whose batch gloo takes message by message."""

    def _begin(self, channel: Channel, *what: Any) -> list[Any]:
        return send_in_one_batch(dist.group.WORLD, channel, *what)  # type: ignore[arg-type]


def exchange(over: str) -> int:
    """Wrong bytes of many exchanges of overlapping members, of which each rank is slow at times."""
    transport: Transport
    group: Any = dist.group.WORLD
    if over == "shm":
        transport = SharedMemoryTransport(group, members_only=True)
    else:
        transport = (InOneBatch if over == "batch" else CollectiveTransport)(group, CPU)

    def before(number: int) -> None:
        if number // 20 % RANKS == transport.rank:
            time.sleep(0.002)

    exchanges = Exchanges(transport, read_slowly=True, before=before, members=MEMBERS)
    wrong = exchanges.run(400)
    assert transport.bytes_received.total() > 400 * 1000
    transport.close()
    return wrong


@pytest.mark.parametrize("over", ["gloo", "batch", "shm"])
def test_overlapping_members_neither_wait_in_a_circle_nor_mix(ranks: Ranks, over: str) -> None:
    assert ranks.run(exchange, over, world_size=RANKS, timeout=60) == [0] * RANKS


def operations() -> Counter[str]:
    """What a rank's group is asked for in an exchange of one message, from rank 0 to rank 1."""
    group = CountedGroup()
    transport = CollectiveTransport(group, CPU)  # type: ignore[arg-type]
    transport.reserve({CHANNELS[0]: ChannelBytes(8, 8)})
    matrix = np.zeros((RANKS, RANKS), dtype=np.int64)
    matrix[0, 1] = 8
    sizes = sizes_of(matrix, transport.rank)
    transport.staging(CHANNELS[0], sizes.sent).fill_(7)
    pending = transport.start("test", CHANNELS[0], sizes)
    assert set(pending.wait().tolist()) <= {7}
    return group.calls


def test_who_has_no_rows_is_asked_for_nothing(ranks: Ranks) -> None:
    assert ranks.run(operations, world_size=RANKS) == [{"send": 1}, {"recv": 1}, {}, {}]
