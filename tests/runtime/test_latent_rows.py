"""Latents that travel instead of keys and values, against dense attention in fp64 on real ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distca.attention import select_kernel_of_heads
from distca.cost.memory import plan_memory
from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Mask, Plan, validate_plan
from distca.runtime import Buffers, CoreAttention, SentLatents, build_exchange
from distca.transport import CollectiveTransport
from support.programs import there_and_back
from support.random_plans import dense_attention, random_lengths, random_plan

SCALE = 0.3
CPU = torch.device("cpu")
HEADS, OWN, ROTATED, OF_VALUE, RANK = 3, 7, 6, 5, 9
SHAPE = AttentionShape(HEADS, HEADS, OWN + ROTATED, 4, OF_VALUE, RANK, ROTATED)
NAMES = "queries", "latents", "rotated parts", "weight", "outputs' gradients"


def inputs(tokens: int) -> list[torch.Tensor]:
    """What `NAMES` says, of all tokens."""
    generator = torch.Generator().manual_seed(7)
    sizes = (
        *((tokens, HEADS, OWN + ROTATED), (tokens, RANK), (tokens, ROTATED)),
        *((HEADS * (OWN + OF_VALUE), RANK), (tokens, HEADS, OF_VALUE)),
    )
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def expanded(
    latent: torch.Tensor, rotated: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all heads."""
    heads = (latent @ weight.t()).view(len(latent), HEADS, OWN + OF_VALUE)
    shared = rotated[:, None].expand(-1, HEADS, -1)
    return torch.cat([heads[..., :OWN], shared], dim=-1), heads[..., OWN:]


def run_on_rank(plan: Plan, backward: str, at_home: bool):
    """One rank's rows, output and gradients, and the bytes that it sent."""
    rank = dist.get_rank()
    kernel = select_kernel_of_heads("cpu", OWN + ROTATED, OF_VALUE)
    # Just the memory that the plan is said to need.
    buffers = Buffers(CPU, headroom=0.0)
    transport = CollectiveTransport(dist.group.WORLD, CPU)
    attention = CoreAttention(transport, kernel, buffers, backward)  # type: ignore[arg-type]
    attention.reserve(plan_memory(plan, SHAPE, backward))  # type: ignore[arg-type]
    mine = plan.placement.of_rank(rank)
    pieces = zip(plan.document_offsets[mine.document], mine.start, mine.end, strict=True)
    rows = np.concatenate([np.arange(0), *(o + np.arange(s, e) for o, s, e in pieces)])
    q, latent, rotated, weight, dout = (x.float() for x in inputs(int(plan.lengths.sum())))
    q, latent, rotated, dout = (x[rows] for x in (q, latent, rotated, dout))
    leaves = [x.requires_grad_() for x in (q, latent, rotated, weight)]
    exchanges = attention.buffers.place([build_exchange(plan, rank, latents=True)])
    k, v = expanded(latent, rotated, weight)
    run = there_and_back(exchanges, at_home=at_home)
    out = attention(q, k, v, run, SCALE, latents=SentLatents(latent, ROTATED, weight))
    out.backward(dout)
    figures = [out.detach(), *(x.grad for x in leaves)]
    transport.close()
    return rows, [x.double() for x in figures], transport.bytes_sent


@pytest.mark.parametrize("seed", range(5))
def test_gradients_of_latents_and_their_weight(ranks, seed: int) -> None:
    rng = np.random.default_rng(seed)
    world_size = int(rng.integers(2, 5))
    mask = Mask() if seed % 2 else Mask(int(rng.integers(0, 100)))
    plan = random_plan(rng, random_lengths(rng, world_size * 160), world_size, 160, mask)
    validate_plan(plan)
    backward = ("resend", "keep")[seed // 3]
    q, latent, rotated, weight, dout = inputs(int(plan.lengths.sum()))
    leaves = [x.requires_grad_() for x in (q, latent, rotated, weight)]
    out = dense_attention(q, *expanded(latent, rotated, weight), plan.lengths, mask, SCALE)
    out.backward(dout)
    results = ranks.run(run_on_rank, plan, backward, False, world_size=world_size)
    for rows, (found_out, *gradients), _ in results:
        expected = (out.detach(), q.grad, latent.grad, rotated.grad)
        for wanted, found in zip(expected, (found_out, *gradients[:3]), strict=True):
            assert (found - wanted[rows]).abs().max() <= 2e-5 * wanted.abs().max()
    # As data-parallel ranks add it up.
    of_weight = torch.stack([figures[4] for _, figures, _ in results]).sum(dim=0)
    assert (of_weight - leaves[3].grad).abs().max() <= 2e-5 * leaves[3].grad.abs().max()
    check_bytes(plan, backward, results)


def check_bytes(plan: Plan, backward: str, results) -> None:
    """What was sent is what was planned, and less than keys and values."""
    planned = plan_bytes(plan, SHAPE, backward)  # type: ignore[arg-type]
    for phase, matrix in planned.phases.items():
        for rank, (_, _, sent) in enumerate(results):
            assert sent[phase] == matrix[rank].sum(), (phase, rank)
    rows = int(plan.kv_segments.moved_rows(plan.world_size).sum())
    keys = plan_bytes(plan, replace(SHAPE, kv_rank=None, rotated_dim=0), backward)  # type: ignore[arg-type]
    # A row and its padding: 9 and 6 elements of 4 bytes, and keys of 39 and values of 15.
    saved = (160 + 64) - (48 + 32)
    assert keys.total - planned.total == (3 if backward == "resend" else 2) * rows * saved > 0
