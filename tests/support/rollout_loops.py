"""Training on rollouts that share tokens, on live ranks, and one by one in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from distca.library import Document, Planner, Rollout, share_documents, share_prefixes
from distca.library import hugging_face as hf
from support.library_loops import BLOCK, VOCABULARY, counted, make_model

LEAST = 16


def _tokens(made: torch.Generator, count: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=made)


def _rollout(parts: Sequence[torch.Tensor], trained: Sequence[float]) -> Rollout:
    """A rollout of parts, each with a weight of its tokens' losses."""
    pairs = zip(parts, trained, strict=True)
    weights = [torch.full((len(part),), each) for part, each in pairs]
    return Rollout(torch.cat(list(parts)), torch.cat(weights))


def star(made: torch.Generator) -> list[Rollout]:
    """Responses to two prompts, with advantages."""
    found = []
    for prompt, lengths in ((400, (60, 33, 90, 5, 71)), (37, (120, 1, 64))):
        shared = _tokens(made, prompt)
        for number, length in enumerate(lengths):
            parts = shared, _tokens(made, length)
            found.append(_rollout(parts, (0.0, (-1.0) ** number * (0.5 + number))))
    return found


def turns(made: torch.Generator) -> list[Rollout]:
    """A conversation that branches after each turn; its earlier answers are trained, too."""
    found, history, trained = [], [_tokens(made, 90)], [0.0]
    for turn in range(4):
        for _ in range(2):
            answer = _tokens(made, 20 + 15 * turn)
            found.append(_rollout([*history, answer], [*trained, 1.0]))
        history += [answer, _tokens(made, 25)]
        trained += [1.0, 0.0]
    return found


def pairs(made: torch.Generator) -> list[Rollout]:
    """Preference pairs: a chosen and a rejected answer to each question."""
    found = []
    for question in (300, 40, 120, 17):
        shared = _tokens(made, question)
        for sign in (1.0, -1.0):
            found.append(_rollout((shared, _tokens(made, 50)), (0.0, sign)))
    return found


def odd(made: torch.Generator) -> list[Rollout]:
    """Equal rollouts, one that is another's beginning, one of one token, and one alone."""
    long, other = _tokens(made, 333), _tokens(made, 64)
    found = [Rollout(long), Rollout(long.clone()), Rollout(long[:150]), Rollout(long[:10])]
    found += [Rollout(long[:1]), Rollout(other), Rollout(torch.cat([long[:150], other]))]
    return found


def long_prompt(made: torch.Generator) -> list[Rollout]:
    """Short answers to a prompt that is longer than a rank's tokens."""
    prompt = _tokens(made, 700)
    return [_rollout((prompt, _tokens(made, 20)), (0.0, sign)) for sign in (1.0, -1.0)]


MIXES: dict[str, Callable[[torch.Generator], list[Rollout]]] = {
    "star": star,
    "turns": turns,
    "pairs": pairs,
    "odd": odd,
}


def rollouts_of(mix: str, step: int) -> list[Rollout]:
    """The rollouts of a step."""
    of_all = {**MIXES, "long prompt": long_prompt}
    return of_all[mix](torch.Generator().manual_seed(step))


@dataclass
class Trained:
    """What steps on rollouts gave.

    Attributes:
        losses: loss of each step.
        gradients: gradients of each step, by parameter.
        log_probabilities: of each step and rollout, `[tokens]`.
        rows: rows that this rank computed in each step.
        logits: rows of logits that it computed.
        bytes_counted: whether it sent what the plans say.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    log_probabilities: list[list[torch.Tensor]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    logits: list[int] = field(default_factory=list)
    bytes_counted: bool = False


def _divisor(rollouts: Sequence[Rollout]) -> int:
    """Tokens of all rollouts: weights of both signs may add up to nothing."""
    return sum(len(each.tokens) for each in rollouts)


def _old(rollout: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """A made-up difference to the log-probability of an older policy."""
    return 0.3 * torch.sin(3.0 * rollout + 0.7 * position)


def _clipped(log: torch.Tensor, rollout: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The clipped loss of PPO and GRPO, with an advantage of each rollout."""
    ratio = torch.exp(log - log.detach() - _old(rollout, position))
    advantage = torch.cos(1.0 + rollout)
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()


def _descend(model: Any, trained: Trained) -> None:
    named = dict(model.named_parameters())
    trained.gradients.append({name: each.grad.clone() for name, each in named.items()})
    with torch.no_grad():
        for each in named.values():
            each -= 0.02 * each.grad


def _dpo(sums: torch.Tensor) -> torch.Tensor:
    """The loss of preference pairs: sums of chosen and rejected answers in turn."""
    return -torch.nn.functional.logsigmoid(0.05 * (sums[::2] - sums[1::2])).mean()


