"""The next token of a sequence, chosen by its logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distca.inference.messages import NewRequest, SampledToken
from distca.inference.sampling import TokenLogprobs, UnusableLogitsError

if TYPE_CHECKING:
    import torch


def choose_token(admitted: NewRequest, tokens: Sequence[int], logits: torch.Tensor) -> SampledToken:
    """Chooses the token that follows a sequence; says why none can be chosen, if so.

    Args:
        admitted: what the sequence was admitted with.
        tokens: prompt, and the answer so far.
        logits: logits of the next token, float32 `[vocabulary]`.
    """
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
