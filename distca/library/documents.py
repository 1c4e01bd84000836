"""Documents of a micro-batch, with what their tokens predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

IGNORED = -100
"""Label of a token that has no target, as torch's and transformers' losses have it."""


@dataclass(frozen=True)
class Document:
    """A document: its tokens see each other, and none of another document.

    Attributes:
        tokens: token ids, int64 `[tokens]`, on the CPU.
        labels: id that each token predicts, or `IGNORED`, int64 `[tokens]`; None: each predicts the
            next one, and the last nothing.

    Raises:
        ValueError: there are no tokens, or a tensor has another shape or dtype.
    """

    tokens: torch.Tensor
    labels: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name, tensor in (("tokens", self.tokens), ("labels", self.labels)):
            if tensor is None:
                continue
            if tensor.dim() != 1 or tensor.dtype != torch.int64:
                raise ValueError(
                    f"a document's {name} are {tensor.dtype} {list(tensor.shape)}: give a tensor "
                    "of one dimension, int64"
                )
        if not len(self.tokens):
            raise ValueError("a document has no tokens: give at least one")
        if self.labels is not None and len(self.labels) != len(self.tokens):
            raise ValueError(
                f"a document has {len(self.tokens)} tokens, but {len(self.labels)} labels: give "
                "one label for each token"
            )

    @property
    def targets(self) -> torch.Tensor:
        """The id that each token predicts, or `IGNORED`, int64 `[tokens]`."""
        if self.labels is not None:
            return self.labels
        return torch.cat([self.tokens[1:], self.tokens.new_tensor([IGNORED])])


def as_documents(given: Sequence[Document | torch.Tensor]) -> tuple[Document, ...]:
    """Makes documents of those that are given as tokens alone.

    Raises:
        ValueError: see `Document`; or there are no documents.
    """
    if not len(given):
        raise ValueError("there are no documents: give at least one")
    return tuple(each if isinstance(each, Document) else Document(each) for each in given)


def share_documents(
    own: Sequence[Document | torch.Tensor], group: dist.ProcessGroup | None = None
) -> tuple[Document, ...]:
    """Returns the documents of all ranks of a group, in the order of the ranks. Collective.

    For loops in which each rank reads documents of its own. `Planner.place` takes the same
    documents on all ranks.

    Args:
        own: documents of this rank; it may have none.
        group: the ranks; None: all.
    """
    mine = as_documents(own) if len(own) else ()
    found: list[list[tuple[torch.Tensor, torch.Tensor | None]]]
    found = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(found, [(each.tokens, each.labels) for each in mine], group)
    return as_documents([Document(*each) for of_rank in found for each in of_rank])
