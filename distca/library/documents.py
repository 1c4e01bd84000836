"""Documents of a micro-batch, with what their tokens predict."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch

from distca.plan.span import Int64s

IGNORED = -100
"""Target of a token that predicts nothing, as torch's and transformers' losses have it."""


@dataclass(frozen=True, eq=False)
class Document:
    """A document: its tokens see each other, and none of another document.

    Attributes:
        tokens: token ids, int64 `[tokens]`, on the CPU.
        targets: the correct next token of each, or `IGNORED`, int64 `[tokens]`; None: the next
            token of the document, and nothing after the last one. `from_labels` makes a document of
            labels that are not shifted, as transformers have them.

    Raises:
        ValueError: there are no tokens, or one is negative; a tensor has another shape, dtype or
            device; or the targets are the tokens themselves.
    """

    tokens: torch.Tensor
    targets: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name, tensor in (("tokens", self.tokens), ("targets", self.targets)):
            if name == "targets" and tensor is None:
                continue
            check_tensor(f"a document's {name}", tensor, torch.int64)
            assert tensor is not None
            if tensor.untyped_storage().nbytes() > tensor.nbytes:
                # A slice of a corpus would take all of it to other processes.
                object.__setattr__(self, name, tensor.clone())
        _check_ids("a document", self.tokens, "targets of IGNORED")
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

    def __reduce__(self) -> tuple[object, ...]:
        targets = None if self.targets is None else self.targets.numpy()
        return _document, (self.tokens.numpy(), targets)

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
        check_tensor("a document's labels", labels, torch.int64)
        return Document(tokens, torch.cat([labels[1:], labels.new_tensor([IGNORED])]))

    @property
    def next_tokens(self) -> torch.Tensor:
        """The correct next token of each, or `IGNORED`, int64 `[tokens]`."""
        if self.targets is not None:
            return self.targets
        return torch.cat([self.tokens[1:], self.tokens.new_tensor([IGNORED])])


def _document(tokens: Int64s, targets: Int64s | None) -> Document:
    """Makes a document of arrays: tensors would take a file each on the way between processes."""
    of = None if targets is None else torch.from_numpy(targets)
    return Document(torch.from_numpy(tokens), of)


def split_rows(
    tokens_BT: torch.Tensor,
    labels_BT: torch.Tensor,
    *,
    shifted: bool,
    positions_BT: torch.Tensor | None = None,
    kept_BT: torch.Tensor | None = None,
) -> list[Document]:
    """Makes documents of rows as trainers' data loaders give them, packed or padded.

    A document begins where a row begins, and where its position is 0.

    Args:
        tokens_BT: token ids, any integers, `[rows, tokens]`.
        labels_BT: targets of the tokens, or `IGNORED`, any integers, `[rows, tokens]`.
        shifted: whether a label is the next token, as in torchtitan; otherwise it is the token
            itself, as in transformers.
        positions_BT: position of each token in its document, `[rows, tokens]`; None: a row is a
            document.
        kept_BT: where it is 0 or False there is padding, which belongs to no document,
            `[rows, tokens]`; None: all are kept.

    Returns:
        The documents, row by row; an empty list where all is padding.

    Raises:
        ValueError: the tensors are not integers of one shape with two dimensions, or have no
            values to read; or see `Document`.
    """
    given = {"tokens": tokens_BT, "labels": labels_BT, "positions": positions_BT, "kept": kept_BT}
    for name, each in given.items():
        if each is None and name in ("positions", "kept"):
            continue
        if not isinstance(each, torch.Tensor) or each.is_floating_point() or each.is_complex():
            kind = each.dtype if isinstance(each, torch.Tensor) else f"a {type(each).__name__}"
            raise ValueError(f"{name} are {kind}: give a tensor of integers")
        if each.dtype == torch.bool and name != "kept":
            raise ValueError(f"{name} are {each.dtype}: give a tensor of integers")
        check_readable(name, each)
        if each.dim() != 2:
            raise ValueError(f"{name} are {list(each.shape)}: give [rows, tokens]")
        if each.shape != tokens_BT.shape:
            raise ValueError(
                f"{name} are {list(each.shape)}, and tokens {list(tokens_BT.shape)}: give "
                "[rows, tokens] for each"
            )
    begins = torch.zeros(tokens_BT.shape, dtype=torch.bool)
    begins[:, :1] = True
    if positions_BT is not None:
        begins |= positions_BT.detach().cpu() == 0
    number = begins.flatten().cumsum(0)
    columns = [each.detach().cpu().long().flatten() for each in (tokens_BT, labels_BT)]
    if kept_BT is not None:
        kept = kept_BT.detach().cpu().flatten().bool()
        number, columns = number[kept], [each[kept] for each in columns]
    sizes = torch.unique_consecutive(number, return_counts=True)[1].tolist()
    make = Document if shifted else Document.from_labels
    tokens, labels = (torch.split(each, sizes) for each in columns)
    return [make(*each) for each in zip(tokens, labels, strict=True)]


def check_tensor(what: str, tensor: object, dtype: torch.dtype) -> None:
    """Checks a tensor that a user gives.

    Args:
        what: what it is, in the plural.
        tensor: the tensor.
        dtype: dtype that it must have.

    Raises:
        ValueError: it is no tensor, or has another shape, dtype or device.
    """
    wanted = str(dtype).removeprefix("torch.")
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{what} are a {type(tensor).__name__}: give a tensor, {wanted}")
    check_readable(what, tensor)
    if tensor.dim() != 1 or tensor.dtype != dtype or tensor.device.type != "cpu":
        raise ValueError(
            f"{what} are {tensor.dtype} {list(tensor.shape)} on {tensor.device}: give a tensor of "
            f"one dimension, {wanted}, on the CPU"
        )


def check_readable(what: str, tensor: torch.Tensor) -> None:
    """Checks that a tensor has values in the order of its shape.

    Raises:
        ValueError: it is nested or sparse, or on the meta device.
    """
    if not is_dense(tensor):
        raise ValueError(f"{what} are a nested or sparse tensor: give a dense one")
    if tensor.is_meta:
        raise ValueError(f"{what} are on the meta device: give a tensor with values")


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is neither nested nor sparse."""
    return tensor.layout == torch.strided and not tensor.is_nested


