"""What an `LLM` answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from distca.inference.sampling import TokenLogprobs
from distca.schedule.serving.request import FinishReason

OnToken = Callable[[int, int], None]
"""Function of a request's number and the token that was chosen for it."""


@dataclass
class Completion:
    """An answer to a prompt.

    Attributes:
        token_ids: tokens of the answer, the one that stopped it included.
        finish_reason: "stop", "length" if it has the most tokens, or "abort".
        ttft_seconds: seconds from the begin of the call to its first token.
        bytes_moved: bytes that ranks moved for it by the plans, where they are counted.
        logits: logits of each token where they are kept, float32 `[vocabulary]`.
        logprobs: log-probabilities of each token where they are asked for.
        prompt_logprobs: those of the prompt's tokens but the first, where they are asked for: the
            first answer has them.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    ttft_seconds: float = 0.0
    bytes_moved: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its answers.

    Attributes:
        prompt_token_ids: tokens of the prompt.
        outputs: answers, as many as were asked for.
    """

    prompt_token_ids: list[int]
    outputs: list[Completion]
