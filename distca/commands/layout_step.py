"""`distca plan prefill` and `simulate prefill` on GPUs that split the weights and share rows.

They report bytes of both layouts by phase, seconds, and a picture.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from distca.commands.command_line import make_figure
from distca.commands.serving_report import as_json, overhead_lines, spent_lines
from distca.commands.simulate_report import charged_line
from distca.cost.kernel_time import CostModel
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
from distca.simulate import Outcome, save_trace
from distca.simulate.serving import (
    InferenceCosts,
    described_split,
    gpu_links,
    simulate_shared,
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
    lines = [title, f"{'':32}{'MB':>16}{'MB sent':>16}{'between nodes':>16}"]
    for name, phases in layer_bytes(split, tokens).items():
        whole = PlanBytes({phase: each.messages[phase] for phase, each in phases.items()})
        for what, moved in {name: whole, **phases}.items():
            if not moved.total:
                continue
            cells = moved.total, int(moved.sent().max()), links.between_nodes(moved)
            whole_or_part = what if what == name else f"  {what}"
            shown = (f"{cell / 1e6:>16,.3f}" for cell in cells)
            lines.append(f"{whole_or_part:32}" + "".join(shown))
    lines.append("a layer; sent: most of a GPU; the MLP's are the same with both")
    return "\n".join(lines)


def layouts_as_json(split: SplitModel, tokens: int, layout: Layout) -> dict[str, object]:
    """Returns the bytes of a layer by phase."""
    return {
        "strategy": layout,
        "bytes": {
            name: {phase: moved.total for phase, moved in phases.items()}
            for name, phases in layer_bytes(split, tokens).items()
        },
    }


def format_simulated_layouts(
    title: str, found: Mapping[str, Outcome], costs: InferenceCosts
) -> str:
    """Returns the table of simulated layouts."""
    lines = [
        f"{title}; {costs.cluster.name}; simulated, not measured",
        f"{'':10}{'ms':>12}{'computes':>12}{'waits':>12}{'MB sent':>12}{'GB a GPU':>12}",
    ]
    for name, outcome in found.items():
        sent = sum(outcome.bytes_sent.values()).max()  # type: ignore[union-attr]
        cells = (
            *(1e3 * each for each in (outcome.seconds, outcome.computed.max())),
            *(1e3 * outcome.exposed.max(), sent / 1e6, outcome.memory_bytes.max() / 1e9),
        )
        fits = "" if outcome.fits else "  out of memory"
        lines.append(f"{name:10}" + "".join(f"{cell:>12,.2f}" for cell in cells) + fits)
    lines.append("(of the GPU with most; computes: with linear layers and copies)")
    lines += spent_lines(found, "GPU")
    charged = charged_line(costs.cluster.charges), *overhead_lines(costs.overheads)
    return "\n".join([*lines, *charged])


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
