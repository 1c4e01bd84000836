"""Starting an exchange waits for nobody: a rank goes on before its peers have started theirs."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distca.transport import ChannelBytes, CollectiveTransport
from support.exchanges import CHANNELS, message, sizes_of

RANKS = 3
PATIENCE = timedelta(seconds=10)


@pytest.mark.parametrize("nbytes", [100, 1 << 19], ids=["small", "large"])
def test_gloo_starts_all_channels_before_any_peer_does(ranks, nbytes: int) -> None:
    """Also messages that are too large for a connection's own buffers."""
    assert ranks.run(start_in_turn, nbytes, world_size=RANKS) == [0] * RANKS


def start_in_turn(nbytes: int) -> int:
    """Every rank once starts first, and its peers only when it says that it went on.

    Returns how many bytes were wrong.
    """
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    transport = CollectiveTransport(dist.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
    transport.reserve(dict.fromkeys(CHANNELS, ChannelBytes(RANKS * nbytes, RANKS * nbytes)))
    sizes = sizes_of(np.full((RANKS, RANKS), nbytes) - np.diag([nbytes] * RANKS), rank)
    peers = [peer for peer in range(RANKS) if peer != rank]
    wrong = 0
    for first in range(RANKS):
        started = f"rank {first} has started"
        if rank != first:
            store.wait([started], PATIENCE)
        under_way = []
        for number, channel in enumerate(CHANNELS):
            pieces = [message(number + first, rank, peer, nbytes) for peer in peers]
            transport.staging(channel, sum(sizes.send)).copy_(torch.cat(pieces))
            under_way.append(transport.start("test", channel, sizes))
        if rank == first:
            store.set(started, "yes")
        for number, pending in enumerate(under_way):
            expected = [message(number + first, peer, rank, nbytes) for peer in peers]
            wrong += int((pending.wait() != torch.cat(expected)).sum())
            pending.release()
    transport.close()
    return wrong
