"""CUDA graphs of what surrounds core attention in a layer: its tokens are always equally many.

Core attention changes with the plan and is never part of a graph. A layer has one piece before it
(norm, projection to queries, keys and values, rotary embedding) and one after it (projection,
residual, norm, MLP, residual), and each is replayed as one graph.

A graph works in fixed memory, and between a micro-batch's forward and backward pass others run:
the other nano-batch, and in a pipeline more micro-batches. So a piece has as many *instances* (a
forward graph, its backward graph, and the memory between them) as are under way at most; one is
captured when none is free. Who may still look into that memory, and when it may be written again:

- What an instance gives out is used, without a copy, by operations whose gradients come back
  before the instance's own backward pass, by autograd's order. After that pass nobody needs it, nor
  what it was given: the instance is free.
- Gradients are copied out, since autograd may keep one until others are added to it: that of a
  residual, or that of a weight, whose other nano-batch's gradient comes later. So all instances can
  use the same memory for them.
- Without gradients nothing says when an output is no longer used, so it is copied out.

Memory pools: what a forward graph saves for the backward pass must outlast the replays of any other
graph, in any order, so each has a pool to itself. Backward graphs, and all without gradients, share
one. They leave nothing there: they read and write elsewhere, and are replayed on one stream one
after the other, so their order does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.autograd.function import once_differentiable

from megatron_patches.model.core_attention import DocumentParams
from megatron_patches.model.unknown_arguments import refuse_unknown

Tensors = tuple[torch.Tensor, ...]


class GraphEngine(Protocol):
    """A maker of graphs of functions that always read and write the same tensors."""

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Runs a function until it has done everything that it does only at first."""

    def capture(
        self, function: Callable[[], Tensors], *, outlasts: bool
    ) -> tuple[Tensors, Callable[[], None]]:
        """Captures a function.

        Args:
            function: function that does the same whenever it is called.
            outlasts: whether what the function makes, autograd's saved tensors included, is needed
                after others were replayed; else nothing that it makes is needed once it has ended.

        Returns:
            Tensors without history, and a function that does the same again and leaves its results
            in those tensors, which hold nothing before.
        """


class CudaGraphEngine:
    """Graphs of the current device, by `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all pieces: libraries keep a workspace for each stream that they saw.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Runs a function three times on another stream, as `make_graphed_callables` does."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            for _ in range(3):
                function()
        torch.cuda.synchronize()

    def capture(
        self, function: Callable[[], Tensors], *, outlasts: bool
    ) -> tuple[Tensors, Callable[[], None]]:
        """Captures a function into a CUDA graph: see `GraphEngine`."""
        graph = torch.cuda.CUDAGraph()
        pool = None if outlasts else self._pool
        # Other threads call CUDA meanwhile: NCCL's watchdog, and the one that makes batches.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = function()
        return tuple(each.detach() for each in outputs), graph.replay


class SharedTensors:
    """Tensors that pass values into a graph right before a replay, and out of it right after.

    Graphs of the same shapes, such as those of all layers, share them.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[Any, ...], Tensors] = {}

    def like(self, purpose: str, tensors: Iterable[torch.Tensor]) -> Tensors:
        """Returns the tensors of these shapes and types that serve a purpose."""
        tensors = tuple(tensors)
        key = (purpose, *((each.shape, each.dtype) for each in tensors))
        if key not in self._tensors:
            self._tensors[key] = _empty_like(tensors)
        return self._tensors[key]


def _empty_like(tensors: Iterable[torch.Tensor]) -> Tensors:
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors)


