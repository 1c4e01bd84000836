"""What tests of other trainers share: a small model, texts, and what one process computes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from support.byte_tokenizer import chat_tokenizer

EXAMPLES = str(Path(__file__).parents[2] / "examples")
WORDS = ("the", "attention", "of", "all", "documents", "is", "shared", "by", "ranks", "alone")


def import_adapters() -> None:
    """Lets adapters be imported from the folder of examples."""
    if EXAMPLES not in sys.path:
        sys.path.insert(0, EXAMPLES)


def write_model(folder: Path) -> Path:
    """Writes a small Llama with random weights, and a tokenizer of bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260}
    config = LlamaConfig(**sizes, bos_token_id=256, eos_token_id=257, pad_token_id=258)
    LlamaForCausalLM(config).float().save_pretrained(folder)
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"})
    tokenizer.save_pretrained(folder)
    return folder


def texts(count: int) -> list[str]:
    """Texts of a few to several hundred letters."""
    return [" ".join(WORDS[(n + k) % 10] for k in range(3 + (37 * n) % 61)) for n in range(count)]


def write_texts(path: Path, count: int, key: str = "text") -> Path:
    """Writes texts, a JSON object a line."""
    path.write_text("".join(json.dumps({key: each}) + "\n" for each in texts(count)))
    return path


Read = list[tuple[list[int], list[int]]]
"""Documents: tokens, and the target of each, or -100."""


@dataclass
class TrainerStep:
    """A step of a trainer on a rank.

    Attributes:
        loss: what the trainer says; NaN: it says nothing.
        weights: the whole model's before the step, by name.
        gradients: the whole model's.
        read: what the rank read.
        tokens: how many tokens it computed, for each micro-batch.
    """

    loss: float = float("nan")
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    read: Read = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor that may be sharded. Collective."""
    return getattr(tensor, "full_tensor", tensor.clone)().detach().clone()


def record(model: Any, step: TrainerStep) -> None:
    """Keeps weights and gradients of the whole model. Collective."""
    for name, each in model.named_parameters():
        name = name.removeprefix("module.")
        step.weights[name] = whole(each)
        step.gradients[name] = whole(torch.zeros_like(each) if each.grad is None else each.grad)


def count_tokens(planner: Any, placed: list[int]) -> None:
    """Notes how many tokens of each batch the planner gives this rank."""
    place: Callable[[Any], Any] = planner.place

    def counted(documents: Any) -> Any:
        batch = place(documents)
        placed.append(len(batch.tokens))
        return batch

    planner.place = counted


def documents_of_packed(tokens: Any, positions: Any, labels: Any) -> Read:
    """Documents of rows whose positions begin anew, with labels as transformers have them."""
    found: Read = []
    for row in zip(tokens.tolist(), positions.tolist(), labels.tolist(), strict=True):
        for token, position, label in zip(*row, strict=True):
            if position == 0:
                found.append(([], []))
            elif found[-1][0]:
                found[-1][1][-1] = label
            found[-1][0].append(token)
            found[-1][1].append(-100)
    return found


def alone(folder: Path, weights: dict[str, torch.Tensor], read: Iterable[Any]) -> TrainerStep:
    """Loss and gradients of documents one by one, in one process with transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.load_state_dict(weights)
    total, count = torch.zeros(()), 0
    for tokens, targets in read:
        logits = model(input_ids=torch.tensor([tokens])).logits[0]
        target = torch.tensor(targets)
        total = total + torch.nn.functional.cross_entropy(logits, target, reduction="sum")
        count += int((target != -100).sum())
    loss = total / count
    loss.backward()
    return TrainerStep(loss.item(), weights, {n: p.grad for n, p in model.named_parameters()})


def check_steps(folder: Path, found: list[list[TrainerStep]], steps: int) -> None:
    """Holds the steps of all ranks against one process, which reads what all of them read."""
    import pytest

    for of_ranks in zip(*found, strict=True):
        expected = alone(folder, of_ranks[0].weights, (d for rank in of_ranks for d in rank.read))
        for rank in of_ranks:
            assert rank.loss == pytest.approx(expected.loss, rel=1e-6)
            assert rank.gradients.keys() == expected.gradients.keys()
            for name, each in expected.gradients.items():
                apart = (rank.gradients[name] - each).norm() / each.norm().clamp_min(1e-12)
                assert float(apart) < 5e-6, name
        # No padding is computed.
        read = sum(len(tokens) for rank in of_ranks for tokens, _ in rank.read)
        assert sum(sum(rank.tokens) for rank in of_ranks) == read
        for mine in zip(*(rank.tokens for rank in of_ranks), strict=True):
            assert max(mine) - min(mine) <= 1
    assert all(len(rank) == steps for rank in found)
