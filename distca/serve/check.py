"""Answers of many ranks held against those of one process with transformers' own attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from distca.serve.chat import Answered
from distca.serve.models import ServedModel

LOGITS_APART = 1e-5
"""Most that logits in float32 differ from one process's, over the largest of them if that is above
1: the order of sums differs."""

TOP_APART = 2e-5
"""Distance of the two highest logits below which another token is no difference, likewise."""


@dataclass(frozen=True)
class Comparison:
    """What a comparison found.

    Attributes:
        holds: whether the answers are one process's.
        line: what was found, for a reader.
    """

    holds: bool
    line: str


@torch.no_grad()
def compare(model: ServedModel, done: Sequence[Answered], greedy: bool) -> Comparison:
    """Holds answers against one process's, which is fed the same tokens.

    In float32 logits have to be equal but for rounding, and greedy tokens equal. In bfloat16
    logits may, on average, be no further from float32's than one process's in bfloat16 are, but for
    a quarter.

    Args:
        model: model that answered.
        done: answers with their logits.
        greedy: whether the likeliest tokens were taken.
    """
    cpu = torch.device("cpu")
    exact = replace(model, dtype=torch.float32).load(cpu, "eager")
    alike = None if model.dtype == torch.float32 else model.load(cpu, "eager")
    worst, tokens, wrong = 0.0, 0, 0
    ours_off, theirs_off, count = 0.0, 0.0, 0
    for each in done:
        ids = torch.tensor([each.token_ids + each.answer.token_ids[:-1]])
        first = len(each.token_ids) - 1

        def logits(
            of: torch.nn.Module, ids: torch.Tensor = ids, first: int = first
        ) -> torch.Tensor:
            result: torch.Tensor = of(input_ids=ids, use_cache=False).logits[0, first:].float()
            return result

        reference, ours = logits(exact), torch.stack(each.answer.logits)
        scale = max(float(reference.abs().max()), 1.0)
        worst = max(worst, float((reference - ours).abs().max()) / scale)
        top = reference.topk(2).values
        chosen = reference.gather(1, torch.tensor(each.answer.token_ids)[:, None])
        tokens += len(chosen)
        wrong += int(((top[:, :1] - chosen) / scale > TOP_APART).sum())
        if alike is not None:
            ours_off += float((ours - reference).abs().sum())
            theirs_off += float((logits(alike) - reference).abs().sum())
            count += reference.numel()
    if alike is not None:
        holds = ours_off <= _NO_FURTHER * theirs_off
        return Comparison(
            holds,
            f"check: bfloat16 logits of {tokens} tokens are {ours_off / count:.2e} from float32's "
            f"on average, one process's {theirs_off / count:.2e}: {_VERDICT[holds]}",
        )
    holds = worst <= LOGITS_APART and not (greedy and wrong)
    same = f", {tokens - wrong} of {tokens} tokens the same" if greedy else ""
    return Comparison(
        holds, f"check: logits within {worst:.1e} of one process's{same}: {_VERDICT[holds]}"
    )


# Sums are rounded in another order, and partial outputs once more, so either may be closer.
_NO_FURTHER = 1.25
_VERDICT = {True: "equal", False: "NOT EQUAL"}
