"""What differs between the supported versions of megatron-core, each in one place."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from megatron.core.package_info import MAJOR, MINOR
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import get_model_type

_BACKWARD_STEP_TAKES_MODEL_TYPE = (
    "model_type" in inspect.signature(schedules.backward_step).parameters
)

AUXILIARY_LOSS_COUNTS_ITS_GROUP = "tp_cp_group" in inspect.getsource(
    TopKRouter.attach_and_log_load_balancing_loss
)
"""Whether a router multiplies its auxiliary loss by the ranks whose tokens it is averaged over, as
the sum over tokens needs: from 0.19 on."""


SFT_ENDS_CONVERSATIONS = (MAJOR, MINOR) < (0, 18)
"""Whether Megatron-LM adds an end token to a conversation whose format leaves it out."""


def backward_step(
    chunk: torch.nn.Module,
    input_tensor: Any,
    output: torch.Tensor,
    output_gradient: torch.Tensor | None,
    config: Any,
) -> torch.Tensor | None:
    """Runs megatron-core's backward step of a model chunk; 0.16 also asks for the model's type."""
    of_model = [get_model_type(chunk)] if _BACKWARD_STEP_TAKES_MODEL_TYPE else []
    gradient: torch.Tensor | None = schedules.backward_step(
        input_tensor, output, output_gradient, *of_model, config
    )
    return gradient
