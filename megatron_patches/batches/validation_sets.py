"""Validation on whole sets, and on several, of which each has a loss of its own."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any, Protocol

from megatron_patches.batches.blends import Blend


class _Closable(Protocol):
    def __next__(self) -> Any: ...

    def close(self) -> None: ...


class WholeSet(Iterator[Any]):
    """An iterator over all of a set, again and again, as long as the iterations of one pass.

    Args:
        iterable: iterator over the set's micro-batches or ticks.
        iterations: number of global batches of a pass.
    """

    def __init__(self, iterable: _Closable, iterations: int) -> None:
        # Named as in Megatron-LM's own wrapper, behind which ticks are looked for.
        self.iterable, self._iterations = iterable, iterations

    def __next__(self) -> Any:
        return next(self.iterable)

    def __len__(self) -> int:
        return self._iterations

    def close(self) -> None:
        """Ends the iterator's threads."""
        self.iterable.close()


def evaluates(args: Namespace) -> bool:
    """Whether a run evaluates its model."""
    return bool(args.eval_iters or args.full_validation)


def sets_of(args: Namespace, blend: Blend) -> list[Blend]:
    """Returns the validation sets of a blend, each with a loss of its own.

    Raises:
        ValueError: the blend has weights, which whole sets cannot follow; or names of another
            number.
    """
    if not args.full_validation:
        return [blend]
    if blend.weights is not None:
        raise ValueError(
            "--full-validation reads each document once: give the validation sets without weights"
        )
    if not args.multiple_validation_sets:
        return [blend]
    names = getattr(args, "validation_set_names", None)
    if names and len(names) != len(blend.prefixes):
        raise ValueError(
            f"--validation-set-names has {len(names)} names, but there are {len(blend.prefixes)} "
            "validation sets: give one for each"
        )
    return [Blend((prefix,), None, blend.split) for prefix in blend.prefixes]


def suffixes(args: Namespace, count: int) -> list[str]:
    """Returns what tells the losses of validation sets apart, as Megatron-LM writes it."""
    if not args.multiple_validation_sets:
        return [""]
    names = getattr(args, "validation_set_names", None) or range(count)
    return [f"-{name}" for name in names]
