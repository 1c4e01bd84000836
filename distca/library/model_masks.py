"""Masks of transformers' models: what `inputs_of` gives a model, and what its layers get of it.

transformers let an implementation of attention make masks, too. So a model says itself which mask a
layer has, even if its attention does not hand its window on, as that of Qwen2-MoE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch

from distca.plan import Mask

_PADDED = (
    "give documents without padding or mask: call with `inputs_of(batch)`; models that make a mask "
    "of their own are not supported"
)


class _NoTensorError(AttributeError, ValueError):
    """What stands for the mask lacks what tensors have: so `hasattr` says that, too."""


class _NoTensor:
    """What models get in place of a mask, and hand on: whoever looks at it is refused."""

    def __getattr__(self, name: str) -> NoReturn:
        """Whatever a model looks at, such as values.

        Raises:
            ValueError: always; it is an `AttributeError`, too.
        """
        if not name.startswith("_"):
            raise _error(f"has no {name}")
        raise AttributeError(name)

    def __getitem__(self, index: object) -> NoReturn:
        raise _error("cannot be sliced")

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> NoReturn:
        raise _error("is no argument of torch's functions")


@dataclass(frozen=True)
class NoMask(_NoTensor):
    """Stands for a mask of all tokens; `mask_of_layers` makes that of each layer in its place.

    Attributes:
        ndim: dimensions of a mask that needs no more work, so that models leave it as it is.
        shape: sizes that no mask of tokens has.
    """

    ndim: ClassVar[int] = 4
    shape: ClassVar[tuple[int, ...]] = (1, 1, 0, 0)


@dataclass(frozen=True)
class LayerMask(_NoTensor):
    """The mask of a model's layers of one kind.

    Attributes:
        mask: the mask.
    """

    mask: Mask


def _error(what: str) -> _NoTensorError:
    return _NoTensorError(
        f"the attention_mask of inputs_of is no tensor, and {what}. A model that looks at it has "
        "another attention, which would mix a batch's documents: make it with "
        'attn_implementation="distca", and give each model a config of its own. If it was, models '
        "of its type are not supported"
    )


def mask_of_layers(
    *,
    attention_mask: NoMask | torch.Tensor | None = None,
    config: object = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = False,
    **_: object,
) -> LayerMask:
    """Makes the mask that a model's layers of one kind have, as transformers call it.

    Args:
        attention_mask: what the model was called with.
        config: configuration of the model.
        local_size: keys that a query sees, with its own; None: all before it.
        allow_is_causal_skip: whether nothing else than order and window decides what is seen.

    Raises:
        ValueError: the model was called with another mask, or its own is neither causal nor a
            sliding window.
    """
    if not isinstance(attention_mask, NoMask):
        raise ValueError(_PADDED)
    window = getattr(config, "sliding_window", None)
    if not allow_is_causal_skip or local_size not in (None, window):
        raise ValueError(
            "a layer's mask is neither causal nor a sliding window: models of the type "
            f"{getattr(config, 'model_type', None)} with this configuration are not supported"
        )
    return LayerMask(mask_of_window(local_size))


def mask_of_window(window: int | None) -> Mask:
    """Returns the mask of a window of transformers, which counts the query's own token."""
    return Mask() if window is None else Mask(window_left=window - 1)


def mask_of_layer(given: object, window: int | None) -> Mask:
    """Returns the mask of a layer.

    Args:
        given: mask that the layer was called with: one of `mask_of_layers`; None: the model made
            none.
        window: window that its attention asks for, if it does.

    Raises:
        ValueError: the mask is of something else, or the attention asks for another one.
    """
    if given is None:
        return mask_of_window(window)
    if not isinstance(given, LayerMask):
        raise ValueError(_PADDED)
    if window is not None and mask_of_window(window) != given.mask:
        raise ValueError(
            f"a layer has {given.mask}, but its attention asks for {mask_of_window(window)}: "
            "models of its type are not supported"
        )
    return given.mask
