"""The sparsity that a calibration and a bound choose, for commands that run csps or simulate it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distca.commands.described import Group, flag_of
from distca.cost.kernel_time import CostModel
from distca.schedule.serving.csps import Levels
from distca.schedule.serving.csps.calibration_file import CalibrationFile, load_calibration
from distca.schedule.serving.csps.configure import Configuration, Configurator, Partitions
from distca.simulate.serving import InferenceCosts
from distca.simulate.serving.sparse import SparseLatency

if TYPE_CHECKING:
    from distca.inference.models import ServedModel


_BOUNDS = ("max_degradation", "max_recall_loss", "max_ttft")
_SHOWN = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Bounds of a table, in nats."""


def add_calibration_flags(group: Group) -> None:
    """Adds the flags of `chosen_sparsity`."""
    group.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="File from `distca tune sparsity`, which measures what dropped keys cost. csps "
        "then chooses a sparsity itself, within the bound of --max-degradation, "
        "--max-recall-loss or --max-ttft.",
    )
    group.add_argument(
        "--max-degradation",
        type=float,
        metavar="NATS",
        help="With --calibration: minimize the time to the first token, with a mean divergence "
        "from dense attention of at most NATS.",
    )
    group.add_argument(
        "--max-recall-loss",
        type=float,
        metavar="SHARE",
        help="With --calibration: minimize the time to the first token, with at most SHARE (0 "
        "to 1) of all needles lost. A needle, a token hidden in a prompt, is lost if only dense "
        "attention recalls it.",
    )
    group.add_argument(
        "--max-ttft",
        type=float,
        metavar="SECONDS",
        help="With --calibration: minimize the divergence from dense attention, with a "
        "predicted time to the first token of at most SECONDS.",
    )


