"""Reports of `distca plan` and `distca simulate` for prefills whose rows GPUs share that split the
weights: bytes of both layouts by phase, seconds, and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from distca.commands.command_line import make_figure
from distca.commands.serving_report import overhead_lines, spent_lines
from distca.commands.simulate_report import charged_line
from distca.cost.link import Links
from distca.cost.volume import PlanBytes
from distca.palette import colour_in_turn
from distca.schedule.serving.csps.layouts import LAYOUTS, Layout, SplitModel, even_rows
from distca.simulate import Outcome
from distca.simulate.serving import InferenceCosts
from distca.whole_file import writing
from distca.wording import counted


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
