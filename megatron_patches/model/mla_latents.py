"""Latents that travel instead of keys and values (`--distca-latent-rows`).

Attention servers of a pipeline stage are data-parallel replicas: each has the layer's up-projection
and expands the latents that it receives (`distca.runtime.latent_rows`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch.nn import functional

from megatron_patches.model.layers import transformer_layers


class LatentSource:
    """Stands in for the forward pass of a layer's up-projection, and keeps what it expands.

    Latents have gradients of the owner's own keys and values and of those that servers make. Each
    tensor-parallel rank has them of its own heads alone, so all are summed where the latents come
    from: as Megatron's layer would, but outside of it, since it would do so for its own alone. The
    weight's gradient is autograd's, which adds up the owner's and the server's part before a hook
    of Megatron's DDP sees it.

    Args:
        projection: up-projection of keys and values.
        config: Megatron's configuration.
    """

    def __init__(self, projection: Any, config: Any) -> None:
        self._projection, self._config = projection, config
        self._latent: torch.Tensor | None = None

    @property
    def weight(self) -> torch.nn.Parameter:
        """The weight that expands latents, of this rank's heads."""
        return self._projection.weight  # type: ignore[no-any-return]

    @property
    def rotated_dim(self) -> int:
        """Elements of a key's head that all heads share, the last ones."""
        return int(self._config.qk_pos_emb_head_dim)

    def expand(self, latent: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Expands the latents of this rank's tokens, and keeps them for core attention."""
        latent = self._normed(latent)
        if self._config.sequence_parallel:
            latent = gather_from_sequence_parallel_region(latent)
        else:
            latent = copy_to_tensor_model_parallel_region(latent)
        self._latent = latent
        return functional.linear(latent, self.weight), None

    def _normed(self, latent: torch.Tensor) -> torch.Tensor:
        """Norms latents where Transformer Engine's layer does it together with its product."""
        weight = getattr(self._projection, "layer_norm_weight", None)
        if weight is None:
            return latent
        config = self._config
        if config.layernorm_zero_centered_gamma:
            weight = weight + 1
        if config.normalization == "RMSNorm":
            return functional.rms_norm(latent, weight.shape, weight, config.layernorm_epsilon)
        bias = self._projection.layer_norm_bias
        return functional.layer_norm(latent, weight.shape, weight, bias, config.layernorm_epsilon)

    def take(self) -> torch.Tensor:
        """Returns the latents that were expanded last, `[tokens, kv_rank]`, once."""
        latent, self._latent = self._latent, None
        assert latent is not None, "core attention ran without the layer's up-projection"
        return latent


def send_latents(model: GPTModel) -> None:
    """Makes the layers of a GPT model hand their latents to core attention."""
    for layer in transformer_layers(model):
        attention = layer.self_attention
        source = LatentSource(attention.linear_kv_up_proj, attention.config)
        attention.linear_kv_up_proj.forward = source.expand
        attention.core_attention.latent_source = source