@torch.no_grad()
def _copy(to: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    for mine, given in zip(to, tensors, strict=True):
        mine.copy_(given)


class _Piece(torch.nn.Module):
    """A function as a module, whose parameters can be replaced by other tensors."""

    def __init__(self, function: Callable[..., Tensors], modules: Sequence[Any]) -> None:
        super().__init__()
        self.forward = function
        self.parts = torch.nn.ModuleList(modules)


class GraphedPiece:
    """A function of tensors that is replayed as CUDA graphs.

    Every call with gradients must be followed by its backward pass, once, before its memory can
    serve another.

    Args:
        function: function from tensors to tensors, without collectives, random numbers, and waits
            for the device.
        modules: all modules whose parameters the function uses, which stay where they are in memory
            from the first call on.
        engine: maker of the graphs.
        shared: tensors that all pieces of an engine share.
    """

    def __init__(
        self,
        function: Callable[..., Tensors],
        modules: Sequence[torch.nn.Module],
        engine: GraphEngine,
        shared: SharedTensors,
    ) -> None:
        self._piece, self._engine, self._shared = _Piece(function, modules), engine, shared
        self._modules = list(self._piece.modules())
        self._weights: dict[str, torch.nn.Parameter] = {}
        self._aliases: dict[str, torch.Tensor] = {}
        self._free_instances: dict[tuple[Any, ...], list[_Instance]] = {}
        self._without_gradients: dict[
            tuple[Any, ...], tuple[Tensors, Tensors, Callable[[], None]]
        ] = {}

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Returns what the function returns."""
        for module in self._modules:
            # A replay calls no module, but must wait for weights that are still being gathered.
            for hook in module._forward_pre_hooks.values():
                hook(module, ())
        if not self._weights:
            self._weights = {n: p for n, p in self._piece.named_parameters() if p.requires_grad}
            self._aliases = {n: p.detach().requires_grad_() for n, p in self._weights.items()}
        for name, weight in self._weights.items():
            assert weight.data_ptr() == self._aliases[name].data_ptr(), f"{name} has moved"
        key = (
            self._piece.parts[0].training,
            *((each.shape, each.dtype, each.requires_grad) for each in inputs),
        )
        if not torch.is_grad_enabled():
            return self._call_without_gradients(key, inputs)
        first = key not in self._free_instances
        free = self._free_instances.setdefault(key, [])
        instance = free.pop() if free else self._capture(inputs, first)
        return _Replay.apply(  # type: ignore[no-any-return,no-untyped-call]
            instance, partial(free.append, instance), len(inputs), *inputs, *self._weights.values()
        )

    def _capture(self, inputs: Tensors, first: bool) -> _Instance:
        call = partial(torch.func.functional_call, self._piece, self._aliases)
        weights = tuple(self._aliases.values())
        return _Instance(call, inputs, weights, self._engine, self._shared, first)

    def _call_without_gradients(self, key: tuple[Any, ...], inputs: Tensors) -> Tensors:
        if key not in self._without_gradients:
            own = self._shared.like("inputs", inputs)
            _copy(own, inputs)
            call = torch.no_grad()(partial(self._piece, *own))
            self._engine.warm_up(call)
            outputs = self._shared.like("outputs", call())

            def write() -> Tensors:
                _copy(outputs, call())
                return ()

            self._without_gradients[key] = (
                own,
                outputs,
                self._engine.capture(write, outlasts=False)[1],
            )
        own, outputs, replay = self._without_gradients[key]
        _copy(own, inputs)
        replay()
        return tuple(each.clone() for each in outputs)


class _Instance:
    """A forward graph, its backward graph, and the memory between them.

    Args:
        call: function of the piece, which takes its inputs as a tuple.
        inputs: examples of the inputs, with the shapes and types of all to come.
        weights: weights of the piece as leaves of their own. Autograd takes a parameter's gradient
            to the stream on which the parameter was first used, which a capture must not touch.
        engine: maker of the graphs.
        shared: tensors that all instances share.
        first: whether no instance of these shapes was there before, so that the function must warm
            up.
    """

    def __init__(
        self,
        call: Callable[[Tensors], Tensors],
        inputs: Tensors,
        weights: Tensors,
        engine: GraphEngine,
        shared: SharedTensors,
        first: bool,
    ) -> None:
        self._inputs = _empty_like(inputs)
        for own, given in zip(self._inputs, inputs, strict=True):
            own.requires_grad_(given.requires_grad)
        _copy(self._inputs, inputs)
        wanted = [each for each in (*self._inputs, *weights) if each.requires_grad]
        outputs: Tensors = ()

        def forward() -> Tensors:
            nonlocal outputs
            with torch.enable_grad():
                outputs = call(self._inputs)
            return outputs

        def backward() -> Tensors:
            _copy(self._gradients, torch.autograd.grad(outputs, wanted, self._output_gradients))
            return ()

        def both() -> None:
            nonlocal outputs
            torch.autograd.grad(forward(), wanted, [torch.zeros_like(each) for each in outputs])
            # Dropped, since autograd's history refers to the stream on which they were made.
            outputs = ()

        if first:
            engine.warm_up(both)
        self._outputs, self._forward = engine.capture(forward, outlasts=True)
        self._output_gradients = shared.like("gradients of outputs", self._outputs)
        self._gradients = shared.like("gradients", wanted)
        _, self._backward = engine.capture(backward, outlasts=False)

    def forward(self, inputs: Tensors) -> Tensors:
        """Returns the outputs, in the instance's own memory."""
        _copy(self._inputs, inputs)
        self._forward()
        return tuple(each.detach() for each in self._outputs)

    def backward(self, output_gradients: Tensors) -> list[torch.Tensor | None]:
        """Returns gradients of the inputs, and then of the weights."""
        _copy(self._output_gradients, output_gradients)
        self._backward()
        gradients = (each.clone() for each in self._gradients)
        of_inputs = [next(gradients) if each.requires_grad else None for each in self._inputs]
        return [*of_inputs, *gradients]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, instance: _Instance, release: Callable[[], None], number: int, *given: Any
    ) -> Tensors:
        ctx.instance, ctx.release = instance, release
        return instance.forward(given[:number])

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        instance, ctx.instance = ctx.instance, None
        assert instance is not None, "a graph goes back once for each time that it goes there"
        found = instance.backward(gradients)
        ctx.release()
        return None, None, None, *found


