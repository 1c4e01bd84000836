"""The next token of a sequence, and whether it is its last: alike wherever answers are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distca.inference.sampling import TokenLogprobs, UnusableLogitsError
from distca.schedule.serving.scheduler import FinishReason
from distca.serve.engine.messages import NewRequest, SampledToken

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


def finish_of(
    tokens: Sequence[int], most: int, fewest: int, stops: frozenset[int]
) -> FinishReason | None:
    """Says why an answer ends with its last token; None: it goes on.

    Args:
        tokens: prompt, and the answer so far.
        most: most tokens of both.
        fewest: fewest tokens of both that `stops` may end.
        stops: tokens that end an answer.
    """
    if tokens[-1] in stops and len(tokens) > fewest:
        return "stop"
    return "length" if len(tokens) == most else None
