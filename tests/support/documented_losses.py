"""The losses of rollouts that the page of shared prefixes has, run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import torch
import torch.distributed as dist

from distca.library import Planner, Rollout, share_prefixes
from distca.library import hugging_face as hf
from support.library_loops import BLOCK, make_model
from support.rollout_loops import LEAST, star

PAGE = Path(__file__).parents[2] / "docs" / "shared_prefixes.md"
LOSSES = {"GRPO": "ratio.clamp", "DPO": "logsigmoid"}
"""What the code of each loss has, and nothing else on the page."""
BETA, OLDER = 0.05, 0.9
Found = dict[str, tuple[float, torch.Tensor]]
"""Each loss, and its gradient of the output layer's weight."""


def _code(name: str) -> str:
    blocks = re.findall(r"(?:^    .*\n)+", PAGE.read_text(), re.MULTILINE)
    (found,) = (each for each in blocks if LOSSES[name] in each)
    return dedent(found)


def _rollouts() -> list[Rollout]:
    """Prompts with four or more responses of 1 to 120 tokens."""
    made = star(torch.Generator().manual_seed(3))
    return [Rollout(each.tokens, (each.weights != 0).float()) for each in made]  # type: ignore[union-attr]


def _advantages(count: int) -> torch.Tensor:
    return torch.cos(1.0 + torch.arange(count))


def documented_losses() -> Found:
    """On ranks that share the rollouts' trees. Another policy's logits are a part of this one's."""
    hf.register()
    model, rollouts = make_model("llama", hf.IMPLEMENTATION), _rollouts()
    planner = Planner(**hf.planner_arguments(model.config, torch.float32), block=BLOCK)
    batch = planner.place(share_prefixes(rollouts, LEAST))
    found = {}
    for name in LOSSES:
        model.zero_grad()
        logits = model(**hf.inputs_of(batch)).logits
        names: dict[str, Any] = {
            "torch": torch,
            "batch": batch,
            "logits": logits,
            "reference_logits": OLDER * logits.detach(),
            "old": batch.log_probabilities(OLDER * logits.detach()),
            "rollouts": rollouts,
            "advantage": _advantages(len(rollouts)),
            "length": torch.stack([each.weights.sum() for each in rollouts]),  # type: ignore[union-attr]
            "beta": BETA,
        }
        exec(_code(name), names)
        loss = names["loss"]
        loss.backward()
        whole, gradient = loss.detach().clone(), model.lm_head.weight.grad.clone()
        if name == "GRPO":
            dist.all_reduce(whole)
        dist.all_reduce(gradient)
        found[name] = float(whole), gradient
    planner.close()
    return found


def losses_one_by_one() -> Found:
    """In one process, by their definitions."""
    model, rollouts, found = make_model("llama", "eager"), _rollouts(), {}
    for name in LOSSES:
        model.zero_grad()
        gains, margins = [], []
        for each, advantage in zip(rollouts, _advantages(len(rollouts)), strict=True):
            assert each.weights is not None
            logits = model(input_ids=each.tokens[None]).logits[0, :-1]
            log, other = (
                -torch.nn.functional.cross_entropy(of, each.tokens[1:], reduction="none")[
                    each.weights[1:] != 0
                ]
                for of in (logits, OLDER * logits.detach())
            )
            ratio = torch.exp(log - other)
            clipped = ratio.clamp(0.8, 1.2)
            gains.append(torch.minimum(ratio * advantage, clipped * advantage).mean())
            margins.append((log - other).sum())
        chosen, rejected = torch.stack(margins[::2]), torch.stack(margins[1::2])
        losses = {
            "GRPO": -torch.stack(gains).mean(),
            "DPO": -torch.nn.functional.logsigmoid(BETA * (chosen - rejected)).mean(),
        }
        losses[name].backward()
        found[name] = losses[name].item(), model.lm_head.weight.grad.clone()
    return found
