"""Rows gathered and added up among ranks, on one node and on several, and the bytes of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distca.runtime.serving.sequence_exchange import SequenceExchange
from distca.schedule.serving.csps.layouts import even_rows, gathered_rows
from distca.transport import CollectiveTransport

CPU = torch.device("cpu")


def gather_and_reduce(ranks_per_node: int, tokens: int) -> dict[str, int]:
    """Collectives of growing rows; returns the bytes that this rank has sent."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    transport = CollectiveTransport(dist.group.WORLD, CPU)
    exchange = SequenceExchange(transport, ranks_per_node)
    for count in (tokens // 2, tokens):
        rows = even_rows(count, ranks)
        whole = torch.arange(count * 3, dtype=torch.float64).view(count, 3)
        begin = int(rows[:rank].sum())
        own = whole[begin : begin + int(rows[rank])]
        transport.bytes_sent.clear()
        assert torch.equal(exchange.all_gather(own, rows, "gather"), whole)
        parts = whole * (rank + 1)
        sums = exchange.reduce_scatter(parts, rows, "reduce")
        assert torch.equal(sums, own * sum(range(1, ranks + 1)))
    between, within = gathered_rows(rows, ranks_per_node)
    for phase, sent in (
        ("gather between nodes", between[rank]),
        ("gather", within[rank]),
        ("reduce", within[:, rank]),
        ("reduce between nodes", between[:, rank]),
    ):
        assert transport.bytes_sent[phase] == int(sent.sum()) * 3 * 8
    return sum(transport.bytes_sent.values())


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(4, 2), (4, 1), (3, 3)])
def test_collectives(ranks, world_size: int, ranks_per_node: int) -> None:
    """Of fewer rows than ranks, and of an odd number."""
    sent = ranks.run(gather_and_reduce, ranks_per_node, 7, world_size=world_size)
    assert sum(sent) == 2 * 7 * (world_size - 1) * 3 * 8
