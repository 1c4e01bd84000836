"""`distca plan prefill` on GPUs that split the weights and share rows: bytes of both layouts by
phase, and a picture."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from distca.commands.command_line import make_figure
from distca.commands.serving_report import table
from distca.cost.link import Links
from distca.cost.volume import PlanBytes
from distca.palette import colour_in_turn
from distca.plan import SteppedPlan
from distca.schedule.serving.csps.layouts import (
    LAYOUTS,
    Layout,
    LayoutChoice,
    SharedRows,
    SplitModel,
    even_rows,
)
from distca.simulate.serving import (
    InferenceCosts,
    described_split,
    gpu_links,
)
from distca.whole_file import writing
from distca.wording import counted


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


def _described(
    choice: LayoutChoice, plan: SteppedPlan, costs: InferenceCosts
) -> tuple[SplitModel, SharedRows, str]:
    split, tokens = described_split(costs, choice), int(plan.plan.own_tokens_per_rank().sum())
    shared, cached = split.share(tokens), int(plan.plan.lengths.sum()) - tokens
    assert shared is not None, "there are tokens for every GPU"
    return split, shared, layout_title(split, tokens, cached, shared.layout)


def layout_title(split: SplitModel, tokens: int, cached: int, layout: Layout) -> str:
    """Returns a line about what is fed."""
    return (
        f"prefill on {counted(split.layer.ranks, 'GPU')} that split the weights: "
        f"{tokens:,} new tokens, {cached:,} cached; {layout}"
    )


def layer_bytes(split: SplitModel, tokens: int) -> dict[str, dict[str, PlanBytes]]:
    """Returns the bytes of a layer's attention with each layout, and of its MLP."""
    layer, rows = split.layer, even_rows(tokens, split.layer.ranks)
    found: dict[str, PlanBytes] = {each: layer.attention_bytes(each, rows) for each in LAYOUTS}
    found["MLP"] = layer.block_bytes(rows)
    return {
        name: {phase: PlanBytes({phase: each}) for phase, each in moved.messages.items()}
        for name, moved in found.items()
    }


def format_layouts(split: SplitModel, tokens: int, title: str, links: Links) -> str:
    """Returns the table of a layer's bytes."""
    rows = [["", "MB", "MB sent", "between nodes"]]
    for name, phases in layer_bytes(split, tokens).items():
        whole = PlanBytes({phase: each.messages[phase] for phase, each in phases.items()})
        for what, moved in {name: whole, **phases}.items():
            if not moved.total:
                continue
            cells = moved.total, int(moved.sent().max()), links.between_nodes(moved)
            whole_or_part = what if what == name else f"  {what}"
            rows.append([whole_or_part, *(f"{cell / 1e6:,.3f}" for cell in cells)])
    said = "a layer; sent: most of a GPU; the MLP's are the same with both"
    return "\n".join([title, *table(rows, 32), said])


def layouts_as_json(split: SplitModel, tokens: int, layout: Layout) -> dict[str, object]:
    """Returns the bytes of a layer by phase."""
    return {
        "strategy": layout,
        "bytes": {
            name: {phase: moved.total for phase, moved in phases.items()}
            for name, phases in layer_bytes(split, tokens).items()
        },
    }


def plot_layouts(split: SplitModel, tokens: int, title: str, path: Path) -> None:
    """Draws a layer's bytes by phase: attention with each layout, and the MLP.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = make_figure(figsize=(7, 4))
    axes = figure.subplots()
    colour_in_turn(axes)
    found = layer_bytes(split, tokens)
    begins = dict.fromkeys(found, 0.0)
    for phase in dict.fromkeys(phase for phases in found.values() for phase in phases):
        sizes = [phases[phase].total / 1e6 if phase in phases else 0.0 for phases in found.values()]
        if any(sizes):
            axes.bar(list(found), sizes, bottom=list(begins.values()), width=0.6, label=phase)
        begins = {
            name: begin + size for (name, begin), size in zip(begins.items(), sizes, strict=True)
        }
    axes.set_ylabel("MB a layer")
    axes.legend()
    figure.suptitle(title)
    with writing(path) as written:
        figure.savefig(written, dpi=110)