def check_tokens(what: str, tokens: object) -> None:
    """Checks token ids of a rollout: int64 `[tokens]`, on the CPU.

    Raises:
        ValueError: see `check_tensor`; there are none, or one is negative, such as `IGNORED`.
    """
    check_tensor(f"the tokens of {what}", tokens, torch.int64)
    assert isinstance(tokens, torch.Tensor)
    _check_ids(what, tokens, "weights of 0")


def _check_ids(what: str, tokens: torch.Tensor, instead: str) -> None:
    """Checks that there are tokens, and none is negative."""
    if not len(tokens):
        raise ValueError(f"{what} has no tokens: give at least one")
    if int(tokens.min()) < 0:
        raise ValueError(
            f"{what} has a negative token: give {instead} for tokens that are not trained"
        )


def check_weights(what: str, weights: object) -> None:
    """Checks weights of a rollout's tokens: float32 `[tokens]`, on the CPU, without gradient.

    Raises:
        ValueError: see `check_tensor`; one is not finite, or they require gradients.
    """
    check_tensor(f"the weights of {what}", weights, torch.float32)
    assert isinstance(weights, torch.Tensor)
    if not weights.isfinite().all():
        raise ValueError(f"{what} has a weight that is not finite")
    if weights.requires_grad:
        raise ValueError(
            f"the weights of {what} require gradients, which no loss gives: give weights.detach()"
        )


def check_integer(name: str, given: object, least: int, most: int | None = None) -> None:
    """Checks a whole number that a user gives.

    Raises:
        ValueError: it is none, or out of range.
    """
    whole = isinstance(given, Integral) and not isinstance(given, bool)
    if not whole or given < least or (most is not None and given > most):  # type: ignore[operator]
        upto = "" if most is None else f", at most {most:,}"
        raise ValueError(f"{name} is {given!r}: give a whole number of at least {least}{upto}")
