"""Finds where a model stops being finite, once its logits have shown that it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

Place = tuple[int, str]
"""A place in a model: its number in the order of the model, and its name."""


class NotFiniteError(ValueError):
    """Raised if no token can be chosen for a sequence.

    Args:
        sequence: number of the sequence.
        why: what its logits are, and where the model stops being finite.
    """

    def __init__(self, sequence: int, why: str) -> None:
        super().__init__(f"sequence {sequence}: {why}")
        self.sequence, self.why = sequence, why

    def __reduce__(self) -> tuple[type[NotFiniteError], tuple[int, str]]:
        """How it travels between processes."""
        return NotFiniteError, (self.sequence, self.why)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Names the sequence of a `NotFiniteError` as the user knows it.

    Args:
        what: "prompt" or "conversation".

    Raises:
        ValueError: in place of a `NotFiniteError`.
    """
    try:
        yield
    except NotFiniteError as error:
        raise ValueError(f"{what} {error.sequence}: {error.why}") from None


class Outputs:
    """Watches the outputs of a model's innermost modules.

    Attributes:
        first: first module, in the order of calls, whose output was not finite.
    """

    def __init__(self) -> None:
        self.first: Place | None = None
        self._calls = 0

    @contextmanager
    def watched(self, model: torch.nn.Module) -> Iterator[None]:
        """Watches while the context is open."""
        hooks = [
            module.register_forward_hook(self._hook(name))
            for name, module in model.named_modules()
            if not any(module.children())
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str) -> Callable[[torch.nn.Module, object, object], None]:
        def hook(module: torch.nn.Module, inputs: object, output: object) -> None:
            self._calls += 1
            several = output if isinstance(output, tuple | list) else (output,)
            tensors = [each for each in several if isinstance(each, torch.Tensor)]
            if self.first is None and not all(each.isfinite().all() for each in tensors):
                self.first = self._calls, name

        return hook


def first_of_all_ranks(place: Place | None) -> Place | None:
    """Returns the first place that any rank has found. Collective."""
    places = [place]
    if dist.is_initialized() and dist.get_world_size() > 1:
        places *= dist.get_world_size()
        dist.all_gather_object(places, place)
    return min((each for each in places if each is not None), default=None)