def graph_layers(model: GPTModel, engine: GraphEngine) -> None:
    """Replays graphs in a GPT model's layers, around core attention."""
    shared = SharedTensors()
    for layer in model.decoder.layers:
        attention = layer.self_attention
        normed = [attention.q_layernorm, attention.k_layernorm]
        before = GraphedPiece(
            partial(_before, layer),
            [layer.input_layernorm, attention.linear_qkv, *filter(None, normed)],
            engine,
            shared,
        )
        after = GraphedPiece(
            partial(_after, layer),
            [attention.linear_proj, layer.pre_mlp_layernorm, layer.mlp],
            engine,
            shared,
        )
        layer.forward = partial(_forward, layer, before, after)


def _forward(
    layer: Any,
    before: GraphedPiece,
    after: GraphedPiece,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    rotary_pos_emb: torch.Tensor | None = None,
    packed_seq_params: DocumentParams | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Does what megatron-core's `TransformerLayer.forward` does, for layers that we train.

    Raises:
        ValueError: the layer is given something that would be dropped.
    """
    theirs = TransformerLayer._forward_attention
    refuse_unknown(others, "--distca-cuda-graphs", "remove that flag", theirs)
    attention = layer.self_attention
    unrotated = layer.config.no_rope_freq and layer.config.no_rope_freq[layer.layer_number - 1]
    angles = () if rotary_pos_emb is None or unrotated else (rotary_pos_emb,)
    query, key, value = before(hidden_states, *angles)
    out = attention.core_attention(
        query, key, value, attention_mask, packed_seq_params=packed_seq_params
    )
    (hidden,) = after(out[:, None], hidden_states)
    return hidden, None


def _before(layer: Any, hidden: torch.Tensor, angles: torch.Tensor | None = None) -> Tensors:
    """Makes queries, keys and values `[tokens, heads, head_dim]` of `[tokens, 1, hidden size]`."""
    attention = layer.self_attention
    normed = layer.input_layernorm(hidden)
    query, key, value = attention.get_query_key_value_tensors(normed, None)
    if angles is not None:
        # Applied to one sequence, whose length need not be read off the device, token by token.
        query, key = (apply_rotary_pos_emb(each, angles, layer.config) for each in (query, key))
    return tuple(each.squeeze(1).contiguous() for each in (query, key, value))


def _after(layer: Any, out: torch.Tensor, residual: torch.Tensor) -> Tensors:
    """Makes the layer's output of core attention's `[tokens, 1, heads * head_dim]`."""
    projected = layer.self_attention.linear_proj(out)
    add = layer.self_attn_bda(layer.training, layer.config.bias_dropout_fusion)
    with layer.bias_dropout_add_exec_handler():
        hidden = add(projected, residual, layer.hidden_dropout)
    return (layer._forward_mlp(hidden),)
