"""Latents that core attention sends, as layers of either spec expand them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_patches.model import mla_latents
from megatron_patches.model.mla_latents import LatentSource


@pytest.fixture(autouse=True)
def one_rank(monkeypatch) -> None:
    monkeypatch.setattr(mla_latents, "copy_to_tensor_model_parallel_region", lambda x: x)


@pytest.mark.parametrize("kind", ["none", "RMSNorm", "LayerNorm"])
def test_a_fused_norm_is_part_of_what_travels(kind: str) -> None:
    """Transformer Engine's layer has the norm's weight; it has not run here."""
    generator = torch.Generator().manual_seed(3)
    latent = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(12, 8, generator=generator, dtype=torch.float64)
    gamma, beta = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    projection = SimpleNamespace(weight=weight)
    if kind != "none":
        projection.layer_norm_weight, projection.layer_norm_bias = gamma, beta
    config = SimpleNamespace(
        normalization=kind,
        layernorm_epsilon=1e-3,
        layernorm_zero_centered_gamma=True,
        sequence_parallel=False,
        qk_pos_emb_head_dim=4,
    )
    source = LatentSource(projection, config)
    out, bias = source.expand(latent)
    assert bias is None
    expected = latent
    if kind == "RMSNorm":
        expected = latent / (latent.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * (gamma + 1)
    elif kind == "LayerNorm":
        centred = latent - latent.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        expected = centred / (variance + 1e-3).sqrt() * (gamma + 1) + beta
    torch.testing.assert_close(source.take(), expected)
    torch.testing.assert_close(out, expected @ weight.t())
    with pytest.raises(AssertionError, match="without the layer's up-projection"):
        source.take()
