"""The sparsity that a calibration and a bound choose, for commands that run csps."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from distca.commands.described import Group
from distca.schedule.serving.csps import Levels
from distca.schedule.serving.csps.calibration_file import load_calibration
from distca.schedule.serving.csps.configure import Configuration, Configurator, Partitions

_BOUNDS = ("max_degradation", "max_recall_loss", "max_ttft")


def add_calibration_flags(group: Group) -> None:
    """Adds the flags of `chosen_sparsity`."""
    group.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="What dropping keys does to this model, by `distca tune sparsity`: csps then drops "
        "what is chosen within one of these bounds, instead of --sparsity.",
    )
    group.add_argument(
        "--max-degradation",
        type=float,
        metavar="NATS",
        help="Least time to the first token, with a mean divergence from dense attention of so "
        "much.",
    )
    group.add_argument(
        "--max-recall-loss",
        type=float,
        metavar="SHARE",
        help="Likewise, with so many of all needles lost, from 0 to 1.",
    )
    group.add_argument(
        "--max-ttft",
        type=float,
        metavar="SECONDS",
        help="Least divergence, with so many predicted seconds to the first token.",
    )


def chosen_sparsity(
    args: argparse.Namespace,
    model: Any,
    tokens: int | None,
    levels: Levels,
    partitions: Partitions | None,
) -> Configuration | None:
    """What a calibration chooses, which is told on standard error; None: none is given.

    Args:
        args: flags.
        model: model that answers.
        tokens: tokens of the longest prompt; None: those of the longest one that was measured.
        levels: levels of the ranks.
        partitions: micro-partitions, if they are given.

    Raises:
        ValueError: there is no calibration, or none of this model and these ranks, or no sparsity
            is within the bound.
    """
    given = [name for name in _BOUNDS if getattr(args, name) is not None]
    if args.calibration is None:
        if given:
            raise ValueError(
                f"{_flag(given[0])} {getattr(args, given[0])} needs --calibration FILE: make one "
                "by `distca tune sparsity MODEL --prompts FILE`"
            )
        return None
    if not given or ("max_ttft" in given and len(given) > 1):
        raise ValueError(
            "--calibration needs a bound: give --max-degradation and --max-recall-loss, or one of "
            "them, or --max-ttft"
        )
    if args.sparsity is not None:
        raise ValueError(f"--sparsity {args.sparsity} and --calibration contradict: give one")
    if args.tensor_parallel_size > 1:
        raise ValueError(
            "--calibration chooses other ratios for other heads, which tensor-parallel ranks would "
            "have to plan apart: give --tensor-parallel-size 1"
        )
    from distca.serve.models import model_digest
    from distca.serve.selection import machine_of
    from distca.simulate.serving.sparse import SparseLatency

    file = load_calibration(args.calibration)
    file.measured_on.check(model.description, model_digest(model).hex(), levels)
    calibration = file.calibration
    if tokens is None:
        tokens = max(each.tokens for each in calibration.measured)
    machine = machine_of(args.profile, args.node_gb_per_s)
    latency = SparseLatency(*machine.costs(model, levels.ranks), levels, tokens)
    tried = None if partitions is None else [partitions]
    configurator = Configurator(calibration, latency, tokens, tried)
    if args.max_ttft is not None:
        found = configurator.least_degraded(args.max_ttft)
    else:
        kl, loss = args.max_degradation, args.max_recall_loss
        found = configurator.fastest(
            float("inf") if kl is None else kl, float("inf") if loss is None else loss
        )
    dense = configurator.fastest(0.0)
    sys.stderr.write(
        f"{args.calibration}: {_kept(found):.0%} of far keys are kept, at most {found.kl:.2g} nats "
        f"from dense attention and {found.recall_loss:.1%} of needles lost; prompts of {tokens:,} "
        f"tokens have their first token after {found.seconds:.3g} s, {dense.seconds:.3g} s with "
        "all keys, simulated\n"
    )
    return found


def _kept(found: Configuration) -> float:
    """Share of far keys that layers keep on average."""
    ratios = [ratio for heads in found.sparsity.keys for levels in heads for ratio in levels[1:]]
    return sum(ratios) / len(ratios)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