def train_one_by_one(family: str, mix: str, kind: str) -> Trained:
    """Two steps in one process, each rollout by itself."""
    model, trained = make_model(family, "eager"), Trained()
    for step in range(2):
        model.zero_grad()
        rollouts, logs, total = rollouts_of(mix, step), [], 0.0
        weights = [
            torch.ones(len(each.tokens)) if each.weights is None else each.weights
            for each in rollouts
        ]
        divisor = _divisor(rollouts)
        sums = []
        for number, each in enumerate(rollouts):
            log = torch.zeros(len(each.tokens))
            if len(log) > 1:
                logits = model(input_ids=each.tokens[None]).logits[0, :-1].float()
                log = -torch.nn.functional.cross_entropy(logits, each.tokens[1:], reduction="none")
                position = torch.arange(1, len(each.tokens))
                trained_tokens = weights[number][1:] != 0
                log = log * trained_tokens
                loss = -(log * weights[number][1:]).sum() / divisor
                if kind == "clipped":
                    rollout = torch.full_like(position, number)[trained_tokens]
                    loss = _clipped(log[trained_tokens], rollout, position[trained_tokens])
                if kind == "dpo":
                    sums.append((log * weights[number][1:]).sum())
                else:
                    loss.backward()
                    total += loss.item()
                log = torch.cat([torch.zeros(1), log.detach()])
            logs.append(log)
        if kind == "dpo":
            whole = _dpo(torch.stack(sums))
            whole.backward()
            total = whole.item()
        trained.losses.append(total)
        trained.log_probabilities.append(logs)
        _descend(model, trained)
    return trained


def train_on_trees(
    family: str,
    mix: str,
    kind: str = "weighted",
    checkpointing: bool = False,
    own: bool = False,
    few_logits: bool = False,
) -> Trained:
    """The same steps on trees that the ranks share; `few_logits` are those that predict."""
    hf.register()
    model, trained = make_model(family, hf.IMPLEMENTATION), Trained()
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    planner = Planner(**hf.planner_arguments(model.config, torch.float32), block=BLOCK)
    placed = []
    for step in range(2):
        model.zero_grad()
        rollouts = rollouts_of(mix, step)
        trees: Any = share_prefixes(rollouts, LEAST)
        if own:
            # The first rank has none, and the last one all.
            trees = share_documents(rollouts if dist.get_rank() else [])
        batch = planner.place(planner.collate(trees))
        placed.append(batch)
        inputs = hf.inputs_of(batch)
        if few_logits:
            inputs["logits_to_keep"] = batch.predictions.rows
        logits = model(**inputs).logits
        trained.logits.append(logits.shape[1])
        log = batch.log_probabilities(logits, of_predictions=few_logits)
        if kind == "clipped":
            entries = batch.rollout_tokens()
            loss = _clipped(log[entries.prediction], entries.rollout, entries.position)
        elif kind == "dpo":
            # The same on all ranks. Each has a part of the gradient.
            loss = _dpo(batch.sum_rollouts(log))
        else:
            loss = batch.loss(logits, of_predictions=few_logits) / _divisor(rollouts)
        loss.backward()
        whole = loss.detach().clone()
        if kind != "dpo":
            dist.all_reduce(whole)
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        found = batch.gather_rollouts(log.detach())
        trained.losses.append(float(whole))
        trained.log_probabilities.append([found[n] for n in range(len(rollouts))])
        trained.rows.append(len(batch.tokens))
        _descend(model, trained)
    layers = model.config.num_hidden_layers
    trained.bytes_counted = counted(planner, placed, layers, 2 if checkpointing else 1)
    planner.close()
    return trained


@dataclass
class Both:
    """What a micro-batch of documents and trees gives.

    Attributes:
        documents: tokens by document.
        predicted: predicted tokens by rollout.
        message: what `targets` says.
        counted: tokens that the batch counts, as trees and one by one.
        rows: tokens on all ranks.
        one_by_one: tokens of all rollouts.
    """

    documents: list[torch.Tensor]
    predicted: dict[int, torch.Tensor]
    message: str
    counted: tuple[int, int]
    rows: int
    one_by_one: int


def place_both() -> Both:
    """Documents and trees in one micro-batch."""
    planner = Planner(hf_shape(), block=BLOCK)
    made = torch.Generator().manual_seed(5)
    rollouts = star(made)
    first = Document(_tokens(made, 50), _tokens(made, 50))
    given = [first, *share_prefixes(rollouts, LEAST), Document(_tokens(made, 70))]
    batch = planner.place(given)
    predicted = batch.gather_rollouts(batch.predictions.targets)
    try:
        message = str(batch.targets)
    except ValueError as error:
        message = str(error)
    found = batch.gather(batch.tokens)
    planner.close()
    total = torch.tensor(len(batch.tokens))
    dist.all_reduce(total)
    counted = batch.num_tokens, batch.num_given_tokens
    one_by_one = sum(len(each.tokens) for each in rollouts)
    return Both(found, predicted, message, counted, int(total), one_by_one)


def place_beyond_memory() -> list[str]:
    """What a planner says of few branches, and of many."""
    made = torch.Generator().manual_seed(5)
    prompt, few = _tokens(made, 500), star(made)[:5]
    many = [Rollout(torch.cat([prompt, _tokens(made, 20)])) for _ in range(40)]
    said = []
    for given in (few, [*few, *many]):
        planner = Planner(hf_shape(), block=BLOCK, memory_bytes=4_000_000)
        try:
            planner.place(share_prefixes(given, LEAST))
            said.append("")
        except ValueError as error:
            said.append(str(error))
        planner.close()
    return said


def hf_shape() -> Any:
    """Heads of a small model."""
    from distca.library import AttentionShape

    return AttentionShape(4, 2, 16, 4)
