"""Norms of local layers, whose weights may be kept as they differ from 1."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_patches.model.norms import SequenceParallelNorm


def norm_of(normalization: str, zero_centered: bool, sequence_parallel: bool = False):
    config = SimpleNamespace(
        normalization=normalization,
        layernorm_zero_centered_gamma=zero_centered,
        sequence_parallel=sequence_parallel,
    )
    return SequenceParallelNorm(config, 32, eps=1e-3)


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_weights_that_differ_from_one(normalization: str) -> None:
    plain, centered = norm_of(normalization, False), norm_of(normalization, True)
    x = torch.randn(5, 32)
    # New ones do the same.
    torch.testing.assert_close(centered(x), plain(x))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_()
        centered.load_state_dict(plain.state_dict())
        centered.weight -= 1
    torch.testing.assert_close(centered(x), plain(x))


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_small_weights_are_not_lost_in_bfloat16(normalization: str) -> None:
    norm = norm_of(normalization, True).bfloat16()
    x = torch.randn(64, 32).bfloat16()
    before = norm(x)
    with torch.no_grad():
        # Smaller than what 1 can grow by there.
        norm.weight.fill_(2**-9)
    assert norm(x).dtype == torch.bfloat16
    assert (norm(x) != before).any()


def test_gradients_of_sequence_parallel_ranks_are_summed() -> None:
    for zero_centered in (False, True):
        norm = norm_of("RMSNorm", zero_centered, sequence_parallel=True)
        assert norm.weight.sequence_parallel
    with pytest.raises(ValueError, match="--normalization L2Norm: choose one of RMSNorm, LayerNo"):
        norm_of("L2Norm", False)
