"""What differs between the supported versions of megatron-core, but for the rows of `hooks.py`."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron.core import num_microbatches_calculator
from megatron.core.package_info import MAJOR, MINOR
from megatron.core.transformer.moe.router import TopKRouter

FIRST, LAST = "0.17", "0.19"
"""The supported versions. `pretrain.py`, `distca doctor` and `pyproject.toml` name them, too, where
there may be no megatron-core."""

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

BATCHES_RAMP_UP = hasattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator")
"""Whether batches grow by `--rampup-batch-size`, as up to 0.17; from 0.18 on they do by
`--step-batch-size-schedule`."""


def script_parses(megatron_pretrain: Callable[..., None]) -> bool:
    """Returns whether the script parses the command line, not `pretrain`: so from 0.18 on."""
    return "cfg_container" in inspect.signature(megatron_pretrain).parameters


def counts_pairs(operations: Callable[..., Any]) -> bool:
    """Returns whether a count of operations takes the pairs that documents have, as from 0.19 on.

    Up to 0.18 it takes each sample for one document.

    Args:
        operations: Megatron-LM's `num_floating_point_operations`.
    """
    return "seqlen_squared_sum_in_batch" in inspect.signature(operations).parameters


def newer_flag(args: Namespace, name: str) -> Any:
    """Returns the value of a flag that Megatron-LM has from 0.18 on; None before."""
    return getattr(args, name, None)
