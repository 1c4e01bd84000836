"""Documents and trees of all ranks of a group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from distca.library.compared import digest_of_bytes
from distca.library.documents import Document, check_readable
from distca.library.nodes import Nodes
from distca.library.trees import Rollout, Tree, share_prefixes
from distca.transport import naming_lost_ranks

Given = Document | Tree | Rollout | torch.Tensor
"""What a loop may give as a document: its tokens alone, int64 `[tokens]`, are one, too."""


def as_documents(given: Sequence[Given]) -> tuple[Document | Tree, ...]:
    """Makes documents of those that are given as tokens alone, and trees of rollouts.

    Rollouts have the numbers 0, 1 and so on in their order. Their trees, made by `share_prefixes`
    with its own threshold, are behind all others.

    Raises:
        ValueError: see `Document`; or there are no documents.
    """
    given = _listed(given)
    rollouts = [each for each in given if isinstance(each, Rollout)]
    found: list[Document | Tree] = []
    for each in given:
        if isinstance(each, tuple):
            raise ValueError(
                "a tuple is given as a document: join the trees of several share_prefixes in one "
                "list, or give the rollouts"
            )
        if not isinstance(each, Rollout):
            found.append(each if isinstance(each, Document | Tree) else Document(each))
    found += share_prefixes(rollouts)
    if not found:
        raise ValueError("there are no documents: give at least one")
    return tuple(found)


def _listed(given: object) -> tuple[Given, ...]:
    single = isinstance(given, Document | Tree | Rollout | torch.Tensor)
    if single or not isinstance(given, Iterable):
        raise ValueError(f"a {type(given).__name__} is given: give a list of documents")
    return tuple(given)


def split_packed(
    tokens: torch.Tensor, cu_seqlens: torch.Tensor, weights: torch.Tensor | None = None
) -> list[Rollout]:
    """Makes rollouts of sequences that lie one after the other without padding, as verl and other
    loops have them.

    Args:
        tokens: tokens of all sequences, `[tokens]` or with a first dimension of 1, any integers.
        cu_seqlens: start of each sequence, and the end of the last one, `[sequences + 1]`.
        weights: a weight for each token, such as a response mask; None: all are 1. See `Rollout`
            for advantages.

    Raises:
        ValueError: `cu_seqlens` does not rise from 0 to the number of tokens, a tensor is none or
            has another shape or dtype, there are more or fewer weights, a weight that is not 0
            would be in float32, or see `Rollout`.
    """
    for name, each in (("tokens", tokens), ("cu_seqlens", cu_seqlens)):
        _check_packed(name, each)
        if each.is_floating_point() or each.is_complex() or each.dtype == torch.bool:
            raise ValueError(f"{name} are {each.dtype}: give a tensor of integers")
    flat = tokens.detach().reshape(-1).cpu().long()
    edges = cu_seqlens.detach().cpu().long()
    if edges.dim() != 1 or len(edges) < 2 or int(edges[0]) or int(edges[-1]) != len(flat):
        raise ValueError(
            f"cu_seqlens must begin with 0 and end with the number of tokens, {len(flat)}"
        )
    sizes = edges.diff().tolist()
    if min(sizes) < 1:
        raise ValueError("cu_seqlens does not rise: a sequence has no tokens")
    found: list[torch.Tensor | None] = [None] * len(sizes)
    if weights is not None:
        found = list(torch.split(_packed_weights(weights, len(flat)), sizes))
    return [Rollout(*each) for each in zip(torch.split(flat, sizes), found, strict=True)]


def _check_packed(name: str, given: object) -> None:
    """Checks a tensor of `split_packed`: `[n]` or `[1, n]`.

    Raises:
        ValueError: it is no such tensor.
    """
    if not isinstance(given, torch.Tensor):
        wanted = "a tensor" if name == "weights" else "a tensor of integers"
        raise ValueError(f"{name} are a {type(given).__name__}: give {wanted}")
    if given.is_nested:
        raise ValueError(f"{name} are a nested tensor: give its values() and its offsets()")
    check_readable(name, given)
    if given.dim() != 1 and not (given.dim() == 2 and len(given) == 1):
        raise ValueError(
            f"{name} are {list(given.shape)}: give all sequences one after the other, in one "
            "dimension"
        )


def _packed_weights(weights: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the weights of `count` packed tokens, float32 `[tokens]`, on the CPU.

    Raises:
        ValueError: see `split_packed`.
    """
    _check_packed("weights", weights)
    if weights.is_complex():
        raise ValueError(f"weights are {weights.dtype}: give real numbers")
    if weights.numel() != count:
        raise ValueError(
            f"{weights.numel()} weights are given for {count} tokens: give one for each"
        )
    given = weights.reshape(-1).cpu()
    found = given.float()
    if bool(((found == 0) & (given != 0)).any()):
        raise ValueError(
            "a weight is not 0, but would be in float32, and its token would not be trained: "
            "give larger weights"
        )
    return found


def share_documents(
    own: Sequence[Given], group: dist.ProcessGroup | None = None
) -> tuple[Document | Tree, ...]:
    """Returns the documents of all ranks of a group, in the order of the ranks. Collective.

    For loops in which each rank reads documents of its own. `Planner.place` takes the same
    documents on all ranks.

    Args:
        own: documents, trees or rollouts of this rank; it may have none. Rollouts are numbered in
            the order of the ranks, and may share tokens with those of other ranks.
        group: the ranks; None: all.

    Raises:
        ValueError: a document of any rank cannot be used, or no rank has any; on all ranks.
        RuntimeError: there is no process group.
    """
    check_process_group()
    mine: tuple[Document | Tree | Rollout, ...] = ()
    wrong = ""
    try:
        own = _listed(own)
        rollouts = tuple(each for each in own if isinstance(each, Rollout))
        others = [each for each in own if not isinstance(each, Rollout)]
        mine = (*(as_documents(others) if others else ()), *rollouts)
    except ValueError as error:
        wrong = str(error)
    sent = wrong, mine
    found = [sent] * dist.get_world_size(group)
    with naming_lost_ranks("share_documents"):
        dist.all_gather_object(found, sent, group)
    for rank, (message, _) in enumerate(found):
        if message:
            raise ValueError(f"rank {rank}: {message}")
    return as_documents([each for _, of_rank in found for each in of_rank])


def check_process_group() -> None:
    """Checks that torch.distributed is initialised.

    Raises:
        RuntimeError: it is not.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised: call torch.distributed."
            "init_process_group() first, in processes that torchrun starts"
        )


def digest(documents: Sequence[Document | Tree]) -> int:
    """Returns a number of 63 bits that other documents hardly have."""
    tensors: list[torch.Tensor] = []
    numbers: list[np.ndarray] = []
    if not any(isinstance(each, Tree) for each in documents):
        for each in documents:
            assert isinstance(each, Document)
            tensors += each.tokens, each.next_tokens
    else:
        nodes = Nodes(tuple(documents))
        _, _, targets, weights = nodes.predictions
        paths = [each for path in nodes.paths().items() for each in (np.array(path[0]), path[1])]
        numbers = [nodes.own_lengths, nodes.parents, nodes.two_way, *paths, *nodes.trained[:3]]
        tensors = [*nodes.tokens, targets, weights, nodes.trained[3]]
    arrays = (*numbers, *(each.numpy() for each in tensors))
    return digest_of_bytes(np.ascontiguousarray(each).tobytes() for each in arrays)