def chosen_sparsity(
    args: argparse.Namespace,
    model: ServedModel,
    tokens: int | None,
    levels: Levels,
    partitions: Partitions | None,
) -> Configuration | None:
    """Returns what a calibration chooses and reports it on standard error, or None without one.

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
    if not _is_given(args):
        return None
    from distca.inference.machine import machine_of
    from distca.inference.models import model_digest

    file = load_calibration(args.calibration)
    file.measured_on.check_model(model.description, model_digest(model).hex())
    if tokens is None:
        tokens = max(each.tokens for each in file.calibration.measured)
    costs = machine_of(args.profile, args.node_gb_per_s).costs(model, levels.ranks)
    return _chosen(args, _configurator(file, *costs, tokens, levels, partitions))


def described_sparsity(
    args: argparse.Namespace,
    costs: InferenceCosts,
    cost_model: CostModel,
    tokens: int,
    levels: Levels,
    partitions: Partitions | None,
) -> Configuration | None:
    """Returns what a calibration chooses for a model that is described by its sizes only.

    Args:
        args: flags.
        costs: costs of the model on its cluster.
        cost_model: seconds of tasks.
        tokens: tokens of the longest prompt.
        levels, partitions: as for `chosen_sparsity`.

    Raises:
        ValueError: as for `chosen_sparsity`.
    """
    if not _is_given(args):
        return None
    configurator = described_choices(args, costs, cost_model, tokens, levels, partitions)
    return _chosen(args, configurator)


def described_choices(
    args: argparse.Namespace,
    costs: InferenceCosts,
    cost_model: CostModel,
    tokens: int,
    levels: Levels,
    partitions: Partitions | None,
) -> Configurator:
    """What a calibration chooses from; arguments and errors are those of `described_sparsity`."""
    file, model = load_calibration(args.calibration), costs.model
    measured = file.calibration.layers, file.calibration.heads
    if measured != (model.layers, model.kv_heads):
        raise ValueError(
            f"--calibration {args.calibration} is of {measured[0]} layers of {measured[1]} "
            f"key-value heads ({file.measured_on.model}), but the model has {model.layers} of "
            f"{model.kv_heads}: give sizes of the model that was measured"
        )
    return _configurator(file, costs, cost_model, tokens, levels, partitions)


def lists_choices(args: argparse.Namespace) -> bool:
    """Returns whether flags give a calibration without a bound: what is chosen within some is
    listed."""
    given = any(getattr(args, name) is not None for name in _BOUNDS)
    return args.calibration is not None and not given and args.sparsity is None


def choices_within(configurator: Configurator) -> list[tuple[float, Configuration]]:
    """What is chosen within some bounds on the divergence, until more is of no use."""
    found: list[tuple[float, Configuration]] = []
    for bound in _SHOWN:
        choice = configurator.fastest(bound)
        if not found or choice.seconds < found[-1][1].seconds:
            found.append((bound, choice))
    return found


def format_choices(found: Sequence[tuple[float, Configuration]], title: str) -> str:
    """Returns the table of choices: latency against degradation."""
    lines = [title, f"{'nats at most':>14}" + "".join(f"{each:>14}" for each in _COLUMNS)]
    dense = found[0][1].seconds
    for bound, choice in found:
        cells = (
            f"{kept_keys(choice):.1%}",
            f"{choice.kl:.2g}",
            f"{choice.recall_loss:.1%}",
            f"{1e3 * choice.seconds:,.2f}",
            f"{choice.seconds / dense:.3f}",
            ",".join(map(str, choice.partitions)),
        )
        lines.append(f"{bound:>14g}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join([*lines, "(predicted, with the calibration's headroom; seconds simulated)"])


_COLUMNS = ("keys kept", "nats", "needles lost", "ms", "over dense", "partitions")


def choices_as_json(found: Sequence[tuple[float, Configuration]]) -> list[dict[str, object]]:
    """Returns the figures of choices."""
    return [
        {
            "max_degradation": bound,
            "kept_keys": kept_keys(choice),
            "nats": choice.kl,
            "recall_loss": choice.recall_loss,
            "seconds": choice.seconds,
            "micro_partitions": list(choice.partitions),
        }
        for bound, choice in found
    ]


def _is_given(args: argparse.Namespace) -> bool:
    """Returns whether a calibration is given, with a bound.

    Raises:
        ValueError: the flags contradict each other.
    """
    given = [name for name in _BOUNDS if getattr(args, name) is not None]
    if args.calibration is None:
        if given:
            raise ValueError(
                f"{flag_of(given[0])} {getattr(args, given[0])} needs --calibration FILE: make one "
                "by `distca tune sparsity MODEL --prompts FILE`"
            )
        return False
    if not given or ("max_ttft" in given and len(given) > 1):
        raise ValueError(
            "--calibration needs a bound: give --max-degradation and --max-recall-loss, or one of "
            "them, or --max-ttft"
        )
    if args.sparsity is not None:
        raise ValueError(f"--sparsity {args.sparsity} and --calibration contradict: give one")
    return True


def _configurator(
    file: CalibrationFile,
    costs: InferenceCosts,
    cost_model: CostModel,
    tokens: int,
    levels: Levels,
    partitions: Partitions | None,
) -> Configurator:
    file.measured_on.check_levels(levels)
    tried = None if partitions is None else [partitions]
    latency = SparseLatency(costs, cost_model, levels, tokens)
    return Configurator(file.calibration, latency, tokens, tried)


def _chosen(args: argparse.Namespace, configurator: Configurator) -> Configuration:
    """Returns the choice within the flags' bound, and logs it."""
    if args.max_ttft is not None:
        found = configurator.least_degraded(args.max_ttft)
    else:
        kl, loss = args.max_degradation, args.max_recall_loss
        found = configurator.fastest(
            float("inf") if kl is None else kl, float("inf") if loss is None else loss
        )
    dense = configurator.fastest(0.0)
    sys.stderr.write(
        f"{args.calibration}: {kept_keys(found):.0%} of far keys are kept, at most {found.kl:.2g} "
        f"nats from dense attention and {found.recall_loss:.1%} of needles lost; prompts of "
        f"{configurator.tokens:,} tokens have their first token after {found.seconds:.3g} s, "
        f"{dense.seconds:.3g} s with all keys, simulated\n"
    )
    return found


def kept_keys(found: Configuration) -> float:
    """Share of far keys that layers keep on average."""
    ratios = [ratio for heads in found.sparsity.keys for levels in heads for ratio in levels[1:]]
    return sum(ratios) / len(ratios)
