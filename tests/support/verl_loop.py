"""A step of GRPO on verl's batches: by our library on ranks that share prompts, and one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from distca.library import Planner, share_documents, split_packed
from distca.library import hugging_face as hf
from support.library_loops import BLOCK, VOCABULARY, make_model

RESPONSES, PROMPT, RESPONSE = 3, 300, 40


@dataclass
class Step:
    """Log-probabilities of a rank's responses as verl has them, its loss, and gradients.

    Attributes:
        log_probabilities: `[sequences, response]`.
        loss: the rank's loss.
        gradients: of all ranks, by parameter.
        tokens: tokens that the rank computed.
    """

    log_probabilities: torch.Tensor
    loss: float
    gradients: dict[str, torch.Tensor]
    tokens: int


def padded_batch(rank: int) -> Any:
    """A rank's responses to a prompt, padded left and right, as verl's workers get them."""
    from tensordict import TensorDict

    made = torch.Generator().manual_seed(rank)
    prompt_length = PROMPT - 20 * rank
    prompt = torch.randint(1, VOCABULARY, (prompt_length,), generator=made)
    ids = torch.zeros(RESPONSES, PROMPT + RESPONSE, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row in range(RESPONSES):
        length = RESPONSE - 7 * row
        ids[row, PROMPT - prompt_length : PROMPT] = prompt
        ids[row, PROMPT : PROMPT + length] = torch.randint(1, VOCABULARY, (length,), generator=made)
        attention[row, PROMPT - prompt_length : PROMPT + length] = 1
    return TensorDict(
        {
            "input_ids": ids,
            "prompts": ids[:, :PROMPT].clone(),
            "responses": ids[:, PROMPT:].clone(),
            "attention_mask": attention,
            "response_mask": attention[:, PROMPT:].clone(),
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        },
        batch_size=RESPONSES,
    )


def _policy_loss(log: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """A clipped loss with verl's advantages of made-up rewards, and its mean over tokens."""
    import numpy as np
    from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage

    rewards = torch.zeros_like(log)
    rewards[:, 0] = torch.arange(len(log)).float()
    index = np.array(["one prompt"] * len(log))
    advantages, _ = compute_grpo_outcome_advantage(rewards, response_mask.float(), index)
    ratio = torch.exp(log - log.detach() + 0.3 * torch.sin(torch.arange(log.shape[1]).float()))
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss: torch.Tensor = agg_loss(losses, response_mask.float(), "token-mean")
    return loss


def shared_step() -> Step:
    """The step on ranks that share all prompts and responses."""
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    hf.register()
    rank, model = dist.get_rank(), make_model("llama", hf.IMPLEMENTATION)
    planner = Planner(**hf.planner_arguments(model.config, torch.float32), block=BLOCK)
    data = left_right_2_no_padding(padded_batch(rank))
    ids = data["input_ids"]
    # The tokens that are predicted: those of responses.
    sizes = ids.offsets().diff()
    responses = data["response_mask"].sum(1)
    trained = [
        (torch.arange(int(size)) >= int(size - last)).float()
        for size, last in zip(sizes, responses, strict=True)
    ]
    own = split_packed(ids.values(), ids.offsets(), torch.cat(trained))
    batch = planner.place(share_documents(own))
    values = batch.log_probabilities(model(**hf.inputs_of(batch)).logits)
    of_rollouts = batch.gather_rollouts(values)
    # A value lies where verl has it, with the token that predicts.
    mine = [of_rollouts[rank * RESPONSES + n].roll(-1) for n in range(RESPONSES)]
    log = no_padding_2_padding(torch.cat(mine), data)
    loss = _policy_loss(log, data["response_mask"])
    loss.backward()
    gradients = {}
    for name, each in model.named_parameters():
        gradients[name] = torch.zeros_like(each) if each.grad is None else each.grad
        dist.all_reduce(gradients[name])
    planner.close()
    return Step(log.detach(), loss.item(), gradients, len(batch.tokens))


def step_one_by_one(ranks: int) -> list[Step]:
    """The step in one process, each sequence by itself; the gradients are those of all ranks."""
    model = make_model("llama", "eager")
    found = []
    for rank in range(ranks):
        data = padded_batch(rank)
        rows = []
        for ids, mask, of_response in zip(
            data["input_ids"], data["attention_mask"], data["response_mask"], strict=True
        ):
            tokens, last = ids[mask.bool()], int(of_response.sum())
            logits = model(input_ids=tokens[None]).logits[0, :-1].float()
            log = -torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
            rows.append(torch.nn.functional.pad(log[-last:], (0, len(of_response) - last)))
        log = torch.stack(rows)
        loss = _policy_loss(log, data["response_mask"])
        loss.backward()
        found.append(Step(log.detach(), loss.item(), {}, int(data["attention_mask"].sum())))
    for step in found:
        step.gradients.update({n: each.grad for n, each in model.named_parameters()})
    return found
