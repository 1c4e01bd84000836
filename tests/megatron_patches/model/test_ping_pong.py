"""Two nano-batches and layers that are not ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distca.runtime import EventCursor
from distca.schedule.program import Event
from megatron_patches.model import core_attention, cuda_graphs, ping_pong
from megatron_patches.model.gpt import add_to_gradients_always
from megatron_patches.model.ping_pong import NanoBatchCoroutines
from megatron_patches.model.thread_state import ThreadState


class FusedGradient(torch.autograd.Function):
    """A product whose weight's gradient goes to `main_grad` by Transformer Engine's rule."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: LikeTransformerEngine, first: bool) -> Any:
        ctx.layer, ctx.first = layer, first
        ctx.save_for_backward(x)
        return x @ layer.weight.T

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        gradient = dout.T @ x
        if ctx.first:
            ctx.layer.main_grad.copy_(gradient)
        else:
            ctx.layer.main_grad += gradient
        return dout @ ctx.layer.weight, None, None


class LikeTransformerEngine(torch.nn.Module):
    """A linear layer as megatron-core wraps Transformer Engine's: the first call is special."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 3))
        self.main_grad = torch.zeros(3, 3)
        self.is_first_microbatch = True

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> Any:
        first, self.is_first_microbatch = self.is_first_microbatch, False
        return FusedGradient.apply(x, self, first)  # type: ignore[no-untyped-call]


def test_weight_gradients_of_both_halves_are_summed() -> None:
    layer, model = LikeTransformerEngine(), torch.nn.Module()
    model.decoder = layer
    add_to_gradients_always(model)  # type: ignore[arg-type]
    ping, pong = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    # The backward pass of the half that came first is the last one.
    torch.cat([layer(ping), layer(pong)]).sum().backward()
    expected = torch.ones(8, 3).T @ torch.cat([ping, pong]).detach()
    torch.testing.assert_close(layer.main_grad, expected)


@pytest.mark.parametrize("name", ["padding_mask", "inference_context", "attention_mask"])
def test_what_our_copies_of_megatrons_layers_do_not_know_is_refused(name: str) -> None:
    """None is what Megatron gives for what is not used."""
    params: Any = SimpleNamespace(nano_batches=("ping", "pong"), run=None)
    given = {"hidden_states": torch.ones(2), "packed_seq_params": params, name: "it"}
    none = {"inference_context": None, "padding_mask": None, "rotary_pos_cos": "known"}
    theirs = partial(TransformerBlock.forward, None)
    message = f"{name}, which --distca-ping-pong does not know: give --no-distca-ping-pong"
    with pytest.raises(ValueError, match=message):
        ping_pong._forward(None, (), theirs, **none | given)
    if name != "attention_mask":
        with pytest.raises(ValueError, match=f"{name}, which --distca-cuda-graphs does not know"):
            cuda_graphs._forward(None, None, None, **given)  # type: ignore[arg-type]


def test_what_megatron_does_not_know_either_has_no_remedy_by_a_flag() -> None:
    """Without our flag Megatron's own layers would refuse it."""
    params: Any = SimpleNamespace(nano_batches=("ping", "pong"), run=None)
    given = {"hidden_states": torch.ones(2), "packed_seq_params": params, "mystery": "it"}
    message = "^Megatron's layers get mystery, which they do not know: remove it$"
    with pytest.raises(ValueError, match=message):
        ping_pong._forward(None, (), partial(TransformerBlock.forward, None), **given)
    with pytest.raises(ValueError, match=message):
        cuda_graphs._forward(None, None, None, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind", [core_attention.DisaggregatedCoreAttention, core_attention.PackedCoreAttention]
)
def test_core_attention_refuses_what_it_does_not_compute(kind: Any) -> None:
    rows = torch.ones(2, 1, 4)
    # Megatron always gives these.
    none = {"attn_mask_type": "padding causal", "attention_bias": None, "packed_seq_params": None}
    for name in ("attention_bias", "mystery"):
        message = f"^core attention is given {name}, which DistCA does not compute: remove it$"
        with pytest.raises(ValueError, match=message):
            kind.forward(None, rows, rows, rows, None, **none | {name: rows})
    with pytest.raises(ValueError, match="was called without"):
        kind.forward(None, rows, rows, rows, None, **none)


