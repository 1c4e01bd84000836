"""What a model can be fed."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Protocol, SupportsIndex


class Fed(Protocol):
    """A model's bounds of what it can be fed."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        ...

    @property
    def positions(self) -> int:
        """Most tokens of a sequence."""
        ...


def check_tokens(model: Fed, ids: Sequence[int], max_tokens: int, what: str) -> None:
    """Refuses tokens that a model cannot be fed.

    Args:
        model: the model, or its configuration.
        ids: token ids.
        max_tokens: most tokens of the answer.
        what: name of the prompt, for the message.

    Raises:
        ValueError: there are none, or too many, or one is not in the vocabulary.
    """
    if not ids:
        raise ValueError(f"{what} is empty: give at least one token")
    outside = next((each for each in ids if not 0 <= each < model.vocab_size), None)
    if outside is not None:
        raise ValueError(
            f"{what} has the token {outside}, but the vocabulary has {model.vocab_size:,} tokens"
        )
    if len(ids) + max_tokens > model.positions:
        raise ValueError(
            f"{what} has {len(ids):,} tokens, which with {max_tokens:,} new ones are more than the "
            f"model's {model.positions:,} positions: shorten it, or lower --max-tokens"
        )


def whole_numbers(ids: Iterable[SupportsIndex], what: str) -> list[int]:
    """Returns token ids as ints.

    Args:
        ids: token ids: ints, or what stands for them, as the elements of an integer tensor.
        what: name of the prompt, for the message.

    Raises:
        ValueError: one is not a whole number.
    """
    try:
        return [operator.index(each) for each in ids]
    except TypeError:
        raise ValueError(f"{what} has something else than whole numbers: give token ids") from None
