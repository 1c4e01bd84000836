"""The layouts of ranks that split weights, for commands that run `--prefill-strategy sp-tp`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Literal

from distca.schedule.serving.csps.layouts import LayoutChoice, SplitModel

if TYPE_CHECKING:
    from distca.inference.models import ServedModel

SP_TP = "sp-tp"
"""Strategy of prefills by which rows are shared by sequence between blocks whose weights are split
(CSPS)."""

SP_NTP: Literal["sp-ntp"] = "sp-ntp"


def layout_choice(
    strategy: str, selector: str, ranks: int, tensor_parallel_size: int
) -> LayoutChoice | None:
    """How processes that split weights share the rows of prefills; None: they don't.

    Args:
        strategy: value of `--prefill-strategy`.
        selector: who chooses with auto.
        ranks: ranks that have tokens each.
        tensor_parallel_size: processes of each.

    Raises:
        ValueError: nothing is split.
    """
    if strategy == SP_TP and ranks > 1:
        raise ValueError(
            f"--prefill-strategy {SP_TP} shares a prompt among processes that split the weights: "
            f"give --tensor-parallel-size {ranks * tensor_parallel_size} and "
            "--context-parallel-size 1"
        )
    if ranks > 1 or tensor_parallel_size == 1:
        return None
    if strategy == "auto":
        return "paper" if selector == "paper" else "bytes"
    return next((each for each in (SP_NTP, "sp-tp") if each == strategy), None)


def served_split(args: argparse.Namespace, model: ServedModel) -> SplitModel | None:
    """Returns the layers whose rows are shared as the flags say, or None.

    Raises:
        ValueError: the flags ask for what there is not.
    """
    from distca.inference.sequence_parallel import split_model

    ranks = args.context_parallel_size + getattr(args, "attention_servers", 0)
    choice = layout_choice(args.prefill_strategy, args.selector, ranks, args.tensor_parallel_size)
    return None if choice is None else split_model(model, choice)
