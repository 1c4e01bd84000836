"""`distca plan prefill` and `simulate prefill` on GPUs that split the weights and share rows."""

from __future__ import annotations

import argparse
import json
import sys

from distca.commands.layout_report import (
    format_layouts,
    format_simulated_layouts,
    layout_title,
    layouts_as_json,
    plot_layouts,
)
from distca.commands.serving_report import as_json
from distca.cost.kernel_time import CostModel
from distca.plan import SteppedPlan
from distca.schedule.serving.csps.layouts import (
    LAYOUTS,
    LayoutChoice,
    SharedRows,
    SplitModel,
)
from distca.simulate import Outcome, save_trace
from distca.simulate.serving import (
    InferenceCosts,
    described_split,
    gpu_links,
    simulate_shared,
)


def plan_layouts(
    args: argparse.Namespace, choice: LayoutChoice, plan: SteppedPlan, costs: InferenceCosts
) -> int:
    """Prints what either layout sends; returns the exit status.

    Args:
        args: flags of `distca plan prefill`.
        choice: layout, or how it is chosen.
        plan: plan of a layer, over all tokens on one rank, which all GPUs are.
        costs: costs of the model on its cluster.

    Raises:
        ValueError: a flag asks for a plan among ranks.
    """
    if args.save is not None:
        raise ValueError("--save has no plan to write: one rank of GPUs has all tokens")
    split, shared, title = _described(choice, plan, costs)
    tokens = int(shared.rows.sum())
    if args.json:
        sys.stdout.write(json.dumps(layouts_as_json(split, tokens, shared.layout)) + "\n")
    else:
        sys.stdout.write(format_layouts(split, tokens, title, gpu_links(costs)) + "\n")
    if args.plot is not None:
        plot_layouts(split, tokens, title, args.plot)
    return 0


def simulate_layouts(
    args: argparse.Namespace,
    choice: LayoutChoice,
    plan: SteppedPlan,
    costs: InferenceCosts,
    cost_model: CostModel,
) -> int:
    """Prints how long the prefill takes with either layout; returns the exit status.

    Args:
        args: flags of `distca simulate prefill`.
        choice, plan, costs: as for `plan_layouts`.
        cost_model: seconds of tasks.
    """
    split, chosen, title = _described(choice, plan, costs)
    found: dict[str, Outcome] = {}
    for layout in LAYOUTS:
        shared = SplitModel(split.layer, split.layers, layout).share(int(chosen.rows.sum()))
        assert shared is not None, "there are tokens for every GPU"
        records = args.trace is not None and layout == chosen.layout
        plans = [plan] * split.layers
        found[layout] = simulate_shared(split, shared, plans, costs, cost_model, records)
    if args.json:
        sys.stdout.write(json.dumps(as_json(found, chosen.layout, {}), indent=1) + "\n")
    else:
        sys.stdout.write(format_simulated_layouts(title, found, costs) + "\n")
    if args.trace is not None:
        save_trace(args.trace, found[chosen.layout])
    return 0


def _described(
    choice: LayoutChoice, plan: SteppedPlan, costs: InferenceCosts
) -> tuple[SplitModel, SharedRows, str]:
    split, tokens = described_split(costs, choice), int(plan.plan.own_tokens_per_rank().sum())
    shared, cached = split.share(tokens), int(plan.plan.lengths.sum()) - tokens
    assert shared is not None, "there are tokens for every GPU"
    return split, shared, layout_title(split, tokens, cached, shared.layout)
