"""Training loops of one's own on live ranks, and the same in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distca.cost.volume import plan_bytes
from distca.library import (
    AttentionShape,
    Batch,
    Document,
    Mask,
    Planner,
    core_attention,
    share_documents,
)
from distca.library import hugging_face as hf

VOCABULARY = 199
LENGTHS = ((700, 40, 130, 33, 260, 17, 100), (64, 512, 300, 64, 9, 331), (1200, 16, 32, 32))
BLOCK = 16


def documents(step: int, lengths: Sequence[int] | None = None) -> list[torch.Tensor]:
    """The documents of a step, int64 `[tokens]` each."""
    made = torch.Generator().manual_seed(step)
    chosen = LENGTHS[step % len(LENGTHS)] if lengths is None else lengths
    return [torch.randint(0, VOCABULARY, (n,), generator=made) for n in chosen]


def counted(planner: Planner, batches: Sequence[Batch], layers: int, forwards: int = 1) -> bool:
    """Whether a rank sent what the plans say in so many layers, with their first mask."""
    planned: Counter[str] = Counter()
    for batch in batches:
        for phase, each in plan_bytes(batch.plans[0], planner.shape).messages.items():
            passes = 1 if phase.endswith("backward") else forwards
            planned[phase] += layers * passes * int(each.sent()[dist.get_rank()])
    return +planned == +Counter(planner.bytes_sent)


@dataclass(frozen=True)
class Attended:
    """Core attention of all tokens, in the order of the documents, and gradients."""

    out: torch.Tensor
    gradients: tuple[torch.Tensor, ...]
    of_sink: torch.Tensor | None
    bytes_counted: bool
    tokens: int


def inputs_of_attention(
    total: int, shape: AttentionShape, sink: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values and the output's gradient of all tokens, and the sink of each head."""
    made = torch.Generator().manual_seed(total)
    heads = (shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim)
    sizes = *heads, (shape.kv_heads, shape.value_dim), (shape.heads, shape.value_dim)
    tensors = [torch.randn((total, *each), generator=made, dtype=torch.float64) for each in sizes]
    tensors.append(torch.randn(shape.heads, generator=made, dtype=torch.float64))
    return tuple(each.to(dtype) for each in tensors)


