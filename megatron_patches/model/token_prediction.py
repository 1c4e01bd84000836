"""Multi-token prediction: layers that predict tokens further on, over tokens of other ranks.

In layer `k` a token's hidden state meets the embedding of the token `k` places on, and predicts the
one behind that. Megatron-LM shifts the rows that a rank has; here the next rows of a document may
be another rank's, so a micro-batch brings the shifted columns along (`NextTokens`).

Like the loss of the next token, that of each layer is a mean over the targets of the global batch.
Megatron-LM averages over those of a micro-batch on a rank, and so weighs them by where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer import multi_token_prediction as theirs
from megatron.core.utils import make_viewless_tensor

from megatron_patches.model.core_attention import DisaggregatedCoreAttention
from megatron_patches.model.next_tokens import NextTokens


def predict_over_ranks(model: GPTModel) -> None:
    """Makes the layers of multi-token prediction take the columns that a micro-batch brings.

    Their core attention is numbered behind the model's other layers, where Megatron-LM numbers the
    layers of multi-token prediction from 1: keys are lent by the number of a layer.
    """
    block = getattr(model, "mtp", None)
    for layer in [] if block is None else block.layers:
        layer._get_embeddings = partial(_get_embeddings, layer)
        attention = layer.mtp_model_layer.self_attention.core_attention
        assert isinstance(attention, DisaggregatedCoreAttention)
        attention.layer_number += model.config.num_layers


def _get_embeddings(
    layer: Any,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    embedding: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    packed_seq_params: Any,
    padding_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Does what megatron-core's method does, but for the shift of rows."""
    following: NextTokens = packed_seq_params.next_tokens
    depth = following.depth_after(input_ids)
    tokens, positions = following.tokens[depth], following.position_ids[depth]
    decoder_input = embedding(input_ids=tokens, position_ids=positions)
    if layer.config.mtp_detach_heads:
        decoder_input = decoder_input.detach()
    hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
    if not hidden_states.requires_grad:
        # Recomputation needs an input that has a gradient.
        hidden_states.requires_grad_(True)
    return tokens, positions, padding_mask, decoder_input, hidden_states


def loss_over_global_batch(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Makes the replacement of megatron-core's `process_mtp_loss`.

    Args:
        original: the function, which goes on with micro-batches that bring no columns.
    """

    def process_mtp_loss(
        hidden_states: torch.Tensor, *, packed_seq_params: Any = None, **given: Any
    ) -> torch.Tensor:
        following: NextTokens | None = getattr(packed_seq_params, "next_tokens", None)
        if following is None:
            return original(hidden_states, packed_seq_params=packed_seq_params, **given)
        return _with_losses(hidden_states, following, **given)

    return process_mtp_loss


def _with_losses(
    hidden_states: torch.Tensor,
    following: NextTokens,
    *,
    output_layer: Any,
    output_weight: torch.Tensor | None,
    runtime_gather_output: bool | None,
    is_training: bool,
    compute_language_model_loss: Callable[..., torch.Tensor],
    config: Any,
    tp_group: Any,
    scale_logits_fn: Callable[[torch.Tensor], torch.Tensor] | None,
    **unused: Any,
) -> torch.Tensor:
    """Adds the losses of all layers to the graph of the model's hidden states, and returns these.

    Args:
        hidden_states: those of the model, then of each layer, one after the other.
        following: columns of the micro-batch.
        unused: labels and loss mask of the next token, which are not those of the layers.
        others: as for megatron-core's `process_mtp_loss`.
    """
    hidden, *of_layers = torch.chunk(hidden_states, 1 + config.mtp_num_layers, dim=0)
    if config.mtp_detach_heads:
        weight = output_layer.weight if output_weight is None else output_weight
        output_weight = weight.detach()
    own, *of_depths = following.all_targets
    for depth, states in enumerate(of_layers):
        logits, _ = output_layer(
            states, weight=output_weight, runtime_gather_output=runtime_gather_output
        )
        if scale_logits_fn is not None:
            logits = scale_logits_fn(logits)
        labels, mask = following.labels[depth], following.loss_mask[depth]
        losses = mask * compute_language_model_loss(labels, logits)
        targets = max(of_depths[depth], 1.0)
        if is_training:
            found = theirs._compute_mtp_acceptance_counts(
                logits, labels, mask, output_layer, runtime_gather_output, tp_group
            )
            _log(losses, found, targets, depth, config.mtp_num_layers)
        # Gradients are divided by the targets of the next token in the end.
        factor = config.mtp_loss_scaling_factor / config.mtp_num_layers * own / targets
        hidden = theirs.MTPLossAutoScaler.apply(hidden, factor * losses)
    return hidden


def _log(
    losses: torch.Tensor,
    accepted: tuple[torch.Tensor, torch.Tensor],
    targets: float,
    depth: int,
    layers: int,
) -> None:
    """Adds a layer's loss to what Megatron-LM logs, so that its mean is that of the global batch.

    It averages over data-parallel ranks, and over the micro-batches that the loop asks for.

    Args:
        losses: losses of the rank's tokens, weighted.
        accepted: right predictions, and all.
        targets: targets of the global batch.
        depth: number of the layer, from 0.
        layers: number of layers.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    share = get_num_microbatches() * group.size() / targets
    theirs.MTPLossLoggingHelper.save_metrics_to_tracker(
        losses.sum() * share, *accepted, depth, layers, avg_group=group
    )
