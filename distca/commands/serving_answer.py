"""What `distca simulate prefill` and `distca simulate decode` print: an answer, then its parts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

import numpy as np

from distca.commands.compared_prefills import PLAIN_TP, Compared
from distca.commands.decode_graphs import graphs_line, host_line
from distca.commands.described import RUNAHEAD
from distca.commands.served_sparsity import CSPS
from distca.commands.served_strategy import SEARCHED
from distca.commands.serving_case import DATA_PARALLEL, StepCase
from distca.commands.serving_report import (
    assumption_lines,
    fastest,
    format_outcomes,
    step_lines,
    title_of,
)
from distca.schedule.serving import Strategy
from distca.schedule.serving.balanced import NAME as TILES
from distca.simulate import Outcome
from distca.simulate.serving import InferenceCosts
from distca.wording import counted


def format_prefill(
    args: argparse.Namespace,
    ways: Compared,
    found: Mapping[str, Outcome],
    name: str,
    choices: Mapping[str, str],
) -> str:
    """Returns the report of a prefill.

    Args:
        args: flags of `distca simulate prefill`.
        ways: ways that are compared.
        found: what each takes.
        name: the way that flags ask for, or that auto chooses.
        choices: what each selector chooses; empty: nobody chooses.
    """
    way = ways.ways[name]
    case, costs = way.case, way.case.costs
    chosen, shares_rows = case.plan(way.strategy), way.layout is not None
    lines = [_title(title_of(chosen.plan, way.name), costs)]
    lines += format_outcomes(
        found, "GPU" if shares_rows else "rank", name if ways.alternatives else None
    )
    lines += _notes(args, ways)
    lines += [f"{name} does not fit here: {why}" for name, why in ways.misfits.items()]
    if choices:
        lines += _choices(args, case, found, choices)
    if not shares_rows:
        lines += step_lines(chosen, costs, case.cost_model, way.name)
    if launches := host_line(found[name], costs):
        lines.append(launches)
    return "\n".join([*lines, *assumption_lines(costs, args.profile, costs.overheads)])


def format_decode(args: argparse.Namespace, case: StepCase, outcome: Outcome) -> str:
    """Returns the report of a decode step."""
    name: Strategy = "pass-q"
    ranks = case.new.world_size
    of_decode, plan = case.costs.of_decode(), case.plan(name)
    lines = [_title(title_of(plan.plan), case.costs)]
    if hasattr(args, "new_tokens"):
        lines.append(
            "One new token over cached ones is a decode step, as the engine runs it, whatever the "
            "strategy of prefills."
        )
    lines += format_outcomes({name: outcome})
    lines += step_lines(plan, case.costs, case.cost_model, name)
    lines += assumption_lines(case.costs, args.profile, of_decode.overheads)
    if not args.baseline_ideal:
        lines.append(graphs_line(args, case.captured, ranks, case.sequences))
    if launches := host_line(outcome, of_decode):
        lines.append(launches)
    return "\n".join(lines)


def _title(what: str, costs: InferenceCosts) -> str:
    gpus, cluster = counted(costs.tensor_parallel, "GPU"), costs.cluster.name
    return f"{what}; each rank {gpus} of {cluster}; simulated, not measured"


def _notes(args: argparse.Namespace, ways: Compared) -> Iterator[str]:
    """Explains ways by the flags that run them."""
    names = ways.ways.keys()
    if ways.alternatives and PLAIN_TP in names:
        size = ways.ways[PLAIN_TP].case.costs.tensor_parallel
        yield (
            f"{PLAIN_TP}: --context-parallel-size 1 --tensor-parallel-size {size} "
            "--prefill-strategy pass-kv"
        )
    if ways.alternatives and RUNAHEAD in names:
        yield f"{RUNAHEAD}: with --partition {SEARCHED}"
    if ways.alternatives and CSPS in names:
        yield f"{CSPS}: nothing is dropped; --sparsity drops keys, which changes answers"
    if DATA_PARALLEL in names or TILES in names:
        yield (
            f"{DATA_PARALLEL}, {TILES}: each prompt on one rank, the first with least to compute; "
            "balanced_prompts.md has many iterations of chunks"
        )
    new = next(iter(ways.ways.values())).case.new
    tokens = np.bincount(new.document, weights=new.end - new.start)
    if (tokens[new.document[new.start > 0]] == 1).any():
        yield "Here sequences with one new token are prefills, too. The engine decodes them."


def _choices(
    args: argparse.Namespace,
    case: StepCase,
    found: Mapping[str, Outcome],
    choices: Mapping[str, str],
) -> Iterator[str]:
    """Says what selectors choose, and how much longer it takes than the fastest strategy."""
    said = (
        f"--selector {who} chooses {what}{_beside(found, what, choices['simulated'])}"
        for who, what in choices.items()
    )
    yield "; ".join(said)
    engine = case.choose_as_engine(args.selector)
    if args.selector == "simulated" and engine != choices["simulated"]:
        yield (
            "The engine simulates less, and nothing of short prefills: it would choose "
            f"{engine}{_beside(found, engine, choices['simulated'])}."
        )
    best = fastest(found)
    if best not in choices.values():
        yield f"auto chooses between these two. For the fastest, give --prefill-strategy {best}."


def _beside(found: Mapping[str, Outcome], what: str, best: str) -> str:
    """Says how much longer a strategy takes than another, if it does."""
    ratio = found[what].seconds / found[best].seconds
    return f", predicted {ratio:.2f} times as long" if ratio >= 1.005 else ""