def attend(
    lengths: Sequence[int],
    shape: AttentionShape,
    mask: Mask,
    scheduler: str,
    sink: bool,
    softcap: float | None,
    dtype: torch.dtype,
    groups: int = 1,
) -> Attended:
    """Core attention of documents on this rank; what it returns is of all tokens.

    With several groups each does the same by itself.
    """
    group = None
    if groups > 1:
        group, _ = dist.new_subgroups(dist.get_world_size() // groups)
    rank = dist.get_rank(group)
    masks = [Mask()] if mask == Mask() else [Mask(), mask]
    planner = Planner(shape, group, masks=masks, scheduler=scheduler, softcap=softcap, block=BLOCK)
    batch = planner.place(documents(0, lengths))
    *rows, sinks = inputs_of_attention(sum(lengths), shape, sink, dtype)
    mine = batch.plans[0].placement.of_rank(rank)
    before = np.cumsum([0, *lengths])
    index = [
        torch.arange(before[document] + start, before[document] + end)
        for document, start, end in zip(mine.document, mine.start, mine.end, strict=True)
    ]
    here = torch.cat([torch.zeros(0, dtype=torch.int64), *index])
    q, k, v, dout = (each[here] for each in rows)
    sink_H = sinks.float().requires_grad_() if sink else None
    for each in (q, k, v):
        each.requires_grad_()
    out = core_attention(q, k, v, batch, mask=mask, sink_H=sink_H)
    out.backward(dout)
    if sink_H is not None:
        dist.all_reduce(sink_H.grad, group=group)
    gathered = [torch.cat(batch.gather(each)) for each in (out, q.grad, k.grad, v.grad)]
    of_mask = batch.plans[masks.index(mask)]
    planned = plan_bytes(of_mask, shape).messages
    sent = {phase: int(each.sent()[rank]) for phase, each in planned.items()}
    found = Attended(
        gathered[0],
        tuple(gathered[1:]),
        None if sink_H is None else sink_H.grad,
        +Counter(sent) == +Counter(planner.bytes_sent),
        len(here),
    )
    planner.close()
    return found


def attend_alone(
    lengths: Sequence[int],
    shape: AttentionShape,
    mask: Mask,
    sink: bool,
    softcap: float | None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor | None]:
    """The same by dense attention in float64."""
    *rows, sinks = inputs_of_attention(sum(lengths), shape, sink, torch.float64)
    q, k, v, dout = rows
    sinks.requires_grad_()
    for each in (q, k, v):
        each.requires_grad_()
    outs, first = [], 0
    for tokens in lengths:
        of = slice(first, first + tokens)
        first += tokens
        group = shape.heads // shape.kv_heads
        keys, values = (each[of].repeat_interleave(group, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[of], keys) * shape.head_dim**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        positions = torch.arange(tokens)
        seen = positions <= positions[:, None]
        if mask.window_left is not None:
            seen &= positions >= positions[:, None] - mask.window_left
        scores = scores.masked_fill(~seen, -torch.inf)
        if sink:
            more = sinks[:, None, None].expand(-1, tokens, 1)
            scores = torch.cat([scores, more], -1)
        weights = scores.softmax(-1)[..., :tokens]
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
    out = torch.cat(outs)
    out.backward(dout)
    gradients = q.grad, k.grad, v.grad
    assert all(each is not None for each in gradients)
    return out.detach(), gradients, sinks.grad if sink else None  # type: ignore[return-value]


def compile_a_layer(lengths: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and gradients of a layer, eager and compiled as one graph."""
    planner = Planner(AttentionShape(2, 1, 8, 4), block=BLOCK)
    batch = planner.place(documents(0, lengths))
    torch.manual_seed(dist.get_rank())
    hidden = torch.randn(len(batch.tokens), 32)
    weight = torch.randn(32, 32, requires_grad=True)

    def layer(rows: torch.Tensor, weight: torch.Tensor, handle: int) -> torch.Tensor:
        mixed = (rows @ weight).unflatten(1, (4, 8))
        q, k, v = mixed.split([2, 1, 1], 1)
        return core_attention(q, k, v, handle).sin()

    found = []
    torch._dynamo.reset()
    for way in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        weight.grad = None
        out = way(hidden, weight, batch.handle)
        out.square().sum().backward()
        assert weight.grad is not None
        found.append([out.detach(), weight.grad])
    planner.close()
    return found[0], found[1]


def refuse(names: Sequence[str]) -> dict[str, str]:
    """What is said of mistakes, by their names."""
    shape = AttentionShape(4, 2, 16, 4)
    planner = Planner(shape, block=BLOCK, max_live_batches=1)
    batch = planner.place(documents(0, (40, 30)))
    rows = len(batch.tokens)
    tokens = torch.arange(5)
    q, k = torch.zeros(rows, 4, 16), torch.zeros(rows, 2, 16)
    closed = Planner(shape, block=BLOCK)
    of_closed = closed.place(documents(0, (40, 30)))
    closed.close()
    closed_again = Planner(shape, block=BLOCK)
    of_three = replace(planner.collate, ranks=3)([tokens])
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    module, whole = torch.nn.Identity(), (q.transpose(0, 1)[None], *[k.transpose(0, 1)[None]] * 2)
    handle = {"distca": batch.handle}
    mistakes: dict[str, Callable[[], object]] = {
        "rows": lambda: core_attention(q[1:], k, k, batch),
        "heads": lambda: core_attention(q, q, k, batch),
        "dtype": lambda: core_attention(q, k, k.double(), batch),
        "integers": lambda: core_attention(q.int(), k.int(), k.int(), batch),
        "bytes": lambda: Planner(AttentionShape(4, 2, 16, 8)),
        "sink": lambda: core_attention(q, k, k, batch, sink_H=torch.zeros(3)),
        "list": lambda: planner.place([[1, 2]]),  # type: ignore[list-item]
        "place after close": lambda: closed.place(documents(0, (40, 30))),
        "rotary": lambda: hf.planner_arguments(config("llama", **dynamic), torch.float32),
        "encoder": lambda: hf.planner_arguments(config("t5"), torch.float32),
        "latents": lambda: hf.planner_arguments(config("deepseek_v3"), torch.float32),
        "chunks": lambda: hf.planner_arguments(config("llama4_text"), torch.float32),
        "mask": lambda: core_attention(q, k, k, batch, mask=Mask(window_left=5)),
        "closed": lambda: core_attention(q, k, k, of_closed),
        "plans": lambda: planner.place(of_three),
        "scheduler": lambda: Planner(shape, scheduler="tile"),
        "masks": lambda: Planner(shape, masks=[Mask(), Mask()]),
        "softcap": lambda: Planner(shape, softcap=-1.0),
        "none": lambda: planner.place([]),
        "empty": lambda: planner.place([tokens[:0]]),
        "targets": lambda: Document(tokens, tokens[:4]),
        "labels": lambda: Document(tokens, tokens),
        "other documents": lambda: closed_again.place(documents(dist.get_rank(), (40, 30))),
        "own documents": lambda: share_documents([tokens[: 5 * dist.get_rank()]]),
        "floats": lambda: Document(tokens.float()),
        "values": lambda: batch.gather(torch.zeros(3)),
        "no batch": lambda: hf._attend(module, *whole, None),
        "padding": lambda: hf._attend(module, *whole, torch.ones(1), **handle),
        "dropout": lambda: hf._attend(module, *whole, None, dropout=0.1, **handle),
        "not causal": lambda: hf._attend(module, *whole, None, is_causal=False, **handle),
        "other softcap": lambda: hf._attend(module, *whole, None, softcap=30.0, **handle),
    }
    found = {name: _message(mistake) for name, mistake in mistakes.items()}
    planner.place(documents(1, (40, 30)))
    found["forgotten"] = _message(lambda: core_attention(q, k, k, batch))
    planner.close()
    return {name: found[name] for name in names}


def config(family: str, **values: Any) -> Any:
    """Makes a configuration of transformers."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **values)


def _message(mistake: Callable[[], object]) -> str:
    try:
        mistake()
    except ValueError as error:
        return str(error)
    return "no error"


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 100},
    "gemma2": {"sliding_window": 50, "query_pre_attn_scalar": 16},
    "gpt_oss": {"sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    # Its attention does not hand the window of its second layer on.
    "qwen2_moe": {
        **{"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "shared_expert_intermediate_size": 32,
    },
    "gpt2": {
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        **{"num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2},
    },
}
"""Small models by their types, and what they have beside `SIZES`."""


def make_model(family: str, implementation: str) -> Any:
    """Makes a small model, the same on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    config.attention_dropout = 0.0
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


@dataclass
class Steps:
    """Losses and gradients of steps, and what was seen on the way."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    bytes_counted: bool = False


def step_alone(model: Any, batches: Sequence[Sequence[Document]], steps: Steps) -> None:
    """A step of plain gradient descent in one process, document by document."""
    count = sum(int((d.next_tokens != -100).sum()) for each in batches for d in each)
    model.zero_grad()
    total = 0.0
    for document in (document for each in batches for document in each):
        logits = model(input_ids=document.tokens[None]).logits[0]
        loss = (
            torch.nn.functional.cross_entropy(logits, document.next_tokens, reduction="sum") / count
        )
        loss.backward()
        total += loss.item()
    steps.losses.append(total)
    _descend(model, steps)


def _descend(model: Any, steps: Steps) -> None:
    found = {name: each.grad.clone() for name, each in model.named_parameters()}
    steps.gradients.append(found)
    with torch.no_grad():
        for each in model.parameters():
            each -= 0.5 * each.grad


def batches_of(step: int, accumulated: int, labelled: bool) -> list[list[Document]]:
    """The micro-batches of a step; with `labelled` the first half of each document is a prompt."""
    found = [[Document(each) for each in documents(step + n)] for n in range(accumulated)]
    if labelled:
        for each in found:
            for number, document in enumerate(each):
                targets = document.next_tokens.clone()
                targets[: len(targets) // 2] = -100
                each[number] = Document(document.tokens, targets)
    return found


def train_alone(family: str, accumulated: int = 1, labelled: bool = False) -> Steps:
    """Three steps in one process."""
    model, steps = make_model(family, "eager"), Steps()
    for step in range(3):
        step_alone(model, batches_of(step, accumulated, labelled), steps)
    return steps


def train_together(
    family: str,
    scheduler: str = "tiles",
    accumulated: int = 1,
    labelled: bool = False,
    checkpointing: bool = False,
    compiled: bool = False,
    own_documents: bool = False,
) -> Steps:
    """The same steps on the ranks that share each micro-batch."""
    hf.register()
    model, steps = make_model(family, hf.IMPLEMENTATION), Steps()
    model.train()
    heads = hf.planner_arguments(model.config, torch.float32)
    planner = Planner(**heads, scheduler=scheduler, block=BLOCK)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    call: Callable[..., Any] = model
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    rank, world = dist.get_rank(), dist.get_world_size()
    placed: list[Batch] = []
    for step in range(3):
        model.zero_grad()
        micro_batches = batches_of(step, accumulated, labelled)
        batches = []
        for each in micro_batches:
            given: Any = each
            if own_documents:
                share = -(-len(each) // world)
                given = share_documents(each[rank * share : (rank + 1) * share])
            batches.append(planner.place(planner.collate(given)))
        placed += batches
        count = sum(batch.num_targets for batch in batches)
        # All forward passes come first, as in a pipeline.
        inputs = [hf.inputs_of(batch) | {"num_items_in_batch": count} for batch in batches]
        losses = [call(**each).loss for each in inputs]
        total = sum(losses[1:], losses[0])
        total.backward()
        steps.tokens += [len(batch.tokens) for batch in batches]
        loss = total.detach().clone()
        dist.all_reduce(loss)
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        steps.losses.append(float(loss))
        _descend(model, steps)
    layers = model.config.num_hidden_layers
    steps.bytes_counted = counted(planner, placed, layers, 2 if checkpointing else 1)
    planner.close()
    return steps


def losses_by_dtype() -> dict[torch.dtype, tuple[float, torch.Tensor]]:
    """A micro-batch's loss and gradient of a weight in float32, and under autocast."""
    hf.register()
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model("llama", hf.IMPLEMENTATION)
        planner = Planner(**hf.planner_arguments(model.config, dtype), block=BLOCK)
        batch = planner.place(documents(0))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(**hf.inputs_of(batch)).loss
        loss.backward()
        total, gradient = loss.detach().clone(), model.model.layers[0].self_attn.q_proj.weight.grad
        for each in (total, gradient):
            dist.all_reduce(each)
        found[dtype] = float(total), gradient
        planner.close()
    return found
