"""The next tokens of sequences, chosen by their logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distca.inference.messages import NewRequest, SampledToken
from distca.inference.sampling import (
    Penalties,
    TokenLogprobs,
    UnusableLogitsError,
    check_highest,
    take_likeliest,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Choice:
    """A token to choose.

    Attributes:
        admitted: what the sequence was admitted with.
        tokens: prompt, and the answer so far.
        logits: logits of the next token, float32 `[vocabulary]`.
    """

    admitted: NewRequest
    tokens: Sequence[int]
    logits: torch.Tensor

    @property
    def is_likeliest(self) -> bool:
        """Whether the unchanged logits decide, and no log-probabilities are asked for."""
        admitted = self.admitted
        greedy = admitted.sampling.temperature == 0 and admitted.penalties == Penalties()
        return greedy and admitted.logprobs is None


def choose_tokens(choices: Sequence[Choice]) -> list[SampledToken]:
    """Chooses the token that follows each sequence; says why none can be chosen, if so."""
    likeliest = [each for each in choices if each.is_likeliest]
    found = dict(zip([id(each) for each in likeliest], _likeliest(likeliest), strict=True))
    return [found.get(id(each)) or _choose(each) for each in choices]


def _likeliest(choices: Sequence[Choice]) -> list[SampledToken]:
    """Takes the likeliest tokens of all sequences at once."""
    if not choices:
        return []
    highest, tokens = take_likeliest([each.logits for each in choices])
    found = []
    for each, high, token in zip(choices, highest, tokens, strict=True):
        try:
            check_highest(high)
            found.append(SampledToken(each.admitted.number, token, None))
        except UnusableLogitsError as error:
            found.append(SampledToken(each.admitted.number, -1, None, str(error)))
    return found


def _choose(choice: Choice) -> SampledToken:
    admitted, tokens, logits = choice.admitted, choice.tokens, choice.logits
    prompt, answer = tokens[: admitted.prompt], tokens[admitted.prompt :]
    changed = admitted.penalties.apply(logits, prompt, answer)
    try:
        token = admitted.sampling.choose(changed, admitted.choice, len(tokens))
        if admitted.logprobs is None:
            return SampledToken(admitted.number, token, None)
        return SampledToken(
            admitted.number, token, TokenLogprobs.of(logits, token, admitted.logprobs)
        )
    except UnusableLogitsError as error:
        return SampledToken(admitted.number, -1, None, str(error))
