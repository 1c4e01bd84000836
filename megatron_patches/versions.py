"""What differs between the supported versions of megatron-core, each in one place."""

from __future__ import annotations

import inspect
from argparse import Namespace
from typing import Any

from megatron.core.package_info import MAJOR, MINOR
from megatron.core.transformer.moe.router import TopKRouter

AUXILIARY_LOSS_COUNTS_ITS_GROUP = "tp_cp_group" in inspect.getsource(
    TopKRouter.attach_and_log_load_balancing_loss
)
"""Whether a router multiplies its auxiliary loss by the ranks whose tokens it is averaged over, as
the sum over tokens needs: from 0.19 on."""

INITIALIZING_CHECKS = (MAJOR, MINOR) < (0, 18)
"""Whether `initialize_megatron` also parses and checks arguments, and sets what a process has of
them."""

SFT_ENDS_CONVERSATIONS = (MAJOR, MINOR) < (0, 18)
"""Whether Megatron-LM adds an end token to a conversation whose format leaves it out."""


def newer_flag(args: Namespace, name: str) -> Any:
    """Returns the value of a flag that Megatron-LM has from 0.18 on; None before."""
    return getattr(args, name, None)
