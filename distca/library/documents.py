"""Documents of a micro-batch, with what their tokens predict."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

IGNORED = -100
"""Target of a token that predicts nothing, as torch's and transformers' losses have it."""


@dataclass(frozen=True)
class Document:
    """A document: its tokens see each other, and none of another document.

    Attributes:
        tokens: token ids, int64 `[tokens]`, on the CPU.
        targets: the correct next token of each, or `IGNORED`, int64 `[tokens]`; None: the next
            token of the document, and nothing after the last one. `from_labels` makes a document of
            labels that are not shifted, as transformers have them.

    Raises:
        ValueError: there are no tokens; a tensor has another shape, dtype or device; or the targets
            are the tokens themselves.
    """

    tokens: torch.Tensor
    targets: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name, tensor in (("tokens", self.tokens), ("targets", self.targets)):
            if tensor is None:
                continue
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(
                    f"a document's {name} are a {type(tensor).__name__}: give a tensor, int64"
                )
            if tensor.dim() != 1 or tensor.dtype != torch.int64 or tensor.device.type != "cpu":
                raise ValueError(
                    f"a document's {name} are {tensor.dtype} {list(tensor.shape)} on "
                    f"{tensor.device}: give a tensor of one dimension, int64, on the CPU"
                )
            if tensor.untyped_storage().nbytes() > tensor.nbytes:
                # A slice of a corpus would take all of it to other processes.
                object.__setattr__(self, name, tensor.clone())
        if not len(self.tokens):
            raise ValueError("a document has no tokens: give at least one")
        if self.targets is None:
            return
        if len(self.targets) != len(self.tokens):
            raise ValueError(
                f"a document has {len(self.tokens)} tokens, but {len(self.targets)} targets: give "
                "one target for each token"
            )
        counts = self.targets != IGNORED
        same = bool((self.targets == self.tokens)[counts].all())
        # A document of one token over and over is its own target.
        if same and counts.any() and len(torch.unique(self.tokens[counts])) > 1:
            raise ValueError(
                "a document's targets are its own tokens: a target is the correct next token; use "
                "Document.from_labels for labels that are not shifted"
            )

    @staticmethod
    def from_labels(tokens: torch.Tensor, labels: torch.Tensor) -> Document:
        """Makes a document of labels as transformers have them: `labels[i]` is token `i` itself.

        Args:
            tokens: token ids, int64 `[tokens]`.
            labels: the same ids, or `IGNORED` where a token is not to be predicted, int64
                `[tokens]`.

        Raises:
            ValueError: see `Document`.
        """
        return Document(tokens, torch.cat([labels[1:], labels.new_tensor([IGNORED])]))

    @property
    def next_tokens(self) -> torch.Tensor:
        """The correct next token of each, or `IGNORED`, int64 `[tokens]`."""
        if self.targets is not None:
            return self.targets
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

    Raises:
        ValueError: a document of any rank cannot be used, or no rank has any; on all ranks.
    """
    mine: tuple[Document, ...] = ()
    wrong = ""
    try:
        mine = as_documents(own) if len(own) else ()
    except ValueError as error:
        wrong = str(error)
    sent = wrong, [(each.tokens, each.targets) for each in mine]
    found = [sent] * dist.get_world_size(group)
    dist.all_gather_object(found, sent, group)
    for rank, (message, _) in enumerate(found):
        if message:
            raise ValueError(f"rank {rank}: {message}")
    return as_documents([Document(*each) for _, of_rank in found for each in of_rank])


def digest(documents: Sequence[Document]) -> int:
    """Returns a number of 63 bits that other documents hardly have."""
    summed = hashlib.blake2b(digest_size=8)
    for each in documents:
        summed.update(len(each.tokens).to_bytes(8, "little"))
        summed.update(each.tokens.numpy().tobytes())
        summed.update(each.next_tokens.numpy().tobytes())
    return int.from_bytes(summed.digest(), "little") >> 1
