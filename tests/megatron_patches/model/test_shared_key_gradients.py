"""The part of keys that all heads share gets the sum of all heads' gradients, in float32."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_patches.model.latent_attention import sum_shared_gradient
from support.ranks import Ranks

OWN, SHARED = 3, 2


def gradient_of_keys(dtype: torch.dtype, told: list[list[float]]) -> torch.Tensor:
    """The gradient of this rank's keys, of whose shared part each head is told a number."""
    group, of_heads = dist.group.WORLD, torch.tensor(told[dist.get_rank()], dtype=dtype)
    assert group is not None
    keys = torch.randn(2, len(of_heads), OWN + SHARED).to(dtype).requires_grad_()
    summed = sum_shared_gradient(keys, OWN, group)
    assert torch.equal(summed, keys)
    gradient = torch.full_like(summed, 7.0)
    gradient[..., OWN:] = of_heads[:, None]
    before = gradient.clone()
    summed.backward(gradient)
    assert torch.equal(gradient, before), "somebody else's gradient was changed"
    assert keys.grad is not None
    assert keys.grad.dtype == dtype
    return keys.grad.float()


def test_shared_parts_are_summed_over_the_heads_of_all_ranks(ranks: Ranks) -> None:
    """In float32: in bfloat16 256 and 1 are 256, on one rank or on both."""
    for told, total in (([[256.0, 1.0], [1.0, 0.0]], 258.0), ([[256.0, 0.0], [1.0, 1.0]], 258.0)):
        found = ranks.run(gradient_of_keys, torch.bfloat16, told, world_size=2)
        for gradient in found:
            assert (gradient[..., :OWN] == 7).all()
            assert (gradient[:, 0, OWN:] == total).all()
            assert (gradient[:, 1:, OWN:] == 0).all()


def test_heads_of_one_rank_alone_need_no_sum(ranks: Ranks) -> None:
    (gradient,) = ranks.run(gradient_of_keys, torch.float32, [[1.0, 2.0]], world_size=1)
    assert gradient[0, :, -1].tolist() == [1.0, 2.0]
