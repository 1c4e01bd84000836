"""What travels for keys and values of latent attention."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distca.cost.latent_rows import comm_shape, latents_pay
from distca.cost.link import Links
from distca.cost.model_sizes import MODELS
from distca.cost.volume import AttentionShape

DEEPSEEK = MODELS["deepseek-v3-like"]
OF_A_RANK = AttentionShape(16, 16, 192, 2, 128, 512, 64)


def test_bytes_and_operations_of_a_row() -> None:
    assert DEEPSEEK.latent_shape(8) == OF_A_RANK
    assert OF_A_RANK.kv_row_bytes == 16 * (192 + 128) * 2
    assert OF_A_RANK.moved_kv_row_bytes == (512 + 64) * 2
    assert OF_A_RANK.expanded_dim == 16 * (128 + 128)
    assert OF_A_RANK.expansion_flops == 2 * 512 * 16 * 256
    keys = replace(OF_A_RANK, kv_rank=None, rotated_dim=0)
    assert keys.moved_kv_row_bytes == keys.kv_row_bytes
    assert keys.expansion_flops == 0


@pytest.mark.parametrize(("backward", "sent"), [("resend", 2), ("keep", 1)])
def test_latents_pay_where_links_take_longer(backward: str, sent: int) -> None:
    """A row is sent once or twice and its gradient once; a server expands it as often as it is
    sent, and has two products for gradients."""
    saved, flops = 10_240 - 1152, (sent + 2) * OF_A_RANK.expansion_flops
    for slower, pays in ((0.99, True), (1.01, False)):
        rate = flops / ((sent + 1) * saved / 50e9) / slower
        assert latents_pay(OF_A_RANK, Links(4), 5, backward, rate) == pays  # type: ignore[arg-type]
        # Within a node nine times as many bytes take that long.
        assert latents_pay(OF_A_RANK, Links(4), 4, backward, 9 * rate) == pays  # type: ignore[arg-type]


def test_what_travels() -> None:
    fast, slow = Links(node_gb_per_s=1e6, network_gb_per_s=1e6), Links()
    keys = DEEPSEEK.attention_shape(8)
    assert comm_shape(DEEPSEEK, 8, 2, slow, 16) == OF_A_RANK
    assert comm_shape(DEEPSEEK, 8, 2, fast, 16) == keys
    assert comm_shape(DEEPSEEK, 8, 2, fast, 16, "on") == OF_A_RANK
    assert comm_shape(DEEPSEEK, 8, 2, slow, 16, "off") == keys
    llama = MODELS["llama-8b"]
    assert comm_shape(llama, 8, 2, slow, 16) == llama.attention_shape(8)
    with pytest.raises(ValueError, match="--latent-rows on needs a model with latents"):
        comm_shape(llama, 8, 2, slow, 16, "on")
