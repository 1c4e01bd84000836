"""The report of `distca report` as a page: runs, losses, timeline, and the first plan."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from distca.commands import html_page
from distca.commands.html_page import COLOURS, Cell, Span
from distca.commands.page_sections import servers
from distca.commands.plan_page import sections_of_plan
from distca.cost.volume import AttentionShape
from distca.plan import Plan
from distca.schedule import ScheduleConfig
from distca.timeline import TimelineEvent

_MOST_RANKS = 32
"""Ranks of the timeline; more could not be read."""
_MOST_STEPS = 20
"""Most rows of the table of losses."""
_SIZE = 1000
"""Width and height of drawings' coordinates."""
_LANES = ("ticks", "exchange", "kernels")


def page_of(
    command: str,
    answer: str,
    figures: Mapping[str, Any],
    differ: str,
    trace: Mapping[str, list[TimelineEvent]],
    plan: tuple[Plan, dict[str, Any]] | None,
) -> str:
    """Returns the page.

    Args:
        command: what was typed.
        answer: how runs went.
        figures: all figures, as `--json` prints them.
        differ: how much losses differ and why; "": there are not several runs.
        trace: name and spans of each rank in a timeline; empty: there is none.
        plan: a plan, and what was saved with it, or None.
    """
    parts = []
    if figures["runs"]:
        parts.append(html_page.section("Runs", _runs(figures["runs"])))
    if any(figures["losses"].values()):
        said = [html_page.paragraph(differ)] if differ else []
        parts.append(html_page.section("Loss", *said, *_losses(figures["losses"])))
    if trace:
        seconds = figures["timeline_seconds"]
        parts.append(html_page.section("Where the time of a rank goes", *_seconds(seconds)))
        parts.append(html_page.section("Timeline", *_timeline(trace)))
    trained = None
    if plan is not None:
        made, saved = plan
        trained = saved.get("command")
        if "shape" in saved:
            config = ScheduleConfig(
                tolerance=saved.get("tolerance", ScheduleConfig.tolerance),
                shape=AttentionShape(**saved["shape"]),
            )
            parts.append(html_page.section("Servers in the first plan", servers(made, config)))
            parts += sections_of_plan(made, config)
    if trained:
        parts.append(html_page.section("Command of the run", html_page.shell(str(trained))))
    parts.append(html_page.section("Command of this page", html_page.shell(command)))
    return html_page.page("distca report", answer, figures, parts)


def _runs(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """A table with a row for each figure and a bar for each run."""
    names = dict.fromkeys(name for run in runs.values() for name in run["medians"])
    rows = []
    for name in names:
        values = [run["medians"].get(name) for run in runs.values()]
        most = max(value for value in values if value is not None) or 1.0
        cells = [
            Cell("") if value is None else Cell(f"{value:.4g}", value / most) for value in values
        ]
        rows.append((name, cells))
    caption = "Medians of all log lines but the first"
    return html_page.table(caption, ["figure", *runs], rows)


def _losses(losses: Mapping[str, Sequence[Sequence[float]]]) -> tuple[str, str]:
    """A line for each run, and a table of some iterations."""
    points = [point for each in losses.values() for point in each]
    left, right = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    across, up = _SIZE / ((right - left) or 1), _SIZE / ((high - low) or 1)
    lines, keys = [], []
    for at, (name, each) in enumerate(losses.items()):
        corners = " ".join(f"{(s - left) * across:.1f},{(high - v) * up:.1f}" for s, v in each)
        lines.append(
            f'<polyline points="{corners}" fill="none" stroke="{COLOURS[at % len(COLOURS)]}" '
            f'stroke-width="2" vector-effect="non-scaling-stroke"><title>{html.escape(name)}'
            "</title></polyline>"
        )
        keys.append(html_page.legend_cell(name, at))
    name = f"Loss from iteration {left:g} to {right:g}, from {high:.4g} at the top to {low:.4g}"
    drawn = f"<p>{' &nbsp; '.join(keys)}</p>{html_page.drawing(name, _SIZE, _SIZE, lines)}"
    by_step = {run: {each[0]: each[1] for each in its} for run, its in losses.items()}
    steps = sorted({step for step, _ in points})
    shown = [steps[at * (len(steps) - 1) // (_MOST_STEPS - 1)] for at in range(_MOST_STEPS)]
    rows = [
        (
            f"{step:g}",
            [Cell(f"{each[step]:.6g}" if step in each else "") for each in by_step.values()],
        )
        for step in dict.fromkeys(shown)
    ]
    return drawn, html_page.table(f"{name}; some iterations", ["iteration", *losses], rows)


def _seconds(seconds: Mapping[str, Mapping[str, float]]) -> tuple[str, str, str]:
    """Bars and a table of what each rank's recorded time is spent on."""
    shown = dict(list(seconds.items())[:_MOST_RANKS])
    parts = list(next(iter(shown.values())))
    bars = [(name, [each[part] for part in parts]) for name, each in shown.items()]
    rows = [(name, [Cell(f"{each[part]:.4f}") for part in parts]) for name, each in shown.items()]
    key = " &nbsp; ".join(html_page.legend_cell(part, at) for at, part in enumerate(parts))
    table = html_page.table("Seconds of the timeline", ["rank", *parts], rows)
    return f'<p aria-hidden="true">{key}</p>', html_page.stacked_bars(parts, bars), table


def _timeline(trace: Mapping[str, list[TimelineEvent]]) -> tuple[str, str]:
    ranks = list(trace.items())[:_MOST_RANKS]
    rows = [f"{name.partition(':')[0]}, {lane}" for name, _ in ranks for lane in _LANES]
    spans = [
        Span(
            len(_LANES) * number + _LANES.index(each["cat"]),
            each["ts"] / 1e6,
            (each["ts"] + each["dur"]) / 1e6,
            each["name"],
            _kind(each),
        )
        for number, (_, events) in enumerate(ranks)
        for each in sorted(events, key=lambda each: -each["dur"])
        if each["cat"] in _LANES
    ]
    left_out = len(trace) - len(ranks)
    said = f"The first {len(ranks)} ranks of {len(trace)}. " * (left_out > 0)
    end = max((span.end for span in spans), default=1.0)
    return (
        html_page.paragraph(f"{said}Point at a bar to see what it is and when it runs."),
        html_page.timeline("timeline", rows, spans, end),
    )


def _kind(event: TimelineEvent) -> str:
    """What spans of one colour have in common."""
    if event["cat"] == "kernels":
        return "core attention"
    if event["cat"] == "ticks":
        phase, _, runs = event["name"].partition(": ")
        return "serve" if runs == "serve" else phase
    return "waiting" if event["name"].startswith("wait") else "exchange"
