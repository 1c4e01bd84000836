"""Mistakes with rollouts on live ranks, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distca.library import Planner, share_prefixes
from distca.library import hugging_face as hf
from support.library_loops import BLOCK, SIZES, config
from support.rollout_loops import LEAST, star


def message_of(mistake: Callable[[], object]) -> str:
    """What is said of a mistake."""
    try:
        mistake()
    except ValueError as error:
        return str(error)
    return "no error"


def with_other_attention() -> dict[str, str]:
    """What is said where a batch's core attention is not ours, before and after it was."""
    from transformers import AutoModelForCausalLM

    hf.register()
    of_both = config("llama", **SIZES)
    policy = AutoModelForCausalLM.from_config(of_both, attn_implementation=hf.IMPLEMENTATION)
    planner = Planner(**hf.planner_arguments(of_both, torch.float32), block=BLOCK)
    made = torch.Generator().manual_seed(5)
    given = {"rollouts": share_prefixes(star(made), LEAST), "documents": [torch.arange(70)]}

    def run(model: Any, name: str) -> object:
        return model(**hf.inputs_of(planner.place(given[name])))

    unattended = planner.place(given["rollouts"])
    zeros = torch.zeros(len(unattended.tokens), SIZES["vocab_size"])
    attended = planner.place(given["rollouts"])
    policy(**hf.inputs_of(attended))
    values = torch.zeros(len(attended.predictions.rows))
    found = {
        "vocabulary": message_of(lambda: attended.loss(zeros[:, :5])),
        "whole values": message_of(lambda: attended.sum_rollouts(values.long())),
        "rows of values": message_of(lambda: attended.sum_rollouts(values[:, None])),
        "loss": message_of(lambda: unattended.loss(zeros)),
        "log-probabilities": message_of(lambda: unattended.log_probabilities(zeros)),
        "policy": message_of(lambda: run(policy, "rollouts")),
    }
    for kind in ("sdpa", "eager"):
        reference = AutoModelForCausalLM.from_config(of_both, attn_implementation=kind)
        for name in given:
            found[f"{kind}, {name}"] = message_of(lambda: run(reference, name))  # noqa: B023
            found[f"{kind}, {name}, policy"] = message_of(lambda: run(policy, name))  # noqa: B023
    planner.close()
    return found
