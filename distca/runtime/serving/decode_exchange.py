"""One rank's part of a decode step: queries travel to the ranks that hold keys of their sequences.

It is the exchange that `build_exchange` makes of the step's plan, with keys that stay in the pool,
and with one kernel sequence of each query: a table's line rather than each of its pieces. All is
worked out from numbers of rows, so neither the context's length nor the stripe matters.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from distca.attention.merge import Sums, lse_merge
from distca.attention.paged import PagedKeys
from distca.plan import Mask
from distca.plan.span import Int64s
from distca.runtime.exchange import Exchange, KernelCall, Piece, Rows, find_call_rows
from distca.runtime.messages import PeerRows, peer_rows
from distca.runtime.serving.kv_pool import BlockTables
from distca.schedule.serving.batches import DecodeBatch

_NO_ROWS = torch.zeros(0, dtype=torch.int64)
_FORWARD_ALONE = Sums(_NO_ROWS, None)


def build_decode_exchange(
    decode: DecodeBatch, mask: Mask, rank: int, tables: BlockTables, lines: Int64s, slots: int
) -> tuple[Exchange, PagedKeys]:
    """Works out one rank's part of a decode step.

    Args:
        decode: step.
        mask: mask of the layers that follow.
        rank: this rank.
        tables: blocks of this rank, those for the step's new rows included.
        lines: line of each of the step's sequences in the tables.
        slots: rows of the pool.

    Returns:
        The exchange, whose keys and values are the pool's rows by slot, and where in the pool each
        query's keys are. Local queries are in the order of the step's sequences.
    """
    away, world_size = decode.away(mask), decode.rows.shape[1]
    moved = np.zeros((world_size, world_size), dtype=np.int64)
    np.add.at(moved, decode.owners, away)
    mine = np.flatnonzero(decode.owners == rank)
    send = np.nonzero(away[mine].T)[1]
    received = np.flatnonzero(away[:, rank])
    received = received[np.argsort(decode.owners[received], kind="stable")]
    travels = bool(moved.any())
    outgoing = _queries_of_peers(moved, rank)
    incoming = _queries_of_peers(moved.T, rank) if travels else outgoing
    # Kernels take queries in the order of the table's lines, so that it is used as it is where all
    # are served.
    served = np.concatenate([mine, received])
    order = np.argsort(lines[served])
    in_order = bool((order[1:] > order[:-1]).all())
    keys, cu_seqlens = _keys(decode, mask, rank, tables, lines, served[order])
    call = KernelCall(
        False,
        len(served),
        int((keys.used - keys.first).sum()),
        *cu_seqlens,
        find_call_rows(order, len(mine)),
        Piece(False, slice(0, slots)),
    )
    alone = in_order and not len(send)
    local = np.concatenate([np.where(order < len(mine), order, -1), send])
    kv = Rows(slots, _NO_ROWS, outgoing[1], incoming[1], 0, None, None, False)
    q = replace(
        kv,
        local=len(mine),
        send=torch.from_numpy(send),
        outgoing=outgoing[0],
        incoming=incoming[0],
        parts=len(served),
        local_sums=None if alone else _FORWARD_ALONE,
        move=travels,
    )
    exchange = Exchange(
        rank,
        world_size,
        mask,
        q,
        kv,
        (call,),
        None if in_order else lse_merge(order - len(mine), len(received)),
        None if alone else lse_merge(local, len(mine)),
    )
    return exchange, keys


def _queries_of_peers(moved: Int64s, rank: int) -> tuple[PeerRows, PeerRows]:
    """Rows of queries, and none of keys, between a rank and the others; `moved` is `[from, to]`."""
    nothing = np.zeros(len(moved), dtype=np.int64)
    return peer_rows(moved[rank], moved[:rank].sum(axis=0), nothing, nothing)


def _keys(
    decode: DecodeBatch, mask: Mask, rank: int, tables: BlockTables, lines: Int64s, served: Int64s
) -> tuple[PagedKeys, tuple[torch.Tensor, torch.Tensor]]:
    """Returns where the keys of the served queries are, and the offsets of queries and keys.

    Each query is a task of its own, since kernels split the keys of such tasks among
    multiprocessors.

    Args:
        served: sequences whose queries this rank serves, in the order of the tables' lines.
    """
    at = lines[served]
    first, used = decode.hidden[mask][served, rank], decode.rows[served, rank]
    table, host = tables.table, tables.host
    if not len(at) or at[-1] - at[0] + 1 == len(at):
        # Neighbouring lines, as in most steps, are not copied.
        neighbours = slice(at[0], at[-1] + 1) if len(at) else slice(0)
        table, host = table[neighbours], host[neighbours]
    else:
        chosen = torch.from_numpy(at)
        if table.is_cuda:
            chosen = chosen.pin_memory().to(table.device, non_blocking=True)
        table, host = table.index_select(0, chosen), host[at]
    keys = PagedKeys(table, host, first, used, tables.block_size)
    edges = np.zeros((2, len(at) + 1), dtype=np.int32)
    np.cumsum([np.ones_like(at), used - first], axis=1, out=edges[:, 1:])
    return keys, (torch.from_numpy(edges[0]), torch.from_numpy(edges[1]))
