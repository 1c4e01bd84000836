"""Documents and trees of all ranks of a group."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from distca.library.documents import Document
from distca.library.nodes import Nodes
from distca.library.trees import Tree

Given = Document | Tree | torch.Tensor
"""What a loop may give as a document: its tokens alone, int64 `[tokens]`, are one, too."""


def as_documents(given: Sequence[Given]) -> tuple[Document | Tree, ...]:
    """Makes documents of those that are given as tokens alone.

    Raises:
        ValueError: see `Document`; or there are no documents.
    """
    if not len(given):
        raise ValueError("there are no documents: give at least one")
    return tuple(each if isinstance(each, Document | Tree) else Document(each) for each in given)


def share_documents(
    own: Sequence[Given], group: dist.ProcessGroup | None = None
) -> tuple[Document | Tree, ...]:
    """Returns the documents of all ranks of a group, in the order of the ranks. Collective.

    For loops in which each rank reads documents of its own. `Planner.place` takes the same
    documents on all ranks.

    Args:
        own: documents and trees of this rank; it may have none.
        group: the ranks; None: all.

    Raises:
        ValueError: a document of any rank cannot be used, or no rank has any; on all ranks.
    """
    mine: tuple[Document | Tree, ...] = ()
    wrong = ""
    try:
        mine = as_documents(own) if len(own) else ()
    except ValueError as error:
        wrong = str(error)
    sent = wrong, mine
    found = [sent] * dist.get_world_size(group)
    dist.all_gather_object(found, sent, group)
    for rank, (message, _) in enumerate(found):
        if message:
            raise ValueError(f"rank {rank}: {message}")
    return as_documents([each for _, of_rank in found for each in of_rank])


def digest(documents: Sequence[Document | Tree]) -> int:
    """Returns a number of 63 bits that other documents hardly have."""
    nodes, summed = Nodes(tuple(documents)), hashlib.blake2b(digest_size=8)
    _, _, targets, weights = nodes.predictions
    numbers = nodes.own_lengths, nodes.parents
    for each in (*numbers, *(each.numpy() for each in (*nodes.tokens, targets, weights))):
        summed.update(each.size.to_bytes(8, "little"))
        summed.update(each.tobytes())
    return int.from_bytes(summed.digest(), "little") >> 1
