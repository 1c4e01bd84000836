"""Two nano-batches, ping and pong, through the layers: each communicates while the other computes.

Paper, Section 4.1 and Figure 7. The layers are Megatron's own; each nano-batch runs them as a
coroutine, which core attention suspends until the program of the tick (`distca.schedule.program`)
has its turn.

Post-attention of a layer and pre-attention of the next are one piece: nothing waits between them.
Tensor-parallel collectives are part of a piece, on a process group of their own, so they run beside
the other nano-batch's exchange. Autograd goes back through all pieces in exactly the opposite
order, since it takes the operation that was recorded last among those that are ready; both
nano-batches are recorded by one thread.

Around each layer Megatron enters Transformer Engine's recipe (fp8), in a state that a process has
once. A nano-batch leaves it where it gives way, and enters it anew when it goes on; so contexts of
two layers never overlap, and each calls a module once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import make_viewless_tensor

from distca.runtime import EventCursor
from distca.schedule.program import LayerGroup, layer_groups
from megatron_patches.model.core_attention import DocumentParams
from megatron_patches.model.layers import prediction_layers
from megatron_patches.model.rotary import split_rows
from megatron_patches.model.thread_state import ThreadState
from megatron_patches.model.unknown_arguments import refuse_unknown

# What Megatron's block passes on to its layers as it is.
_PASSED_ON = (
    "attention_bias",
    "rotary_pos_cos",
    "rotary_pos_sin",
    "rotary_pos_cos_sin",
    "sequence_len_offset",
)


class NanoBatchCoroutines:
    """Coroutines of nano-batches, each of which runs until the next event is the other's.

    Args:
        cursor: order of events, whose next event says which nano-batch goes on.
    """

    def __init__(self, cursor: EventCursor) -> None:
        # Imported here: only runs with --distca-ping-pong need it.
        import greenlet

        self._greenlet, self._cursor = greenlet, cursor
        # Of each coroutine: how its context is entered, and the context that it is in.
        self._contexts: dict[Any, tuple[Callable[[], AbstractContextManager[Any]], ExitStack]] = {}

    @contextmanager
    def inside(self, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Surrounds a part of the coroutine by a context of the process, left while others run.

        Args:
            context: maker of the context, called wherever it is entered.
        """
        coroutine = self._greenlet.getcurrent()
        with ExitStack() as held:
            held.enter_context(context())
            self._contexts[coroutine] = context, held
            try:
                yield
            finally:
                del self._contexts[coroutine]

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs the function of each nano-batch to its end, and returns what they return."""
        main, outside = self._greenlet.getcurrent(), ThreadState.present()
        results: list[Any] = [None] * len(functions)
        nothing = nullcontext, ExitStack()

        def keep(number: int, function: Callable[[], Any]) -> None:
            outside.restore()
            results[number] = function()

        def give_way() -> None:
            context, held = self._contexts.get(self._greenlet.getcurrent(), nothing)
            held.close()
            of_this_one = ThreadState.present()
            main.switch()
            of_this_one.restore()
            held.enter_context(context())

        coroutines = [
            self._greenlet.greenlet(partial(keep, number, function))
            for number, function in enumerate(functions)
        ]
        for each in coroutines:
            # Else it would begin without any: torch's settings for a while are context variables.
            each.gr_context = copy_context()
        self._cursor.give_way = give_way
        try:
            while not all(each.dead for each in coroutines):
                event = self._cursor.next_event
                assert event is not None, "layers go on after the program's end"
                coroutines[event.nano_batch].switch()
        finally:
            self._cursor.give_way = None
            outside.restore()
        return results


def run_layers_in_turn(model: GPTModel) -> None:
    """Makes a GPT model's layers run a micro-batch's nano-batches in turn, where it has two."""
    block, config = model.decoder, model.config
    groups = layer_groups(
        len(block.layers),
        config.recompute_granularity,
        config.recompute_method,
        config.recompute_num_layers,
    )
    block.forward = partial(_forward, block, groups, block.forward)
    for layer in prediction_layers(model):
        layer.forward = partial(_forward_alone, layer, layer.forward)


def _forward(
    block: Any,
    groups: Sequence[LayerGroup],
    plain: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor | None,
    attention_mask: torch.Tensor | None = None,
    *,
    rotary_pos_emb: torch.Tensor | None = None,
    packed_seq_params: DocumentParams | None = None,
    **others: Any,
) -> torch.Tensor:
    """Does what megatron-core's `TransformerBlock.forward` does, for two nano-batches.

    Raises:
        ValueError: the block is given something that would be dropped.
    """
    if packed_seq_params is None or packed_seq_params.nano_batches is None:
        return plain(
            hidden_states,
            attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **others,
        )
    refuse_unknown(
        {"attention_mask": attention_mask, **others},
        "--distca-ping-pong",
        "give --no-distca-ping-pong",
        plain,
        _PASSED_ON,
    )
    config, shards = block.config, _sequence_shards(block.config)
    hidden = hidden_states if block.pre_process else block.input_tensor
    assert hidden is not None
    parts, run = _in_turn(hidden, packed_seq_params, rotary_pos_emb, shards, others)
    random = tensor_parallel.get_cuda_rng_tracker().fork() if shards > 1 else nullcontext()
    with random:
        for group in groups:
            run_group = partial(run, [block.layers[number] for number in group.layers])
            if group.recomputed and block.training:
                parts = tensor_parallel.checkpoint(
                    run_group, config.distribute_saved_activations, *parts
                )
            else:
                parts = run_group(*parts)
    result = torch.cat(tuple(parts))
    if block.final_layernorm is not None:
        result = block.final_layernorm(result)
    return make_viewless_tensor(inp=result, requires_grad=True, keep_graph=True)


def _forward_alone(
    layer: Any,
    plain: Callable[..., Any],
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    rotary_pos_emb: torch.Tensor | None = None,
    packed_seq_params: DocumentParams | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Does what megatron-core's `TransformerLayer.forward` does, for two nano-batches, of a layer
    that no block of several runs.

    Raises:
        ValueError: the layer is given something that would be dropped.
    """
    if packed_seq_params is None or packed_seq_params.nano_batches is None:
        return plain(  # type: ignore[no-any-return]
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **others,
        )
    refuse_unknown(
        {"attention_mask": attention_mask, **others},
        "--distca-ping-pong",
        "give --no-distca-ping-pong",
        plain,
        _PASSED_ON,
    )
    shards = _sequence_shards(layer.config)
    parts, run = _in_turn(hidden_states, packed_seq_params, rotary_pos_emb, shards, others)
    return torch.cat(run([layer], *parts)), None


