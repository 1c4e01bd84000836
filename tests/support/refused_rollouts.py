"""Mistakes with rollouts on live ranks, and what is said of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from distca.library import Document, Planner, Rollout, share_documents, share_prefixes
from distca.library import hugging_face as hf
from support.library_loops import BLOCK, SIZES, config
from support.rollout_loops import LEAST, hf_shape, star


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
    mask = hf.inputs_of(attended)["attention_mask"]
    values = torch.zeros(len(attended.predictions.rows))
    found = {
        "has values": str(hasattr(mask, "sum") or hasattr(mask, "dtype")),
        "values": message_of(lambda: mask.sum),
        "slice": message_of(lambda: mask[:, :1]),
        "sum": message_of(lambda: torch.zeros(1) + mask),
        "logits of tokens": message_of(lambda: attended.loss(zeros, of_predictions=True)),
        "vocabulary": message_of(lambda: attended.loss(zeros[:, :5])),
        "whole values": message_of(lambda: attended.sum_rollouts(values.long())),
        "rows of values": message_of(lambda: attended.sum_rollouts(values[:, None])),
        "list of values": message_of(lambda: attended.gather_rollouts(values.tolist())),  # type: ignore[arg-type]
        "one value": message_of(lambda: attended.gather_rollouts(values.sum())),
        "one value to sum": message_of(lambda: attended.sum_rollouts(values.sum())),
        "list of logits": message_of(lambda: attended.loss([1])),  # type: ignore[arg-type]
        "whole logits": message_of(lambda: attended.loss(zeros.long())),
        "rows of logits": message_of(lambda: attended.loss(zeros.reshape(-1, 1, zeros.shape[1]))),
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


def beyond_memory() -> dict[str, str]:
    """What planners with little memory say, and those with memories that are no number."""
    tokens = torch.arange(900)
    given: dict[str, Any] = {
        "a document": [tokens],
        "equal rollouts": share_prefixes([Rollout(tokens)] * 3),
        "rollouts that share nothing": [Rollout(tokens + n) for n in range(3)],
    }
    found = {}
    for name, each in given.items():
        planner = Planner(hf_shape(), block=BLOCK, memory_bytes=1000)
        found[name] = message_of(lambda: planner.place(each))  # noqa: B023
        planner.close()
    for memory in (math.nan, -1, 0, "1 GB"):
        found[str(memory)] = message_of(lambda: Planner(hf_shape(), memory_bytes=memory))  # type: ignore[arg-type] # noqa: B023
    return found


def beyond_vocabulary() -> list[str]:
    """What is said of tokens and targets that a model does not know, and of its last token."""
    planner = Planner(**hf.planner_arguments(config("llama", **SIZES), torch.float32), block=BLOCK)
    most = SIZES["vocab_size"]
    tokens = torch.arange(most - 9, most)
    given = (
        [tokens],
        [Document(tokens[:2], torch.tensor([most - 1, -100]))],
        [Rollout(tokens + 1)],
        [tokens + 1],
        [Document(tokens[:2], torch.tensor([-9, -100]))],
        [Document(tokens[:2], torch.tensor([-100, most]))],
    )
    found = [message_of(lambda: planner.place(each)) for each in given]  # noqa: B023
    planner.close()
    return found


def mistakes_of_one_rank() -> dict[str, str]:
    """What each rank says where rank 1 alone gives what cannot be used."""
    planner, documents = Planner(hf_shape(), block=BLOCK), [torch.arange(40)]
    rollouts = star(torch.Generator().manual_seed(5))
    heavy = [Rollout(torch.arange(9), torch.full((9,), 3e38))] * 3
    tokens = torch.arange(9)

    def wrong(given: Any) -> Any:
        return given if dist.get_rank() else documents

    found = {
        "empty": message_of(lambda: planner.place(wrong([]))),
        "None": message_of(lambda: planner.place(wrong(None))),
        "infinity": message_of(lambda: planner.place(wrong(heavy))),
        "shared None": message_of(lambda: share_documents(wrong(None))),
        "shared, None inside": message_of(lambda: share_documents(wrong([None]))),
    }
    for _ in range(9):
        planner.place([tokens])
    planner.place(share_prefixes(rollouts, LEAST))
    found["empty after trees"] = message_of(lambda: planner.place(wrong([])))
    found["after all"] = message_of(lambda: planner.place(documents))
    planner.close()
    return found


def values_of_another_kind() -> dict[str, str]:
    """What each rank says where rank 1 alone gives values of another dtype, size or number."""
    planner = Planner(hf_shape(), block=BLOCK)
    batch = planner.place(share_prefixes(star(torch.Generator().manual_seed(5)), LEAST))
    values = torch.ones(len(batch.predictions.rows))
    rows = torch.ones(len(batch.tokens), 3)
    other = bool(dist.get_rank())

    def half(given: torch.Tensor) -> torch.Tensor:
        return given.bfloat16() if other else given

    found = {
        "rollouts": message_of(lambda: batch.gather_rollouts(half(values))),
        "whole numbers": message_of(
            lambda: batch.gather_rollouts(values.int() if other else values)
        ),
        "sums": message_of(lambda: batch.sum_rollouts(half(values))),
        "documents": message_of(lambda: batch.gather(half(rows))),
        "columns": message_of(lambda: batch.gather(rows[:, :2] if other else rows)),
        "dimensions": message_of(lambda: batch.gather(rows[:, 0] if other else rows)),
        "fewer": message_of(lambda: batch.gather_rollouts(values[1:] if other else values)),
        "fewer sums": message_of(lambda: batch.sum_rollouts(values[1:] if other else values)),
        "fewer rows": message_of(lambda: batch.gather(rows[1:] if other else rows)),
        "after all": message_of(lambda: batch.gather_rollouts(values)),
    }
    planner.close()
    return found
