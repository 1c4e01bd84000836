"""Mixtures of experts under `--distca`: auxiliary losses of all tokens of a micro-batch.

Megatron averages a router's auxiliary loss over the tokens of a rank's micro-batch (with context
parallelism over those of its ranks). Here long documents span the data-parallel ranks, and the
scheduler says which rank has which tokens; so the loss is averaged over the micro-batch's tokens on
all of them, as one plain process with the whole window does. With ping-pong and in chains it is
that of each part of the micro-batch, weighed by its tokens. Losses of single tokens (`z-loss`) and
of the global batch (`global_aux_loss`, without ping-pong) are Megatron's as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter

from megatron_patches.versions import AUXILIARY_LOSS_COUNTS_ITS_GROUP

OVER_A_MICRO_BATCH = ("_apply_aux_loss", "_apply_seq_aux_loss")
"""Methods of a router that add a loss averaged over a micro-batch."""


def share_auxiliary_losses(model: GPTModel, rows: int, replicas: int) -> None:
    """Makes the routers of a model average their auxiliary losses over all data-parallel ranks.

    Args:
        model: model of this rank.
        rows: rows of a whole micro-batch on a rank.
        replicas: data-parallel ranks.
    """
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    for module in model.modules():
        if isinstance(module, TopKRouter):
            _share(module, group, rows, replicas)


def let_experts_add_biases(model: GPTModel) -> None:
    """Lets local layers train experts with biases.

    megatron-core adds them in place, which autograd refuses where the output is what a reduction
    over one rank has passed on as it was.
    """
    for module in model.modules():
        if isinstance(module, SequentialMLP) and module.config.add_bias_linear:
            for expert in module.local_experts:
                expert.linear_fc2.register_forward_hook(_of_its_own)


def _of_its_own(module: Any, given: Any, found: tuple[torch.Tensor, Any]) -> Any:
    output, bias = found
    return output.clone(), bias


def _share(router: Any, group: torch.distributed.ProcessGroup, rows: int, replicas: int) -> None:
    """Makes one router do so.

    Args:
        router: Megatron's router.
        group: ranks whose tokens make up a micro-batch.
        rows: rows of a whole micro-batch on a rank.
        replicas: data-parallel ranks.
    """
    attach = router.attach_and_log_load_balancing_loss

    def attach_of_all(
        activation: torch.Tensor,
        coefficient: float,
        loss: torch.Tensor,
        name: str,
        reduce_group: torch.distributed.ProcessGroup,
        **others: Any,
    ) -> torch.Tensor:
        if reduce_group is group and name != "global_load_balancing_loss":
            if not AUXILIARY_LOSS_COUNTS_ITS_GROUP:
                others["valid_token_count"] = others["valid_token_count"] * replicas
            # The coefficient is taken out of what is logged: so a part counts by its rows.
            coefficient = coefficient * rows / activation.shape[0]
        return attach(  # type: ignore[no-any-return]
            activation, coefficient, loss, name, reduce_group, **others
        )

    router.attach_and_log_load_balancing_loss = attach_of_all
    for name in OVER_A_MICRO_BATCH:
        setattr(router, name, partial(_with_group, router, group, getattr(router, name)))


def _with_group(
    router: Any, group: Any, method: Callable[..., torch.Tensor], *inputs: Any, **others: Any
) -> torch.Tensor:
    """Calls a router's method while its tokens are those of another group's ranks."""
    own, router.tp_cp_group = router.tp_cp_group, group
    try:
        return method(*inputs, **others)
    finally:
        router.tp_cp_group = own
