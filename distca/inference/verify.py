"""Answers of many ranks held against those of one process with transformers' own attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from distca.inference.messages import RequestOutput
from distca.inference.models import ServedModel, expert_count

LOGITS_APART = 1e-5
"""Most that logits in float32 differ from one process's, over the largest of them if that is above
1: the order of sums differs."""

TOP_APART = 2e-5
"""Distance of the two highest logits below which another token is no difference, likewise."""

MOST_TIMES = 4.0
"""Most that the furthest token's distance from float32 may be in bfloat16, over that of one
process's furthest."""


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
def compare(model: ServedModel, done: Sequence[RequestOutput], greedy: bool) -> Comparison:
    """Holds answers against one process's, which is fed the same tokens.

    In float32 logits have to be equal but for rounding, and greedy tokens equal. In bfloat16
    logits may, on average, be no further from float32's than one process's in bfloat16 are; the
    bound leaves room for chance. No token's logits may be much further than those of one process's
    worst token. Models with experts are not held to this, since rounding may choose another expert.

    Args:
        model: model that answered.
        done: answers with their logits.
        greedy: whether the likeliest tokens were taken.
    """
    cpu = torch.device("cpu")
    exact = replace(model, dtype=torch.float32).load(cpu, "eager")
    alike = None if model.dtype == torch.float32 else model.load(cpu, "eager")
    worst, tokens, wrong = 0.0, 0, 0
    off: dict[tuple[int, int], list[list[float]]] = {}
    answered = [(each.prompt_token_ids, answer) for each in done for answer in each.outputs]
    for number, (prompt, answer) in enumerate(answered):
        ids = torch.tensor([prompt + answer.token_ids[:-1]])
        first = len(prompt) - 1

        def logits(
            of: torch.nn.Module, ids: torch.Tensor = ids, first: int = first
        ) -> torch.Tensor:
            result: torch.Tensor = of(input_ids=ids, use_cache=False).logits[0, first:].float()
            return result

        reference, ours = logits(exact), torch.stack(answer.logits)
        finite = reference[reference.isfinite()].abs()
        scale = max(float(finite.max()), 1.0) if len(finite) else 1.0
        apart = float(torch.where(reference == ours, 0.0, (reference - ours).abs()).max())
        # If one of two numbers is NaN, Python's maximum is the first.
        worst = max(worst, math.inf if math.isnan(apart) else apart / scale)
        top = reference.topk(2).values
        chosen = reference.gather(1, torch.tensor(answer.token_ids)[:, None])
        tokens += len(chosen)
        wrong += int(((top[:, :1] - chosen) / scale > TOP_APART).sum())
        if alike is not None:
            theirs_off = (logits(alike) - reference).abs().mean(1).tolist()
            ours_off = (ours - reference).abs().mean(1).tolist()
            for token, *pair in zip(answer.token_ids, ours_off, theirs_off, strict=True):
                # An answer that goes round in circles says the same thing again and again.
                off.setdefault((number, token), []).append(pair)
    if alike is not None:
        means = np.array([np.mean(pairs, 0) for pairs in off.values()])
        ours_mean, theirs_mean = torch.from_numpy(means).T
        return _no_further(ours_mean, theirs_mean, routed=expert_count(model.config) > 0)
    holds = worst <= LOGITS_APART and not (greedy and wrong)
    same = f", {tokens - wrong} of {tokens} tokens the same" if greedy else ""
    return Comparison(
        holds, f"check: logits within {worst:.1e} of one process's{same}: {_VERDICT[holds]}"
    )


def _no_further(ours: torch.Tensor, theirs: torch.Tensor, routed: bool) -> Comparison:
    """Tells whether distances from float32, `[different tokens]`, are one process's but for chance.

    A few tokens that are wrong make the spread so large that their mean could be chance. So the
    furthest token counts, too, unless tokens are routed to experts.

    Sums are rounded in another order, so that either may be closer: one process's own attentions,
    eager and fused, differ by up to 7%. Of few tokens the spread is not known.
    """
    further = ours - theirs
    known = len(further) >= _TOKENS_FOR_A_SPREAD
    spread = further.std() / math.sqrt(len(further)) if known else theirs.mean() / 3
    times = float(ours.max() / theirs.max())
    # One process's logits that are infinite would allow everything.
    finite = bool(further.isfinite().all())
    holds = finite and bool(further.mean() <= 3 * spread) and (routed or times <= MOST_TIMES)
    return Comparison(
        holds,
        f"check: bfloat16 logits of {len(ours)} different tokens are {ours.mean():.2e} from "
        f"float32's on average, one process's {theirs.mean():.2e} (by chance up to "
        f"{3 * spread:.1e} apart), the furthest {times:.1f} times as far: {_VERDICT[holds]}",
    )


_TOKENS_FOR_A_SPREAD = 8
_VERDICT = {True: "equal", False: "NOT EQUAL"}
