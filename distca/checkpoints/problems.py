"""Differences between the tensors of a checkpoint and the parameters of its model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distca.checkpoints.stored_weights import FLOATING_POINT, abbreviated


@dataclass(frozen=True)
class Source:
    """A tensor of a checkpoint and the parameter that it becomes.

    Attributes:
        name: name in the checkpoint.
        target: name of the parameter, whether or not the model has it.
        pattern: conversion pattern if several tensors (e.g. all experts) form the parameter; None
            if this tensor alone is it.
        shape: shape of the tensor.
        dtype: data type, by the names of safetensors.
    """

    name: str
    target: str
    pattern: str | None
    shape: tuple[int, ...]
    dtype: str

    @property
    def expert(self) -> int:
        """Number of its expert, the last number in its name; -1: there is none."""
        return int(next((each for each in self.name.split(".")[::-1] if each.isdecimal()), -1))


def find_problems(
    expected: Mapping[str, tuple[int, ...]], sources: Sequence[Source], tied: Mapping[str, str]
) -> list[str]:
    """Compares a checkpoint with the parameters of its model.

    Args:
        expected: shape of each parameter and persistent buffer of the model.
        sources: tensors of the checkpoint.
        tied: parameters that equal another one, and that one. Of those that are equal, one must be
            given.

    Returns:
        Descriptions of all differences; none if each parameter is given once and all tensors are
        used.
    """
    by_target: dict[str, list[Source]] = defaultdict(list)
    for source in sources:
        by_target[source.target].append(source)
    given = {tied.get(name, name) for name in by_target}
    missing = [name for name in expected if tied.get(name, name) not in given]
    unused = [source.name for source in sources if source.target not in expected]
    used = [source for source in sources if source.target in expected]
    integers = [f"{each.name} ({each.dtype})" for each in used if each.dtype not in FLOATING_POINT]
    repeated, reshaped = [], []
    for target, shape in expected.items():
        found = by_target[target]
        if len(found) > 1 and any(each.pattern is None for each in found):
            repeated.append(" and ".join(each.name for each in found))
        elif found and not _fits(found, shape):
            first, last = found[0], found[-1]
            reshaped.append(
                f"{first.name} is {list(first.shape)}, not {list(shape)}"
                if first.pattern is None
                else f"{first.name} to {last.name} do not make {target} {list(shape)}"
            )
    kinds = {
        "missing": missing,
        "not part of the model": unused,
        "of another shape": reshaped,
        "not floating point": integers,
        "given twice": repeated,
    }
    return [f"{len(found)} {kind}: {abbreviated(found)}" for kind, found in kinds.items() if found]


def _fits(sources: Sequence[Source], shape: tuple[int, ...]) -> bool:
    """Returns whether tensors have the shape of a parameter, or give it if they are joined.

    transformers joins those of all experts: it stacks the ones of each pattern by their experts'
    numbers, and concatenates the stacks, such as `gate_proj` and `up_proj`, by rows.
    """
    if sources[0].pattern is None:
        return sources[0].shape == shape
    experts: dict[str | None, list[int]] = defaultdict(list)
    for each in sources:
        experts[each.pattern].append(each.expert)
    rows, *others = sources[0].shape or (0,)
    return (
        all(each.shape == sources[0].shape for each in sources)
        and all(sorted(each) == list(range(*shape[:1])) for each in experts.values())
        and (rows * len(experts), *others) == shape[1:]
    )
