"""Which CUDA graphs launch a simulated decode step, `--cuda-graphs`, and what waiting for hosts
says."""

from __future__ import annotations

import argparse
from typing import get_args

from distca.commands.described import Group
from distca.simulate import Outcome
from distca.simulate.serving import (
    MOST_GRAPH_ROWS,
    NO_OVERHEADS,
    PREFILL_OVERHEADS,
    Captured,
    Graphs,
    InferenceCosts,
    Overheads,
    captured_by_engine,
    decode_overheads,
)

ENGINE: Graphs = "engine"
_WHOLE: Graphs = "whole"
_NOTICED = 0.02
"""Share of a step's time from which waiting for hosts is explained."""


def add_graphs_flag(group: Group) -> None:
    """Adds the flag of `captured_steps`."""
    group.add_argument(
        "--cuda-graphs",
        choices=get_args(Graphs),
        help="CUDA graphs of decode steps. engine: those of DistCA's engine. One rank with one GPU "
        "captures whole steps. Ranks that share keys capture layers without their attention. With "
        "tensor parallelism hosts launch every kernel. whole: whole steps on any ranks, as in "
        "published systems. Default: engine.",
    )


def check_graphs_flag(args: argparse.Namespace) -> None:
    """Checks the flag.

    Raises:
        ValueError: it would change nothing.
    """
    if args.baseline_ideal and args.cuda_graphs is not None:
        raise ValueError(
            f"--baseline-ideal charges no launches: leave out --cuda-graphs {args.cuda_graphs}"
        )


def captured_steps(args: argparse.Namespace, ranks: int, sequences: int) -> Captured:
    """Returns what is captured of a decode step.

    Args:
        args: flags of `add_graphs_flag`; without them the engine captures.
        ranks: ranks that share the keys.
        sequences: sequences that are decoded.
    """
    if getattr(args, "cuda_graphs", None) == _WHOLE:
        return "steps"
    return captured_by_engine(ranks, args.tensor_parallel_size, -(-sequences // ranks))


def overheads_of(args: argparse.Namespace, captured: Captured) -> tuple[Overheads, Overheads]:
    """Returns what prefills and decode steps cost beside their work; nothing where nothing is
    charged.

    Args:
        args: flags of `add_charge_flags`.
        captured: what CUDA graphs hold of a decode step.
    """
    if args.baseline_ideal:
        return NO_OVERHEADS, NO_OVERHEADS
    return PREFILL_OVERHEADS, decode_overheads(captured)


def graphs_line(args: argparse.Namespace, captured: Captured, ranks: int, sequences: int) -> str:
    """Says whose launches of a decode step are simulated.

    Args:
        args, ranks, sequences: as for `captured_steps`.
        captured: what it returned.
    """
    engine = captured_by_engine(ranks, args.tensor_parallel_size, -(-sequences // ranks))
    if getattr(args, "cuda_graphs", None) == _WHOLE:
        said = "CUDA graphs hold whole steps, as in published systems"
        if engine == "steps":
            return f"{said} and in DistCA's engine."
        return f"{said}. DistCA's engine has none: --cuda-graphs {ENGINE} simulates it."
    why = {
        "steps": "CUDA graphs hold whole steps",
        "layers": "ranks share keys, so CUDA graphs hold layers without their attention",
        "nothing": f"no CUDA graphs have more than {MOST_GRAPH_ROWS} rows of a rank"
        if args.tensor_parallel_size == 1
        else "no CUDA graphs hold the collectives of tensor parallelism",
    }[engine]
    other = "" if engine == "steps" else f" --cuda-graphs {_WHOLE} simulates graphs of whole steps."
    return f"Launches are those of DistCA's engine: {why}.{other}"


def host_line(outcome: Outcome, costs: InferenceCosts) -> str | None:
    """Says that a step takes as long as its launches, whatever GPUs there are; None: it doesn't.

    Args:
        outcome: the step.
        costs: costs of the layers, in a step of its kind.
    """
    waits = outcome.spent["host"] - costs.overheads.iteration_seconds
    if waits < _NOTICED * outcome.seconds:
        return None
    layers, each = costs.model.layers, 1e3 * costs.launch_seconds()
    return (
        f"Launches decide: hosts take {layers * each:,.2f} ms for {layers} layers, {each:.2f} ms "
        f"each, and GPUs wait {1e3 * waits:,.2f} ms for them. More GPUs would not shorten this."
    )
