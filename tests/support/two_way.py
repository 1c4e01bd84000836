"""Attention of trees with two-way nodes on live ranks, and losses that ranks have of some rollouts
each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from distca.library import AttentionShape, Planner, Rollout, Tree, core_attention, share_prefixes
from support.library_loops import BLOCK

SHAPE = AttentionShape(4, 2, 16, 4)
HEADS, KV_HEADS, DIM = 4, 2, 16


def trees() -> list[Tree]:
    """Images in a text, a prefix language model's prompt with two answers, and an encoder's
    document."""
    made = torch.Generator().manual_seed(0)

    def tree(lengths: tuple[int, ...], parents: tuple[int, ...], two_way: tuple[int, ...]) -> Tree:
        nodes = tuple(torch.randint(99, (n,), generator=made) for n in lengths)
        return Tree(nodes, parents, (), (), (), two_way)

    return [
        tree((70, 48, 33, 16, 90), (-1, 0, 1, 2, 3), (1, 3)),
        tree((150, 40, 61), (-1, 0, 0), (0,)),
        tree((203,), (-1,), (0,)),
        tree((30, 1, 25), (-1, 0, 1), (1,)),
    ]


@dataclass(frozen=True)
class Attended:
    """Outputs of all tokens, and gradients of queries, keys and values."""

    out: torch.Tensor
    gradients: tuple[torch.Tensor, ...]
    counted: bool


def inputs(total: int) -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(1)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return tuple(torch.randn(total, n, DIM, generator=made) for n in heads)


def attend_on_ranks() -> Attended:
    planner = Planner(SHAPE, block=BLOCK)
    batch = planner.place(trees())
    numbers = batch.nodes.of_rank(batch.plans[0].placement, dist.get_rank())
    q, k, v, dout = (
        each[torch.from_numpy(numbers)] for each in inputs(sum(each.tokens for each in trees()))
    )
    rows = [each.requires_grad_() for each in (q, k, v)]
    out = core_attention(*rows, batch)
    (out * dout).sum().backward()
    found = [torch.cat(batch.gather(each)) for each in (out.detach(), *(e.grad for e in rows))]
    moved = sum(planner.bytes_sent.values()) > 0
    planner.close()
    return Attended(found[0], tuple(found[1:]), moved)


def attend_densely() -> Attended:
    given = trees()
    seen = torch.block_diag(*(_seen(tree) for tree in given)).bool()
    q, k, v, dout = (each.clone() for each in inputs(len(seen)))
    rows = [each.requires_grad_() for each in (q, k, v)]
    wide = [each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v)]
    scores = torch.einsum("qhd,khd->hqk", q, wide[0]) * DIM**-0.5
    scores = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", scores, wide[1])
    (out * dout).sum().backward()
    return Attended(out.detach(), tuple(each.grad for each in rows), False)


def _seen(tree: Tree) -> torch.Tensor:
    """What each token sees, `[tokens, tokens]`."""
    lengths = [len(each) for each in tree.nodes]
    first = [sum(lengths[:n]) for n in range(len(lengths))]
    found = torch.zeros(tree.tokens, tree.tokens)
    for node, length in enumerate(lengths):
        rows = slice(first[node], first[node] + length)
        for above in tree.path(node)[:-1]:
            found[rows, first[above] : first[above] + lengths[above]] = 1
        own = torch.ones(length, length)
        found[rows, rows] = own if node in tree.two_way else own.tril()
    return found


def losses_of_own_rollouts(ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank's loss is of every `ranks`-th rollout. Returns the gradients of a table of logits,
    and the same from one loss of all rollouts."""
    made = torch.Generator().manual_seed(2)
    shared = torch.randint(9, (60,), generator=made)
    rollouts = []
    for length in (20, 33, 5, 41, 8):
        tokens = torch.cat([shared, torch.randint(9, (length,), generator=made)])
        weights = torch.cat([torch.zeros(50), torch.ones(10 + length)])
        rollouts.append(Rollout(tokens, weights))
    planner = Planner(SHAPE, block=BLOCK)
    batch = planner.place(share_prefixes(rollouts, 16))
    rows = (torch.zeros(len(batch.tokens), n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    core_attention(*rows, batch)
    factors = [torch.randn(len(each.tokens), generator=made) for each in rollouts]
    found = []
    for apart in (True, False):
        table = torch.randn(9, 9, generator=torch.Generator().manual_seed(3)).requires_grad_()
        values = batch.gather_rollouts(batch.log_probabilities(table[batch.tokens]))
        mine = range(dist.get_rank(), 5, ranks) if apart else range(5)
        loss = sum(((values[n] ** 2 * factors[n]).sum() for n in mine), table.sum() * 0)
        (loss if apart else loss / ranks).backward()
        gradient = torch.zeros(9, 9) if table.grad is None else table.grad
        dist.all_reduce(gradient)
        found.append(gradient)
    planner.close()
    return found[0], found[1]