def _sequence_shards(config: Any) -> int:
    return config.tensor_model_parallel_size if config.sequence_parallel else 1


def _in_turn(
    hidden: torch.Tensor,
    params: DocumentParams,
    rotary_pos_emb: torch.Tensor | None,
    shards: int,
    others: dict[str, Any],
) -> tuple[Sequence[torch.Tensor], Callable[..., tuple[torch.Tensor, ...]]]:
    """Divides a micro-batch into its nano-batches.

    Args:
        hidden: rows of the micro-batch that this rank has.
        params: description of the micro-batch.
        rotary_pos_emb: angles of its rows, or None.
        shards: tensor-parallel ranks that divide the rows among them.
        others: further arguments; each layer is given some of them.

    Returns:
        The rows of each, and a function `(layers, *rows)` that runs some layers on all of them in
        turn, and returns their rows.
    """
    nano_batches = params.nano_batches
    assert nano_batches is not None
    assert params.run is not None
    passed = {name: value for name, value in others.items() if name in _PASSED_ON}
    sizes = [each.rows for each in nano_batches]
    parts = torch.split(hidden, [size // shards for size in sizes])
    angles: Sequence[torch.Tensor | None] = [None, None]
    if rotary_pos_emb is not None:
        angles = split_rows(rotary_pos_emb, sizes, shards)
    cursor = params.run.cursor

    def run(layers: Sequence[Any], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        coroutines = NanoBatchCoroutines(cursor)
        functions = [
            partial(_run_layers, coroutines, layers, part, nano_batch, angle, passed)
            for part, nano_batch, angle in zip(inputs, nano_batches, angles, strict=True)
        ]
        result = tuple(coroutines.run(functions))
        cursor.prefetch()
        return result

    return parts, run


def _run_layers(
    coroutines: NanoBatchCoroutines,
    layers: Sequence[Any],
    hidden: torch.Tensor,
    params: DocumentParams,
    angles: torch.Tensor | None,
    passed: dict[str, Any],
) -> torch.Tensor:
    """Runs one nano-batch through some layers; each also gets the arguments `passed`."""
    for layer in layers:
        with coroutines.inside(partial(get_fp8_context, layer.config, layer.layer_number - 1)):
            hidden, _ = layer(
                hidden_states=hidden,
                attention_mask=None,
                rotary_pos_emb=angles,
                packed_seq_params=params,
                **passed,
            )
    return hidden
