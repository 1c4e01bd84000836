"""Two nano-batches and layers that are not ours."""

from __future__ import annotations

from typing import Any

import torch

from megatron_patches.model.ping_pong import run_layers_in_turn


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
    run_layers_in_turn(model)  # type: ignore[arg-type]
    ping, pong = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    # The backward pass of the half that came first is the last one.
    torch.cat([layer(ping), layer(pong)]).sum().backward()
    expected = torch.ones(8, 3).T @ torch.cat([ping, pong]).detach()
    torch.testing.assert_close(layer.main_grad, expected)
