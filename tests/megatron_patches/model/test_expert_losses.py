"""A router's auxiliary loss is that of a micro-batch's tokens on all ranks, part by part."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from support.ranks import Ranks

EXPERTS, CHOSEN, HIDDEN, COEFFICIENT = 4, 2, 8, 0.5
# Megatron's names of the losses in its log.
LOGGED = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}


def rows_of(rank: int, rows: int) -> torch.Tensor:
    """Hidden states of a rank's tokens, whose experts shift from the first to the last."""
    generator = torch.Generator().manual_seed(rank)
    drift = torch.linspace(-2, 2, rows)[:, None] * torch.arange(HIDDEN)
    return torch.randn(rows, HIDDEN, generator=generator) + drift


def loss_of(probabilities: torch.Tensor) -> torch.Tensor:
    """The loss of the Switch transformer: experts' shares of tokens by their mean probabilities."""
    chosen = torch.zeros_like(probabilities)
    chosen.scatter_(1, probabilities.topk(CHOSEN).indices, 1.0)
    shares = chosen.mean(dim=0) / CHOSEN
    return EXPERTS * (shares * probabilities.mean(dim=0)).sum()


def logged_loss(name: str, micro_batches: int) -> float:
    """Megatron's mean of an auxiliary loss over the micro-batches, which it then forgets."""
    from megatron.core.transformer.moe.moe_utils import track_moe_metrics

    found: dict[str, torch.Tensor] = {}
    with warnings.catch_warnings():
        # Later versions have another name for it, and this one as well.
        warnings.simplefilter("ignore", DeprecationWarning)
        track_moe_metrics(
            *(1 / micro_batches, 0),
            total_loss_dict=found,
            force_initialize=True,
            track_names=[name],
            num_layers=1,
            moe_layer_freq=1,
        )
    return float(found[name])


def losses_and_gradients(
    kind: str, parts: Sequence[int], micro_batches: int
) -> tuple[float, float, torch.Tensor, torch.Tensor]:
    """The logged loss and what it must be; the gradient of this rank's logits and likewise."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_patches.hooks import adapt_megatron_core
    from megatron_patches.model.experts import share_auxiliary_losses

    adapt_megatron_core()
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        moe_router_topk=CHOSEN,
        moe_router_load_balancing_type=kind,
        moe_aux_loss_coeff=COEFFICIENT,
        add_bias_linear=False,
        moe_ffn_hidden_size=HIDDEN,
        moe_router_dtype="fp64",
        use_cpu_initialization=True,
    )
    torch.manual_seed(0)
    router = TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    ranks, rows = dist.get_world_size(), sum(parts)
    share_auxiliary_losses(router, rows, ranks)
    pieces = [torch.split(rows_of(rank, rows), list(parts)) for rank in range(ranks)]
    expected, weight = torch.zeros(()), router.weight.detach().clone().requires_grad_()
    for _ in range(micro_batches):
        for part in zip(*pieces, strict=True):
            own = part[dist.get_rank()]
            probabilities, _ = router(own.unsqueeze(1))
            # The loss is attached: it has gradients where the layer's own are zero.
            (0 * probabilities).sum().backward()
            loss = loss_of((torch.cat(part) @ weight.T).softmax(dim=1))
            expected = expected + loss * len(own) / rows / micro_batches
    found = logged_loss(LOGGED[kind], micro_batches)
    assert logged_loss(LOGGED[kind], micro_batches) == 0
    assert router.weight.grad is not None
    gradient = router.weight.grad.clone()
    dist.all_reduce(gradient)
    wanted = torch.zeros_like(weight)
    for part in zip(*pieces, strict=True):
        loss = loss_of((torch.cat(part) @ weight.T).softmax(dim=1))
        wanted += micro_batches * torch.autograd.grad(COEFFICIENT * loss, weight)[0]
    parallel_state.destroy_model_parallel()
    return found, float(expected), gradient, wanted


@pytest.mark.parametrize(
    ("kind", "parts", "micro_batches"),
    [("aux_loss", (24,), 1), ("aux_loss", (3, 8, 13), 2), ("seq_aux_loss", (20, 4), 1)],
)
def test_parts_count_by_their_tokens(
    ranks: Ranks, kind: str, parts: Sequence[int], micro_batches: int
) -> None:
    for found, expected, gradient, wanted in ranks.run(
        losses_and_gradients, kind, parts, micro_batches, world_size=2
    ):
        assert found == pytest.approx(expected, rel=1e-4)
        assert torch.allclose(gradient, wanted, rtol=1e-3, atol=1e-5)