def test_without_nano_batches_the_block_is_megatrons() -> None:
    seen: dict[str, Any] = {}
    given = {"padding_mask": "theirs", "packed_seq_params": None, "rotary_pos_emb": None}
    ping_pong._forward(None, (), lambda *_, **named: seen.update(named), torch.ones(2), **given)  # type: ignore
    assert seen == given


class CountsFunctions(TorchFunctionMode):
    """A mode that sees calls of torch's functions, and lets them be."""


class CountsOperators(TorchDispatchMode):
    """A mode that sees operators, and lets them be."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


NUMBER: ContextVar[int] = ContextVar("number")


class SetsNumber(AbstractContextManager[None]):
    """A value of a context variable, for a while."""

    def __enter__(self) -> None:
        self._token = NUMBER.set(NUMBER.get() + 1)

    def __exit__(self, *_: object) -> None:
        NUMBER.reset(self._token)


CONTEXTS = {
    "gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "casts of a GPU": lambda: torch.autocast("cuda", torch.float16, cache_enabled=False),
    "default device": lambda: torch.device("meta"),
    "functions": CountsFunctions,
    "operators": CountsOperators,
    "saved tensors": lambda: saved_tensors_hooks(lambda x: x, lambda x: x),
    "context variable": SetsNumber,
}


@pytest.mark.parametrize("first", [0, 1], ids=["ping", "pong"])
@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_what_one_half_enters_is_not_for_the_other(name: str, first: int) -> None:
    """One half waits inside the context; then both do, and the first to enter leaves first."""
    NUMBER.set(7)

    def state() -> tuple[ThreadState, int]:
        return ThreadState.present(), NUMBER.get()

    def wait(number: int) -> None:
        program.take_turn("forward", "dispatch", number)

    def enters(number: int, waits_before: int) -> None:
        for _ in range(waits_before):
            wait(number)
            assert state() == before
        with CONTEXTS[name]():
            inside = state()
            assert inside != before
            for _ in range(2):
                wait(number)
                assert state() == inside
        assert state() == before

    other = 1 - first
    order = [first, other, first, other, other]
    program = EventCursor([], tuple(Event("forward", "dispatch", number, 0) for number in order))
    before = state()
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        # What surrounds both is in force in both.
        before = state()
        halves = [lambda: enters(first, 0), lambda: enters(other, 1)]
        NanoBatchCoroutines(program).run(halves if first == 0 else halves[::-1])
        assert state() == before


class Recipe:
    """A recipe as Transformer Engine's: of the process, and put back by who leaves it.

    Attributes:
        present: name of the recipe in force.
        entered: names of recipes in the order in which they were entered.
    """

    def __init__(self) -> None:
        self.present = "none"
        self.entered: list[str] = []

    @contextmanager
    def context(self, name: str) -> Iterator[None]:
        assert self.present == "none", "calls of two layers overlap"
        before, self.present = self.present, name
        self.entered.append(name)
        try:
            yield
        finally:
            self.present = before


def test_a_recipe_of_the_process_is_left_while_the_other_half_runs() -> None:
    """Layers of both halves have recipes of their own, and one has none."""
    recipe = Recipe()
    program = EventCursor(
        [], tuple(Event("forward", "dispatch", number, 0) for number in (0, 1, 0, 1, 0, 1))
    )
    coroutines = NanoBatchCoroutines(program)

    def layers(number: int) -> None:
        for layer in range(3):
            name = f"layer {layer}"
            if layer == 1:
                program.take_turn("forward", "dispatch", number)
                assert recipe.present == "none"
                continue
            with coroutines.inside(lambda name=name: recipe.context(name)):
                program.take_turn("forward", "dispatch", number)
                assert recipe.present == name
            assert recipe.present == "none"

    coroutines.run([lambda: layers(0), lambda: layers(1)])
    # Both wait in their last layer for each other, and enter anew.
    assert recipe.entered.count("layer 0") == 2
    assert recipe.entered.count("layer 2") == 4
