"""Steps on micro-batches with fewer tokens than ranks, together and in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from distca.library import Document, Planner, Rollout
from distca.library import hugging_face as hf
from support.library_loops import BLOCK, make_model

GIVEN: dict[str, list[Rollout] | list[Document]] = {
    "one token": [Rollout(torch.tensor([3]))],
    "two tokens": [Rollout(torch.tensor([3, 5]))],
    "a document": [Document(torch.tensor([3, 5]))],
}


def train_alone(family: str) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """The loss and the gradients of each, in one process."""
    found = []
    for (given,) in GIVEN.values():
        model, tokens = make_model(family, "eager"), given.tokens
        logits = model(input_ids=tokens[None]).logits[0, :-1]
        loss: Any = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum")
        loss.backward()
        found.append((loss.item(), _gradients(model)))
    return found


def train_few_tokens(
    family: str, checkpointing: bool, compiled: bool = False
) -> list[tuple[float, dict[str, torch.Tensor], list[int]]]:
    """The loss and the gradients of each, summed over the ranks, and rows of this rank: tokens, and
    values that `gather` returns of the model's rows."""
    hf.register()
    found = []
    for given in GIVEN.values():
        model: Any = make_model(family, hf.IMPLEMENTATION)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        planner = Planner(**hf.planner_arguments(model.config, torch.float32), block=BLOCK)
        batch = planner.place(given)
        call = model
        if compiled:
            torch._dynamo.reset()
            call = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
        made = call(**hf.inputs_of(batch))
        loss: Any = batch.loss(made.logits)
        if made.loss is not None:
            # What the model returns is a mean.
            torch.testing.assert_close(made.loss * batch.num_targets, loss)
            loss = made.loss * batch.num_targets
        loss.backward()
        gathered = batch.gather(made.logits[0].detach())
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        gradients = _gradients(model)
        for each in gradients.values():
            dist.all_reduce(each)
        rows = [len(batch.tokens), sum(map(len, gathered))]
        found.append((whole.item(), gradients, rows))
        planner.close()
    return found


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(each) if each.grad is None else each.grad.clone()
        for name, each in model.named_parameters()
    }
