"""Two nano-batches, ping and pong, through the layers: each communicates while the other computes.

Paper, Section 4.1 and Figure 7. The layers are Megatron's own; each half runs them as a coroutine
that core attention suspends when it has started an exchange. So the order of events on every rank
is, for each layer:

    ping: (post-attention of the layer before,) pre-attention; start to send its inputs
    pong: the same
    ping: wait for inputs, run kernels, start to return outputs        pong's inputs are under way
    pong: the same                                                     ping's outputs are under way
    ping: wait for outputs, ...                                        pong's outputs are under way

Where all queries are computed at home, in a model without a pipeline, a half goes on at once when
its kernels have run (`distca.runtime.fill_slots`):

    ping: wait for inputs, run kernels; post-attention, pre-attention of the next layer; start to
        send its inputs                                                pong's inputs are under way
    pong: the same                                                     ping's inputs are under way

Going back that is: wait for the keys' gradients, linear layers, kernels; start to return gradients,
and to send the keys of the layer before, which are known, ahead. Those of the last layer travel
while the loss is computed.

Post-attention of a layer and pre-attention of the next are one piece: nothing waits between them.
A piece's tensor-parallel collectives are part of it, on a process group of their own, so they run
beside the other nano-batch's exchange.
Autograd goes back through all of it in exactly the opposite order, since it takes the operation
that was recorded last among those that are ready; both halves' records are of one thread. Ranks
that only serve follow the first order (`serving.serve_tick`); in the second there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import make_viewless_tensor

from megatron_patches.attention import DocumentParams
from megatron_patches.rounds import recomputed_groups


class Turns:
    """Functions that are run in turn, each until it pauses."""

    def __init__(self) -> None:
        # Imported here: only runs with --distca-ping-pong need it.
        import greenlet

        self._greenlet = greenlet
        self._main: Any = None

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs all functions to their ends, and returns what they return."""
        self._main = self._greenlet.getcurrent()
        results: list[Any] = [None] * len(functions)

        def keep(number: int, function: Callable[[], Any]) -> None:
            results[number] = function()

        with_gradients = torch.is_grad_enabled()
        left = [
            self._greenlet.greenlet(partial(keep, number, function))
            for number, function in enumerate(functions)
        ]
        while left:
            for each in left:
                each.switch()
                torch.set_grad_enabled(with_gradients)
            left = [each for each in left if not each.dead]
        return results

    def pause(self) -> None:
        """Lets the others go on; called by one of the functions."""
        # The only state of torch that belongs to the thread and differs between halves.
        with_gradients = torch.is_grad_enabled()
        self._main.switch()
        torch.set_grad_enabled(with_gradients)


def run_layers_in_turn(model: GPTModel) -> None:
    """Makes a GPT model's layers run a micro-batch's halves in turn, where it has halves."""
    block = model.decoder
    block.forward = partial(_forward, block, block.forward)
    for module in model.modules():
        # In their first call Transformer Engine's layers don't add fused weight gradients to
        # `main_grad`, they replace it. That would be ping's, whose backward pass comes last, and
        # pong's would be lost. `main_grad` starts as zeros in any case.
        if hasattr(module, "is_first_microbatch"):
            module.is_first_microbatch = False


def _forward(
    block: Any,
    plain: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor | None,
    attention_mask: torch.Tensor | None = None,
    *,
    rotary_pos_emb: torch.Tensor | None = None,
    packed_seq_params: DocumentParams | None = None,
    **others: Any,
) -> torch.Tensor:
    """What megatron-core's `TransformerBlock.forward` does, for two halves."""
    if packed_seq_params is None or packed_seq_params.halves is None:
        return plain(
            hidden_states,
            attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **others,
        )
    config, halves = block.config, packed_seq_params.halves
    shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
    hidden = hidden_states if block.pre_process else block.input_tensor
    assert hidden is not None
    # Each half is one sequence to rotary embedding.
    sizes = [int(half.max_seqlen_q) for half in halves]
    parts = torch.split(hidden, [size // shards for size in sizes])
    angles = [None, None] if rotary_pos_emb is None else _of_halves(rotary_pos_emb, sizes, shards)

    def run(
        layers: Sequence[Any], goes_back_next: bool, *hidden_of_halves: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        turns = Turns()
        through = [
            partial(_through, layers, part, half, angle, others)
            for part, half, angle in zip(hidden_of_halves, halves, angles, strict=True)
        ]
        for half in halves:
            half.pause = turns.pause
        result = tuple(turns.run(through))
        if goes_back_next:
            for half in reversed(halves):
                assert half.slot is not None
                half.slot.send_ahead()
        return result

    random = tensor_parallel.get_cuda_rng_tracker().fork() if shards > 1 else nullcontext()
    with random:
        for group, recomputed in recomputed_groups(len(block.layers), config):
            # The next pass is the backward pass of these layers.
            goes_back_next = recomputed or group[-1] == len(block.layers) - 1
            run_group = partial(run, [block.layers[number] for number in group], goes_back_next)
            if recomputed and block.training:
                parts = tensor_parallel.checkpoint(
                    run_group, config.distribute_saved_activations, *parts
                )
            else:
                parts = run_group(*parts)
    result = torch.cat(parts)
    if block.final_layernorm is not None:
        result = block.final_layernorm(result)
    return make_viewless_tensor(inp=result, requires_grad=True, keep_graph=True)


def _through(
    layers: Sequence[Any],
    hidden: torch.Tensor,
    params: DocumentParams,
    angles: torch.Tensor | None,
    others: dict[str, Any],
) -> torch.Tensor:
    """One half through some layers."""
    passed = {
        name: value
        for name, value in others.items()
        if name.startswith("rotary_pos") or name in ("attention_bias", "sequence_len_offset")
    }
    for layer in layers:
        hidden, _ = layer(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=angles,
            packed_seq_params=params,
            **passed,
        )
    return hidden


def _of_halves(rows: torch.Tensor, sizes: list[int], shards: int) -> list[torch.Tensor]:
    """Rows in the order of `batch.nano_order`, of each half."""
    pieces = torch.split(rows, [size // shards for size in sizes] * shards)
    return [torch.cat(pieces[number :: len(sizes)]) for number in range(len(sizes))]
