"""Multi-latent attention: Megatron's own, given each token's position.

Megatron's layers expand the latent to keys and values of each head before core attention, which is
ours and takes them as it does others; keys and values differ in size. What travels for them may be
latents again (`mla_latents.py`). Each layer has a rotary embedding of its own, which numbers the
tokens of a sequence from zero.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_patches.flags.sizes import ModelSizes
from megatron_patches.model.features import features_of
from megatron_patches.model.layers import transformer_layers
from megatron_patches.model.rotary import split_rows


def softmax_scale(args: Namespace) -> float:
    """Returns the factor of core attention's scores, as the layers have it."""
    features = features_of(args)
    if features is not None:
        return features.softmax_scale(args)
    scale = ModelSizes.from_args(args).head_dim ** -0.5
    if not args.multi_latent_attention:
        return scale
    from megatron.core.models.common.embeddings import _yarn_get_mscale

    factor: float = _yarn_get_mscale(args.rotary_scaling_factor, args.mscale_all_dim)
    return scale * factor * factor


class LayerRotaryEmbedding(torch.nn.Module):
    """Stands in for the rotary embedding of a layer, and uses its frequencies.

    Attributes:
        positions: position of each token in its document, int64 `[tokens]`, where no packed
            documents tell them.
    """

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self._rotary = rotary
        self.positions: torch.Tensor | None = None
        self._of_call: torch.Tensor | None = None

    def get_rotary_seq_len(
        self, context: Any, transformer: Any, hidden: Any, config: Any, packed_seq_params: Any
    ) -> int:
        """Returns the length for `forward`, which the layer calls next, with the same documents."""
        given = getattr(packed_seq_params, "token_positions", None)
        self._of_call = self.positions if given is None else given
        return int(
            self._rotary.get_rotary_seq_len(context, transformer, hidden, config, packed_seq_params)
        )

    def forward(self, max_seq_len: int, **kwargs: Any) -> Any:
        """Returns each token's angles, float32 `[tokens, 1, 1, rotary_dim]`, and yarn's factor."""
        if self._of_call is None:
            raise RuntimeError("the model was called without position_ids")
        found = self._rotary(2, packed_seq=True)
        angles, *factor = found if isinstance(found, tuple) else (found,)
        # The angles of position 1 are the frequencies.
        positions = self._of_call.to(angles)[:, None, None, None] * angles[1:2]
        return (positions, *factor) if factor else positions


class UnnormedQueries(MLASelfAttention):
    """Megatron's multi-latent attention, in which only latents have norms.

    From megatron-core 0.19 on, `--qk-layernorm` without `--q-lora-rank` asks for a second norm of
    the hidden states that become queries. DeepSeek-V2-Lite has none, nor had earlier versions, and
    local layers cannot have it.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Returns the classes of projections and norms: those of the spec."""
        names = ("linear_q_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names} | {
            "linear_q_up_proj": IdentityOp
        }


def rotate_layers_by_position_ids(model: GPTModel) -> None:
    """Makes the rotary embeddings of a GPT model's layers follow the `position_ids` of each call.

    Positions go with the documents' description, and with that of each nano-batch, so that a layer
    that is recomputed finds them again.
    """
    rotaries = []
    for layer in transformer_layers(model):
        layer.self_attention.rotary_pos_emb = LayerRotaryEmbedding(
            layer.self_attention.rotary_pos_emb
        )
        rotaries.append(layer.self_attention.rotary_pos_emb)
    config = model.config
    shards = config.tensor_model_parallel_size if config.sequence_parallel else 1

    def remember_positions(module: Any, args: Any, kwargs: Any) -> None:
        position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        positions, params = position_ids.reshape(-1), kwargs.get("packed_seq_params")
        if params is None:
            for rotary in rotaries:
                rotary.positions = positions
            return
        params.token_positions = positions
        if params.nano_batches is not None:
            sizes = [each.rows for each in params.nano_batches]
            for each, rows in zip(
                params.nano_batches, split_rows(positions, sizes, shards), strict=True
            ):
                each.token_positions = rows

    model.register_forward_pre_hook(remember_positions, with_kwargs=True)


def average_gradients_of_query_norms(model: GPTModel) -> None:
    """Lets tensor-parallel ranks average the gradients of the norms of queries' latents.

    Without sequence parallelism each has the whole gradient, and Megatron would sum them, as it
    must where these norms are of the ranks' own heads.
    """
    if model.config.sequence_parallel:
        return
    for layer in transformer_layers(model):
        norm = getattr(layer.self_attention, "q_layernorm", None)
        for parameter in [] if norm is None else norm.parameters():
            parameter.average_gradients_across_tp_domain = True


def sum_shared_gradient(
    key_THD: torch.Tensor, own_size: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Returns keys, of whose heads the last elements are the same on all ranks of a group.

    Megatron's local layers gather the rotated part of keys from the tensor-parallel ranks, and
    leave it to each to sum the gradients of its own heads. All heads' are needed.

    Args:
        key_THD: keys `[..., heads, head_dim]`.
        own_size: elements of a head before the shared ones.
        group: tensor-parallel ranks.
    """
    if group.size() == 1:
        return key_THD
    return _SumSharedGradient.apply(key_THD, own_size, group)  # type: ignore[no-any-return,no-untyped-call]


class _SumSharedGradient(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, key: torch.Tensor, own_size: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.own_size, ctx.group = own_size, group
        return key.view_as(key)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        total = gradient[..., ctx.own_size :].sum(dim=-2, dtype=torch.float32)
        dist.all_reduce(total, group=ctx.group)
        # All heads have one sum, so it may stand with the first.
        gradient = gradient.clone()
        gradient[..., 1:, ctx.own_size :] = 0
        gradient[..., 0, ctx.own_size :] = total.to(gradient.dtype)
        return gradient, None, None
